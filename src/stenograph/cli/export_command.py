"""`stenograph export`: the samples of every session kept by a server, as the server would give them, without one.

Needs the model's tokenizer and template, no engine. Exit codes: 0, 1 where a session could not be exported (each on a
line of its own), 2 (a StartupError) where nothing could be begun.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from stenograph.cli.places import Look, StorePlace, looks_at
from stenograph.cli.store_commands import rows_of, some_matcher
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError, StenographError
from stenograph.core.kinds import TRAINED_KINDS, StrandKind
from stenograph.core.types import LogprobsKind, SessionId
from stenograph.core.whole_file import new_file, write_file
from stenograph.export.arrow import ArrowMissing
from stenograph.export.one_file import OneFile
from stenograph.export.records import SessionMetadata
from stenograph.export.replay import ReplayShape
from stenograph.export.samples import SampleSet
from stenograph.export.session_samples import SampleWishes, session_samples
from stenograph.http.loaded_model import load_model, model_mark
from stenograph.http.settings import Settings
from stenograph.model.progress import Progress
from stenograph.session.facts import line_drift, session_facts
from stenograph.session.session import Session
from stenograph.session.storage import restored_session
from stenograph.store.base import StoredSession
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark
from stenograph.trajectory.strand_facts import leaves

EXIT_ALL = 0
EXIT_SOME = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export: the samples of the sessions in `folder` (or at a database's address) go into the file
    `out`, in a format."""

    folder: StorePlace
    out: Path
    format: str = "safetensors"
    include_side: bool = False
    include_failed: bool = False


def export_folder(options: ExportOptions, settings: Settings, *, out: TextIO, progress: Progress) -> int:
    """Write the samples of every session of a folder into one file; returns the exit code. Raises StartupError."""
    loaded = load_model(settings, SystemClock(), progress, weights=False)
    shape, required = loaded.files.moe_shape, settings.require_logprobs
    export = _Export(
        options=options,
        renderer=loaded.renderer,
        mark=model_mark(loaded.files),
        wishes=SampleWishes(
            kinds=tuple(StrandKind) if options.include_side else TRAINED_KINDS,
            include_failed=options.include_failed,
            required=None if required is None else LogprobsKind(required),
        ),
        replay_shape=None if shape is None else ReplayShape(layers=shape[0], top_k=shape[1]),
    )
    num_sessions = 0
    with looks_at(options.folder) as looked, new_file(options.out) as target, ExitStack() as lent:
        file = _one_file(options, target.parent, lent)
        for look in looked:
            summaries = list(look.summaries())
            for index, summary in enumerate(summaries):
                progress("exporting", index, len(summaries))
                export.session(look, summary.session_id, file)
            progress("exporting", len(summaries), len(summaries))
            num_sessions += len(summaries)
        write_file(target, file.pieces())
    out.writelines(f"{fault}\n" for fault in export.faults)
    left = f", {len(export.faults)} sessions could not be exported" if export.faults else ""
    out.write(f"{num_sessions} sessions, {file.num_samples} samples, {export.num_empty} sessions without one{left}\n")
    return EXIT_SOME if export.faults else EXIT_ALL


def _one_file(options: ExportOptions, folder: Path, lent: ExitStack) -> OneFile:
    """The samples while they are collected, in files of no name beside the one to come. Raises StartupError."""

    def lend() -> BinaryIO:
        return cast("BinaryIO", lent.enter_context(tempfile.TemporaryFile(dir=folder)))

    try:
        return OneFile(options.format, lend)
    except ArrowMissing as error:
        raise StartupError(f"--format arrow: {error}") from error


@dataclass(slots=True, kw_only=True)
class _Export:
    """An export on its way. `mark` is the model's: other sessions are not exported."""

    options: ExportOptions
    renderer: Renderer
    mark: ModelMark
    wishes: SampleWishes
    replay_shape: ReplayShape | None
    num_empty: int = 0
    faults: list[str] = field(default_factory=list[str])

    def session(self, look: Look, session_id: SessionId, file: OneFile) -> None:
        """Add a session's samples to a file, or note why there are none."""
        try:
            session = read_session(rows_of(look, session_id), model=self.mark)
            if session.refusal is not None:
                raise session.refusal
            made, metadata = self._samples(session)
        except StenographError as error:
            self.faults.append(f"{session_id}: {error}")
            return
        self.num_empty += not made.samples
        file.add(session_id, made, metadata)

    def _samples(self, session: Session) -> tuple[SampleSet, SessionMetadata]:
        facts = session_facts(session)
        return session_samples(
            facts,
            {leaf.id: line_drift(leaf, self.renderer) for leaf in leaves(facts.nodes)},
            wishes=self.wishes,
            decode=self.renderer.tokenizer.decode,
            max_trim_tokens=self.renderer.max_trim_tokens,
            replay_shape=self.replay_shape,
        )


def read_session(stored: StoredSession, *, model: ModelMark | None = None) -> Session:
    """A session from its rows, to be read. One of another `model` has a refusal. Raises SessionDamaged."""
    return restored_session(stored, matcher_of=some_matcher, model=model, now=0.0, wall=0.0)
