"""Fetches a repository's files into the Hugging Face cache.

Runs as a process of its own (`python -m stenograph.model.hub_download`), started by `hub`. `huggingface_hub` checks a
file's size and not its content, so each file is checked here against its hash on the hub, and removed if it differs.
The branch's name is written last: an interrupted fetch is never taken for a complete one, and the next fetch keeps the
complete files.
"""

import argparse
import fnmatch
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType] -- its overloads take an untyped dict
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling

# Its own HTTP client: httpx in version 1, httpx2 in version 2, of which 2.4 does not list it among its exports.
from huggingface_hub.utils import httpx  # type: ignore[attr-defined,unused-ignore]

from stenograph.model.hub import Event, Fetched, FetchFailed, FetchProgress, encode_event, repository_folder
from stenograph.model.shards import SHARD_INDEX

TEXT_FILES = (
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "encoding_*.py",
    "encoding/encoding_*.py",
)
"""The files for `model/files`."""

WEIGHT_FILES = (SHARD_INDEX, "model*.safetensors")
"""The files for `embedded/forward/weights`, besides."""

_POLL_S = 0.2
_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30.0


class _Refused(Exception):
    """The repository cannot be used; `str()` says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of the repository, with its hash on the hub: sha256 of a large file, else git's of its blob."""

    name: str
    num_bytes: int
    digest: str
    is_large: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch, and report how it ended; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--weights", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        _say(Fetched(folder=str(_fetch(options.repository, options.cache, weights=options.weights))))
    except _Refused as error:
        _say(FetchFailed(why=str(error)))
        return 1
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        _say(FetchFailed(why=_why(error, options.repository)))
        return 1
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """Leave by an exception, so the partial file is removed."""
    sys.exit(128 + number)


def _say(event: Event) -> None:
    os.write(sys.stdout.fileno(), encode_event(event))


def _fetch(repository: str, cache: Path, *, weights: bool) -> Path:
    info = HfApi().model_info(repository, revision="main", files_metadata=True, timeout=_TIMEOUT_S)
    commit = info.sha
    if commit is None:
        raise _Refused(f"{constants.ENDPOINT} names no commit for it: it is not a Hugging Face hub")
    place = repository_folder(cache, repository)
    files = _needed(info.siblings or [], weights=weights)
    done, total = 0, sum(file.num_bytes for file in files)
    for file in files:
        with _reporting(place / "blobs", done, total):
            _download(repository, file, cache, commit)
        done += file.num_bytes
        _say(FetchProgress(done_bytes=done, total_bytes=total))
    refs = place / "refs"
    refs.mkdir(parents=True, exist_ok=True)
    written = refs / f".main.{os.getpid()}"
    written.write_text(commit, encoding="ascii")
    written.replace(refs / "main")
    return place / "snapshots" / commit


def _needed(siblings: Sequence[RepoSibling], *, weights: bool) -> list[_File]:
    """The files to fetch. Raises _Refused: the repository lacks a necessary file."""
    names = [sibling.rfilename for sibling in siblings]
    if not {"tokenizer.json", "tekken.json"} & set(names):
        raise _Refused(
            "the repository has no tokenizer.json: save one with transformers (AutoTokenizer.from_pretrained(…)"
            ".save_pretrained(FOLDER)), and give the folder"
        )
    patterns = TEXT_FILES + (WEIGHT_FILES if weights else ())
    found = [
        _file(sibling)
        for sibling in siblings
        if any(fnmatch.fnmatchcase(sibling.rfilename, one) for one in patterns)
        and sibling.rfilename.count("/") <= sibling.rfilename.startswith("encoding/")
    ]
    if weights and not any(file.name.endswith(".safetensors") for file in found):
        raise _Refused(
            "the repository has no model.safetensors, which the embedded engine needs; an engine at an address"
            " (--engine-url) needs the tokenizer alone"
        )
    return found


def _file(sibling: RepoSibling) -> _File:
    digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    if digest is None or sibling.size is None:
        raise _Refused(f"the hub states no hash of {sibling.rfilename}: it cannot be checked, and is not fetched")
    return _File(
        name=sibling.rfilename, num_bytes=sibling.size, digest=digest.lower(), is_large=sibling.lfs is not None
    )


def _download(repository: str, file: _File, cache: Path, commit: str) -> None:
    """One file, checked. An earlier one with another content is fetched again. Raises _Refused."""
    for is_again in (False, True):
        was_there = (repository_folder(cache, repository) / "snapshots" / commit / file.name).exists()
        path = Path(hf_hub_download(repository, file.name, revision=commit, cache_dir=cache, force_download=is_again))
        found = _digest(path, is_large=file.is_large)
        if found == file.digest:
            return
        _remove(path)
        if not was_there:
            raise _Refused(
                f"{file.name} as it was downloaded has the hash {found}, the hub states {file.digest}; it was not"
                " kept: try again, or check what stands between here and the hub"
            )


def _digest(path: Path, *, is_large: bool) -> str:
    """Lower-case hex: sha256, or git's id of a blob (SHA-1 over a header and the content)."""
    with path.open("rb") as file:
        if is_large:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size, usedforsecurity=False)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """A snapshot's entry, and its blob."""
    if path.is_symlink():
        (path.parent / path.readlink()).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextmanager
def _reporting(blobs: Path, done: int, total: int) -> Generator[None]:
    """Report progress while a file is downloaded."""
    has_ended = threading.Event()

    def report() -> None:
        while not has_ended.wait(_POLL_S):
            _say(FetchProgress(done_bytes=min(done + _coming_bytes(blobs), total), total_bytes=total))

    reporter = threading.Thread(target=report, name="progress")
    _say(FetchProgress(done_bytes=done, total_bytes=total))
    reporter.start()
    try:
        yield
    finally:
        has_ended.set()
        reporter.join()


def _coming_bytes(blobs: Path) -> int:
    """Bytes of the largest incomplete file, while they come and go."""
    sizes = [0]
    for path in blobs.glob("*.incomplete"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _why(error: Exception, repository: str) -> str:
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return (
            f"the repository is gated: accept its terms at {hub}/{repository}, and set HF_TOKEN to a token of that"
            " account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{hub} has no such repository, or it is private: check the name (a local folder's begins with ./),"
            " or set HF_TOKEN"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"{hub} answered {status} ({str(error)[:200]}); complete files are kept: run it again"
    reason = error.__cause__ or error
    return (
        f"the download from {hub} broke off ({str(reason)[:200] or type(reason).__name__}); check the network,"
        " HF_ENDPOINT and the proxy settings; complete files are kept: run it again"
    )


if __name__ == "__main__":
    sys.exit(main())
