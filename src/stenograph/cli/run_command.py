"""`stenograph run [flags] -- COMMAND`: opens a session, runs a command with its address, and writes the samples.

The session is of a running server (`--url`), or of one that is started here with `serve`'s flags, on a free port unless
`--port` says otherwise, and stopped at the end. The terminal is the command's, so Ctrl-C ends the command; the server
stays until the samples are written.

Owns the exit code: the command's, 128 + the signal that killed it, 127 or 126 where it cannot be run; 1 where the
command succeeded but its samples cannot be got; 2 for whatever stops the start.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from stenograph.cli.agent_environment import agent_environment, write_agent_settings
from stenograph.cli.run_report import report_lines
from stenograph.cli.run_server import OwnServer, serve_flags
from stenograph.cli.session_calls import CallFailed, ServerCalls
from stenograph.core.errors import StartupError

EXIT_NO_SAMPLES = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""A shell's exit codes for a command that is not there, and for one that cannot be run."""
_FORMATS = {".json": "json", ".arrow": "arrow"}
"""Formats of samples, by a file's ending; any other is safetensors."""
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
"""Signals that one process gets, and that are for the command."""
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal sends to all of its foreground: the command has them already."""


Handler = Callable[[int, FrameType | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of one run. `serve_flags` are those for a server of its own; `api_key` is the server's, if it has one."""

    command: Sequence[str]
    url: str | None
    samples: Path | None
    serve_flags: Sequence[str]
    api_key: str | None


def run(options: dict[str, Any]) -> int:
    """Do what `run` is to do; returns the exit code. Raises StartupError, for a bad setting too."""
    command, url, samples = options.pop("agent"), options.pop("url"), options.pop("samples")
    flags, api_key = serve_flags(options, is_started=url is None)
    return run_command(RunOptions(command=command, url=url, samples=samples, serve_flags=flags, api_key=api_key))


def run_command(options: RunOptions) -> int:
    """Run a command on a session; returns the exit code. Raises StartupError before anything is started."""
    if not options.command:
        raise StartupError("run needs a COMMAND: write it after --, for example: stenograph run -- python my_agent.py")
    check_url(options.url, options.serve_flags)
    check_samples_file(options.samples)
    program = options.command[0]
    if shutil.which(program) is None:
        return _cannot_run(program, is_there=os.path.exists(program))
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        server = None if options.url is not None else stack.enter_context(OwnServer.started(options.serve_flags, say))
        url = options.url if server is None else server.url
        assert url is not None, "a server was named, or started"
        calls = ServerCalls(url, options.api_key)
        try:
            session = stack.enter_context(calls.session())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stenograph-run-")))
            model = calls.model()
        except CallFailed as error:
            raise StartupError(f"no session at {url}: {error}") from error
        write_agent_settings(folder, session, model=model)
        environment = agent_environment(os.environ, session, folder, model=model, api_key=options.api_key)
        with contextlib.nullcontext() if server is None else server.quiet():
            code = _run_child(options.command, environment)
        return _finished(calls, session.id, options.samples, code)


def say(line: str) -> None:
    """A line of ours: stdout is the command's."""
    print(f"stenograph: {line}", file=sys.stderr, flush=True)


def check_url(url: str | None, serve_flags: Sequence[str]) -> None:
    """Raise StartupError for a text that is no server's address, and for one beside flags of a server to be started."""
    if url is None:
        return
    if serve_flags:
        raise StartupError(
            f"--url names a running server, and {serve_flags[0]} is for one that is started here: leave one out"
        )
    path = urlsplit(url).path.rstrip("/") if url.startswith(("http://", "https://")) else None
    if path is None:
        raise StartupError(f"--url: {url!r} is no address: write it as http://HOST:PORT")
    if path.endswith("/v1") or "/sessions/" in path:
        raise StartupError(f"--url: {url!r} is more than the server's address: leave out {path}")


def check_samples_file(file: Path | None) -> None:
    """Raise StartupError for a file that cannot be written: an hour later that would be bad news."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise StartupError(f"--samples: cannot write {str(file)!r}: its folder is not there or not writable")


def _cannot_run(program: str, *, is_there: bool) -> int:
    if is_there:
        say(f"{program}: not executable")
        return _NOT_EXECUTABLE
    say(f"{program}: command not found")
    return _NOT_FOUND


def _run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end, in this terminal; returns its exit code as a shell has it."""
    with _signals_for_the_command() as children:
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            return _NOT_EXECUTABLE
        children.append(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_for_the_command() -> Generator[list["subprocess.Popen[bytes]"]]:
    """While inside, signals go to the command: ours are passed on, a terminal's it has got itself."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    def leave_to_it(number: int, frame: FrameType | None) -> None:
        if not _is_in_foreground():
            pass_on(number, frame)

    # Handlers, and not SIG_IGN, which the command would inherit.
    with _handled({**dict.fromkeys(_PASSED_ON, pass_on), **dict.fromkeys(_OF_THE_TERMINAL, leave_to_it)}):
        yield children


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Handler]) -> Generator[None]:
    """While inside, signals have these handlers."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """While inside, signals that ask a process to end do so by way of every `with`."""
    return _handled(dict.fromkeys(_PASSED_ON, _end))


def _end(number: int, frame: FrameType | None) -> None:
    """End, and on the way the server and the session: that is what `with` is for."""
    raise SystemExit(128 + number)


def _is_in_foreground() -> bool:
    """Whether a terminal's signals reach this process and the command alike."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _finished(calls: ServerCalls, session_id: str, file: Path | None, code: int) -> int:
    """Report on the session and write its samples; returns the exit code."""
    try:
        for line in report_lines(calls, session_id):
            say(line)
        if file is not None:
            say(write_samples(calls, session_id, file))
    except (CallFailed, OSError) as error:
        say(f"cannot get the session's samples: {error}")
        return code or EXIT_NO_SAMPLES
    return code


def write_samples(calls: ServerCalls, session_id: str, file: Path) -> str:
    """Write the samples, whole or not at all; returns a line about them. Raises CallFailed, OSError."""
    content = calls.samples(session_id, _FORMATS.get(file.suffix, "safetensors"))
    written = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        written.write_bytes(content)
        written.replace(file)
    finally:
        written.unlink(missing_ok=True)
    return f"samples in {file} ({len(content):,} bytes)"
