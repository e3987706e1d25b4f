"""A real PostgreSQL of its own for tests: a cluster in a temporary folder, on 127.0.0.1, which can be killed.

It needs the programs of PostgreSQL 13 or later, such as Debian's package `postgresql`; without them a test is skipped.
PostgreSQL does not run as root: then it runs as the user `postgres`, else as `nobody`.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

USER = "stenograph"

_PACKAGES = Path("/usr/lib/postgresql")
_LOOK_S = 0.01


def programs() -> Path | None:
    """The folder of `initdb` and `pg_ctl`; None if there is none."""
    folders = sorted(_PACKAGES.glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    if (found := shutil.which("initdb")) is not None:
        folders.append(Path(found).resolve().parent)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


class PostgresServer:
    """A cluster. `start` and `kill` may be repeated; what was committed stays. Its methods wait."""

    def __init__(self, folder: Path, bin_folder: Path, *, syncs: bool) -> None:
        """Make the cluster, empty. `syncs`: it would survive a loss of power, which no test here makes."""
        self._syncs = syncs
        self._folder = folder
        self._bin = bin_folder
        self._user = _user()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        self._run("initdb", "-D", "data", "-A", "trust", "-U", USER, "--locale=C", "-E", "UTF8", "--no-sync")

    def __repr__(self) -> str:
        return f"<PostgresServer on port {self.port}>"

    def url(self, database: str = "postgres", **options: str) -> str:
        """The address of a database, for `--store`. `options` are PostgreSQL's own settings."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}" + (f"?{query}" if query else "")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = (
            f"-p {self.port} -c fsync={'on' if self._syncs else 'off'} -c listen_addresses=127.0.0.1"
            f" -c unix_socket_directories={self._folder}"
        )
        self._run("pg_ctl", "-D", "data", "-w", "-t", "60", "-l", "log", "-o", options, "start")

    def kill(self) -> None:
        """Kill all of its processes at once."""
        number = self._process
        os.killpg(number, signal.SIGKILL)
        while _is_there(number):
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop it, if it runs."""
        if (self._folder / "data" / "postmaster.pid").exists() and _is_there(self._process):
            self._run("pg_ctl", "-D", "data", "-w", "-m", "immediate", "stop")

    @property
    def _process(self) -> int:
        """The number of the first process, which leads the group of all of them."""
        return int((self._folder / "data" / "postmaster.pid").read_text().split()[0])

    def _run(self, program: str, *arguments: str) -> None:
        user = self._user
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
        )
        assert done.returncode == 0, f"{program} failed; the server's log: {self._log()}"

    def _log(self) -> str:
        path = self._folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else "there is none"


def _is_there(number: int) -> bool:
    """Whether a process of the group is there."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def _user() -> pwd.struct_passwd | None:
    """The user to run as; None for the one who runs this."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


@contextmanager
def postgres_server(bin_folder: Path, *, syncs: bool = False) -> Generator[PostgresServer]:
    """A running server with an empty cluster, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="stenograph-postgres-"))
    try:
        server = PostgresServer(folder, bin_folder, syncs=syncs)
        try:
            server.start()
            yield server
        finally:
            server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
