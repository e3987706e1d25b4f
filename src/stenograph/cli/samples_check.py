"""`stenograph check DIR --samples FILE`: whether each trained token of a file is what the store holds.

Reads the file and its sessions, and changes nothing. Exit codes as those of `check`.
"""

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from stenograph.cli.places import Look, StorePlace, looks_at
from stenograph.cli.store_commands import EXIT_FAULTS, EXIT_WHOLE, restored
from stenograph.core.errors import SessionDamaged, StartupError
from stenograph.core.types import SessionId
from stenograph.export.arrow import ArrowMissing
from stenograph.export.custody import DigestChain
from stenograph.export.sample_check import KeptTurns, Trained, sample_faults
from stenograph.export.sample_files import FiledSample, NoSampleFile, sample_file
from stenograph.model.progress import Progress


def check_samples(folder: StorePlace, files: Sequence[Path], *, out: TextIO, progress: Progress) -> int:
    """Hold the samples of files to the sessions in a folder or a database, and write each fault; returns the exit code.

    Raises StartupError, also for a file without samples.
    """
    num_samples = num_faults = 0
    trained = Trained()
    with looks_at(folder) as looked:
        sessions = _KeptSessions(looked)
        for name, sample in (one for file in files for one in _samples(file, progress)):
            faults = list(_faults(sample, sessions, trained, name))
            num_samples, num_faults = num_samples + 1, num_faults + len(faults)
            print(*(f"{name}: {fault}\n" for fault in faults), sep="", end="", file=out)
    verdict = "what the store holds" if not num_faults else f"{num_faults} faults"
    print(f"{num_samples} samples, {trained.num_tokens} trained tokens: {verdict}", file=out)
    return EXIT_FAULTS if num_faults else EXIT_WHOLE


def _samples(file: Path, progress: Progress) -> Iterator[tuple[str, FiledSample]]:
    """The samples of a file, each with its name. Raises StartupError."""
    what, content = f"checking {file.name}", _content(file)
    try:
        read = sample_file(content)
        for index, sample in enumerate(read.samples):
            if read.num_samples is not None:
                progress(what, index, read.num_samples)
            yield f"{file.name}: sample {index}", sample
    except (NoSampleFile, ArrowMissing) as error:
        raise StartupError(f"--samples: {str(file)!r} cannot be read: {error}") from error
    progress(what, 1, 1)


def _content(file: Path) -> memoryview:
    """A file's bytes, read as they are asked for, and open while they are used. Raises StartupError."""
    try:
        with file.open("rb") as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise StartupError(f"--samples: {str(file)!r} cannot be read: {error}") from error


class _KeptSessions:
    """The session last asked for, of a folder: samples of one follow one another."""

    def __init__(self, files: Sequence[Look]) -> None:
        self._files = files
        self._last: tuple[str, KeptTurns | None] | None = None

    def turns(self, session_id: str) -> KeptTurns | None:
        """A session's turns, None if there is no such session. Raises SessionDamaged."""
        if self._last is None or self._last[0] != session_id:
            self._last = (session_id, self._read(session_id))
        return self._last[1]

    def _read(self, session_id: str) -> KeptTurns | None:
        found = (file.read(SessionId(session_id)) for file in self._files)
        stored = next((one for one in found if one is not None), None)
        if stored is None:
            return None
        made = restored(stored)
        return KeptTurns(
            nodes=made.nodes,
            rows=made.rows,
            standing=frozenset(node.id for node in made.strands.nodes),
            chain=DigestChain(session_id),
        )


def _faults(sample: FiledSample, sessions: _KeptSessions, trained: Trained, name: str) -> Iterator[str]:
    if sample.custody is None:
        yield "it does not say which session and turns it is made of (metadata.custody)"
        return
    session_id = sample.custody.session_id
    try:
        kept = sessions.turns(session_id)
    except SessionDamaged as error:
        yield str(error)
        return
    if kept is None:
        yield f"session {session_id[:64]!r} is not in the store"
        return
    for fault in sample_faults(sample, kept, trained, name=name):
        yield f"session {session_id}: {fault}"
