"""A release: sdist and wheel, built, and installed in an empty environment, far from the repository.

It needs `build` and a package registry, so `scripts/test-packaging` alone runs it.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import stenograph
from standins.tiny.llama import write_tiny_folder

pytest.importorskip("build", reason="scripts/test-packaging installs it")

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)

CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "STENOGRAPH_", "VIRTUAL_"))
}


def ran(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a clean copy of what git tracks, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("release")
    ran("git", "clone", "--quiet", str(ROOT), str(folder / "source"), cwd=folder)
    ran(sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(folder / "source"), cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an empty environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("empty")
    ran(sys.executable, "-m", "venv", str(folder / "env"), cwd=folder)
    (wheel,) = dist.glob("*.whl")
    ran(str(folder / "env/bin/pip"), "install", "--quiet", str(wheel), cwd=folder)
    return folder / "env" / "bin"


def test_both_have_the_version_of_the_one_place(dist: Path) -> None:
    version = stenograph.__version__
    names = sorted(path.name for path in dist.iterdir())
    assert names == [f"stenograph-{version}-py3-none-any.whl", f"stenograph-{version}.tar.gz"]


def test_the_wheel_has_the_code_its_data_and_every_licence(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    source = ROOT / "src"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert modules <= set(inside)
    vendor = "stenograph/console/static/vendor"
    vendored = {f"{vendor}/{path.name}" for path in (source / vendor).iterdir()}
    assert vendored | {"stenograph/py.typed", "stenograph/session/side.toml"} <= set(inside)
    licences = {name.rsplit("/", 1)[1] for name in inside if "/licenses/" in name}
    assert licences == {"LICENSE", "LICENSE-htm.txt", "LICENSE-preact.txt", "LICENSE-uplot.txt", "NOTICE.txt"}
    assert not [name for name in inside if name.startswith(("tests/", "benchmarks/", "standins/", "scripts/"))]


def test_the_sdist_is_enough_to_build_from(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        names = [name.split("/", 1)[1] for name in opened.getnames() if "/" in name]
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(names)


def server_below(pid: int) -> int:
    """The server that a process has become, or has started: buildah passes no signal on to it."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if b"python" in words[0]:
        return pid
    below = [
        int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
    ]
    return next((server_below(one) for one in below), pid)


async def chats(command: Sequence[str], cwd: Path) -> None:
    """The server of a command answers a chat, and drains when it is asked to."""
    child = await asyncio.create_subprocess_exec(*command, cwd=cwd, env=CLEAN, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        found = re.search(rb"http://\S+", await child.stdout.readline())
        assert found is not None
        asked: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        async with (
            aiohttp.ClientSession() as client,
            client.post(found[0].decode() + "/v1/chat/completions", json=asked) as reply,
        ):
            assert (reply.status, (await reply.json())["usage"]["completion_tokens"]) == (200, 2)
    finally:
        os.kill(server_below(child.pid), signal.SIGTERM)
        assert await child.wait() == 0


async def test_an_empty_environment_serves_a_chat(installed: Path, tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    assert ran(str(installed / "stenograph"), "--version", cwd=tmp_path) == f"stenograph {stenograph.__version__}\n"
    where = ran(str(installed / "python"), "-c", "import stenograph.client as c; print(c.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    await chats([str(installed / "stenograph"), "serve", "--port", "0", "--model", str(model)], tmp_path)


BUILDERS = ("docker", "podman", "buildah")
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
BASE = "localhost/stenograph-test-base"
IMAGE = f"localhost/stenograph-test:{stenograph.__version__}"


@pytest.fixture(scope="module")
def builder() -> str:
    """A builder of images that works here."""
    for name in filter(shutil.which, BUILDERS):
        if subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return pytest.skip("no builder of containers is at hand")


@pytest.fixture(scope="module")
def image(builder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image of packaging/Dockerfile. Its base is the file's own, or the system of a tar that IMAGE_BASE names.

    pip trusts in it whom this machine trusts.
    """
    folder, given, made = tmp_path_factory.mktemp("image"), list[str](), [IMAGE]
    if system := os.environ.get("IMAGE_BASE"):
        (folder / "Dockerfile").write_text(f"FROM scratch\nADD {Path(system).name} /\n")
        where = [*("-f", str(folder / "Dockerfile")), str(Path(system).parent)]
        ran(builder, "build", "--quiet", "-t", BASE, *where, cwd=folder)
        given, made = ["--build-arg", f"BASE={BASE}"], [IMAGE, BASE]
    if builder != "docker" and BUNDLE.exists():
        (folder / "pip.conf").write_text(f"[global]\ncert={BUNDLE}\n")
        given += ["-v", f"{BUNDLE}:{BUNDLE}:ro", "-v", f"{folder}/pip.conf:/etc/pip.conf:ro"]
    ran(builder, "build", "--quiet", *given, "-f", "packaging/Dockerfile", "-t", IMAGE, ".", cwd=ROOT)
    yield IMAGE
    ran(builder, "rmi", "--force", *made, cwd=folder)


def command_of(builder: str, image: str, mounted: Path, *arguments: str) -> list[str]:
    """The command that runs `stenograph serve` of the image as its user, on this machine's network."""
    mount = ["-v", f"{mounted}:/model:ro"]
    if builder != "buildah":
        return [builder, "run", "--rm", "--network", "host", *mount, image, *arguments]
    name = ran(builder, "from", image, cwd=ROOT).strip()
    entry = json.loads(ran(builder, "inspect", name, cwd=ROOT))["OCIv1"]["config"]["Entrypoint"]
    return [builder, "run", "--isolation", "chroot", *mount, name, "--", *entry, *arguments]


async def test_the_image_serves_a_chat(builder: str, image: str, tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    await chats(command_of(builder, image, model, "--port", "0", "--host", "127.0.0.1", "--model", "/model"), tmp_path)
