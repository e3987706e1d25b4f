"""Finds a repository, ORG/NAME, in the local Hugging Face cache, or fetches it into the cache.

The cache is shared by every tool of Hugging Face: a file in it is used as it is, without the network. The rest is
downloaded by `huggingface_hub` in a process of its own (`hub_download`), so the user's mirrors, tokens, proxies and
offline mode apply, and an interrupt ends the download. Knows nothing of packages, nor of the content of a model's
files.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from stenograph.core.errors import StartupError
from stenograph.model.progress import Progress
from stenograph.model.settings import HUB_PREFIX
from stenograph.model.shards import SHARD_INDEX, weight_files

INSTALL_HINT = "pip install huggingface_hub"

_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)
_PREFIXED = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{1,64}")
_TRUE = ("1", "ON", "YES", "TRUE")
_END_GRACE_S = 5.0


# --- the events of a download: JSON lines on its standard output


class FetchProgress(msgspec.Struct, frozen=True, tag="told"):
    """The bytes downloaded so far."""

    done_bytes: int
    total_bytes: int


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The download succeeded: all files are in `folder`, each with the hash on the hub."""

    folder: str


class FetchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The download failed; `why` also says what to do."""

    why: str


Event = FetchProgress | Fetched | FetchFailed

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One line."""
    return msgspec.json.encode(event) + b"\n"


def decode_event(line: bytes) -> Event:
    """Raises msgspec.DecodeError for anything else."""
    return _DECODER.decode(line)


# --- a repository


def repository_of(name: str) -> str | None:
    """The repository of a model's name: ORG/NAME, and any text after `hf:`. None: it is no such name.

    A path is none: one that begins with a dot or a slash, has more than one slash, or ends as a .gguf file. Raises
    StartupError if the text after `hf:` cannot be a repository's name.
    """
    if name.startswith(HUB_PREFIX):
        repository = name.removeprefix(HUB_PREFIX)
        if not _PREFIXED.fullmatch(repository) or ".." in repository or "--" in repository:
            raise StartupError(f"model {name[:200]!r}: what follows {HUB_PREFIX} must be a repository's name, ORG/NAME")
        return repository
    is_one = _REPOSITORY.fullmatch(name) and ".." not in name and "--" not in name and len(name) <= 96
    return name if is_one and not name.lower().endswith(".gguf") else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder of the Hugging Face cache, as `huggingface_hub` finds it."""
    xdg = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or os.path.join(xdg, "huggingface")
    folder = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def repository_folder(cache: Path, repository: str) -> Path:
    """A repository's folder in the cache; there may be none yet."""
    return cache / f"models--{repository.replace('/', '--')}"


def hub_folder(name: str, *, weights: bool, progress: Progress) -> Path | None:
    """The folder with a repository's tokenizer, template and configuration, and, `weights`, its safetensors; None for
    what is no repository's name.

    Blocks: call it off the loop. Raises StartupError, in one line with the remedy.
    """
    if (repository := repository_of(name)) is None:
        return None
    cache = hub_cache(os.environ)
    cached = _snapshot(cache, repository)
    missing = "file" if cached is None else _missing(cached, weights=weights)
    if cached is not None and missing is None:
        return cached
    here = "" if name.startswith(HUB_PREFIX) else "there is no such folder, and "
    here = f"model {name!r}: {here}the Hugging Face cache {str(cache)!r} has no {missing} of it"
    if any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise StartupError(
            f"{here}; HF_HUB_OFFLINE is set, so it is not fetched: unset it, or copy the repository's files here and"
            " give their folder"
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise StartupError(
            f"{here}; to fetch it, {INSTALL_HINT} (or, in a checkout, pip install -e '.[hub]'), or give a folder with"
            " its files"
        )
    return _fetched(repository, cache, weights=weights, progress=progress)


def _snapshot(cache: Path, repository: str) -> Path | None:
    """The snapshot of the branch `main` at its last fetch."""
    place = repository_folder(cache, repository)
    try:
        commit = (place / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    folder = place / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def _missing(folder: Path, *, weights: bool) -> str | None:
    """A missing file; None: all are there."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tekken.json")):
        return "tokenizer.json"
    return _missing_weights(folder) if weights else None


def _missing_weights(folder: Path) -> str | None:
    if not (folder / "config.json").exists():
        return "config.json"
    try:
        return next((name for name in weight_files(folder) if not (folder / name).exists()), None)
    except (OSError, msgspec.DecodeError):
        return SHARD_INDEX


def _fetched(repository: str, cache: Path, *, weights: bool, progress: Progress) -> Path:
    """Run the download and pass on its messages. Raises StartupError."""
    what = f"fetching {repository} from the Hugging Face hub"
    command = [sys.executable, "-m", "stenograph.model.hub_download", repository, str(cache)]
    command += ["--weights"] if weights else []
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            end = _last_event(process.stdout, what, progress)
        except BaseException:
            _end(process)
            raise
        process.wait()
        log.seek(0)
        last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    if isinstance(end, Fetched) and process.returncode == 0:
        return Path(end.folder)
    why = end.why if isinstance(end, FetchFailed) else f"the download ended with exit code {process.returncode}: {last}"
    raise StartupError(f"model {repository!r}: {' '.join(why.split())}")


def _last_event(lines: Iterable[bytes], what: str, progress: Progress) -> Fetched | FetchFailed | None:
    """Pass on a download's progress until its output ends; how it ended, None if it did not say."""
    end: Fetched | FetchFailed | None = None
    for line in lines:
        event = decode_event(line)
        if isinstance(event, FetchProgress):
            progress(what, event.done_bytes, event.total_bytes)
        else:
            end = event
    return end


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have it remove its partial file and end; kill it where it does not."""
    process.terminate()
    try:
        process.wait(_END_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
