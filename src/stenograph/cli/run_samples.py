"""The samples of a run: where they go, and where else if they cannot go there, so that no rollout is lost.

A file is written whole or not at all. If the requested one cannot be written, the samples go into the folder for
temporary files, for their owner alone; if the server cannot give the requested format, they are asked for in another.
"""

import enum
import http
import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from stenograph.cli.session_calls import CallFailed, ServerCalls
from stenograph.core.errors import StartupError
from stenograph.core.whole_file import check_writable, replace_file

_FORMATS = {".json": "json", ".arrow": "arrow"}
"""Formats of samples, by a file's ending; any other is safetensors."""
_WHAT = {"records": "records"}
"""A person's word for an answer other than samples."""
_META = "_samples_meta"
"""The tensor of a safetensors payload with its metadata, as JSON. Source: docs/samples.md."""


class Lack(enum.Enum):
    """The missing thing where nothing could be written."""

    PLACE = enum.auto()
    """The server gave the samples: another try may find a place for them."""
    SAMPLES = enum.auto()
    """The server did not answer, or gave them in no format: it may give them when it is asked again."""
    SESSION = enum.auto()


class NotSaved(Exception):
    """Nothing could be written anywhere; the message says why, in a line."""

    def __init__(self, faults: Sequence[str], lack: Lack) -> None:
        super().__init__("; ".join(faults))
        self.lack = lack


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSamples:
    """Written samples. `line` says so; `as_asked` is false where they are elsewhere or something else. `left_out` is
    the session's, None where the format does not show it."""

    line: str
    as_asked: bool
    left_out: Mapping[str, object] | None


def format_of(file: Path) -> str:
    """The format of the samples in a file of this name."""
    return _FORMATS.get(file.suffix, "safetensors")


def check_samples_file(file: Path, *, is_here: bool) -> None:
    """Raise StartupError for an unwritable file, or, where the server `is_here`, not in its format."""
    check_writable(file, "--samples")
    if is_here and format_of(file) == "arrow" and importlib.util.find_spec("pyarrow") is None:
        raise StartupError(
            f"--samples: {str(file)!r} needs pyarrow, which is not installed: pip install pyarrow, or name a"
            " .safetensors or .json file"
        )


def write_samples(calls: ServerCalls, session_id: str, file: Path) -> str:
    """Write the samples, whole or not at all; returns a line about them. Raises CallFailed, OSError."""
    content = calls.samples(session_id, format_of(file))
    replace_file(file, content)
    return f"samples in {file} ({len(content):,} bytes)"


def save_samples(calls: ServerCalls, session_id: str, file: Path) -> SavedSamples:
    """Write the samples where they were asked for, or wherever else they can be written. Raises NotSaved."""
    faults: list[str] = []
    kinds: Mapping[str, Callable[[], bytes]] = {
        format_of(file): lambda: calls.samples(session_id, format_of(file)),
        "safetensors": lambda: calls.samples(session_id, "safetensors"),
        "records": lambda: calls.content(f"sessions/{session_id}"),
    }
    for kind, ask in kinds.items():
        try:
            content = ask()
        except CallFailed as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                raise NotSaved([f"cannot get the session's samples: {error}"], Lack.SESSION) from error
            faults.append(f"cannot get the session's {_WHAT.get(kind, f'samples as {kind}')}: {error}")
            if error.status is None:  # no answer: nothing is wrong with the format
                break
            continue
        is_kind = kind == format_of(file)
        for place in ([file] if is_kind else []) + _others(session_id, kind):
            try:
                replace_file(place, content, is_private=place != file)
            except OSError as error:
                faults.append(f"cannot write {place}: {error.strerror or error}")
                continue
            line = f"{_WHAT.get(kind, 'samples')} in {place} ({len(content):,} bytes)"
            as_asked = is_kind and place == file
            return SavedSamples(
                line=line if as_asked else f"{'; '.join(faults)}. Written elsewhere: {line}",
                as_asked=as_asked,
                left_out=_left_out(content, kind),
            )
        raise NotSaved(faults, Lack.PLACE)
    raise NotSaved(faults, Lack.SAMPLES)


def _others(session_id: str, kind: str) -> list[Path]:
    """A place in the folder for temporary files, if there is a writable one."""
    ending = {"records": "records.json"}.get(kind, kind)
    try:
        return [Path(tempfile.gettempdir()) / f"stenograph-{session_id}.{ending}"]
    except OSError:
        return []


def _left_out(content: bytes, kind: str) -> Mapping[str, object] | None:
    """`session_metadata.left_out` of samples; None where the format does not show it without more."""
    if kind == "safetensors":
        start = 8 + int.from_bytes(content[:8], "little")
        first, end = json.loads(content[8:start])[_META]["data_offsets"]
        content = content[start + first : start + end]
    elif kind != "json":
        return None
    return cast("Mapping[str, object]", json.loads(content)["session_metadata"]["left_out"])
