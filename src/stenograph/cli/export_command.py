"""`stenograph export`: the samples of every session that a server kept, as that server would give them, without one.

Needs the model's tokenizer and template, no engine. Exit codes: 0, 1 where a session could not be exported, which is
said on a line of its own, 2 (a StartupError) where nothing could be begun.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from stenograph.cli.store_commands import read_session
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError, StenographError
from stenograph.core.json_pieces import joined, json_pieces
from stenograph.core.strand_kinds import TRAINED_KINDS, StrandKind
from stenograph.core.types import LogprobsKind, SessionId
from stenograph.export.arrow import ArrowMissing, to_arrow
from stenograph.export.line_drift import line_drift
from stenograph.export.lines import leaves
from stenograph.export.records import SessionMetadata
from stenograph.export.replay import ReplayShape
from stenograph.export.safetensors import to_safetensors
from stenograph.export.samples import SampleSet
from stenograph.export.session_samples import SampleWishes, json_samples, session_samples
from stenograph.export.strand_facts import session_facts
from stenograph.http.app import model_mark, renderer_of
from stenograph.http.settings import Settings
from stenograph.model.fetch import resolve_model
from stenograph.model.files import load_model_files
from stenograph.model.progress import Progress
from stenograph.render.renderer import Renderer
from stenograph.session.session import Session
from stenograph.store.places import Look, looks_at
from stenograph.trajectory.commits import ModelMark

EXPORT = "export"
EXPORT_SETTINGS = ("model", "family", "chat_template_kwargs", "cache_dir", "require_logprobs")
"""The settings that `export` reads."""

EXIT_ALL = 0
EXIT_SOME = 1

_PART = ".part"
"""Ends the name of a file that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export: the sessions in `folder`, which may be the address of a database, go into files in `out`,
    named by their ids, in a format."""

    folder: str
    out: Path
    format: str = "safetensors"
    include_side: bool = False
    include_failed: bool = False


def export_folder(options: ExportOptions, settings: Settings, *, out: TextIO, progress: Progress) -> int:
    """Write the samples of every session of a folder, a file for each; returns the exit code. Raises StartupError."""
    files = load_model_files(
        resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=False)
    )
    shape, required = files.moe_shape, settings.require_logprobs
    export = _Export(
        options=options,
        renderer=renderer_of(settings, files, SystemClock()),
        mark=model_mark(files),
        wishes=SampleWishes(
            kinds=tuple(StrandKind) if options.include_side else TRAINED_KINDS,
            include_failed=options.include_failed,
            required=None if required is None else LogprobsKind(required),
        ),
        replay_shape=None if shape is None else ReplayShape(layers=shape[0], top_k=shape[1]),
    )
    num_sessions = 0
    with looks_at(options.folder) as looked:
        _make_empty(options.out)
        for file in looked:
            summaries = list(file.summaries())
            for index, summary in enumerate(summaries):
                progress("exporting", index, len(summaries))
                _write(export, file, summary.session_id)
            progress("exporting", len(summaries), len(summaries))
            num_sessions += len(summaries)
    out.writelines(f"{fault}\n" for fault in export.faults)
    left = f", {len(export.faults)} sessions could not be exported" if export.faults else ""
    out.write(f"{num_sessions} sessions, {export.num_samples} samples, {export.num_empty} sessions without one{left}\n")
    return EXIT_SOME if export.faults else EXIT_ALL


def _make_empty(folder: Path) -> None:
    """Make the folder of the samples, or take one that is empty. Raises StartupError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StartupError(f"--out: the folder {str(folder)!r} is not empty")
    except OSError as error:
        raise StartupError(f"--out: cannot write to the folder {str(folder)!r}: {error.strerror}") from error


def _write(export: "_Export", file: Look, session_id: SessionId) -> None:
    """Write a session's file. Raises StartupError for what concerns all of them: the disk, a missing library."""
    try:
        export.session(file, session_id)
    except ArrowMissing as error:
        raise StartupError(f"--format arrow: {error}") from error
    except OSError as error:
        raise StartupError(f"--out: cannot write to {str(export.options.out)!r}: {error.strerror}") from error


def _pieces(format_: str, made: SampleSet, metadata: SessionMetadata) -> Iterator[bytes | memoryview]:
    if format_ == "json":
        return joined(json_pieces(json_samples(made, metadata)))
    write = to_arrow if format_ == "arrow" else to_safetensors
    return write(made.samples, session_metadata=metadata, empty_reason=made.empty_reason)


@dataclass(slots=True, kw_only=True)
class _Export:
    """An export that is on its way. `mark` is the model's: other sessions are not exported."""

    options: ExportOptions
    renderer: Renderer
    mark: ModelMark
    wishes: SampleWishes
    replay_shape: ReplayShape | None
    num_samples: int = 0
    num_empty: int = 0
    faults: list[str] = field(default_factory=list[str])

    def session(self, file: Look, session_id: SessionId) -> None:
        """Write a session's samples, or note why there are none."""
        try:
            session = read_session(file, session_id, model=self.mark)
            if session.refusal is not None:
                raise session.refusal
            made, metadata = self._samples(session)
        except StenographError as error:
            self.faults.append(f"{session_id}: {error}")
            return
        self.num_samples += len(made.samples)
        self.num_empty += not made.samples
        target = self.options.out / f"{session_id}.{self.options.format}"
        part = target.with_name(target.name + _PART)
        with part.open("wb") as written:
            written.writelines(_pieces(self.options.format, made, metadata))
        part.replace(target)

    def _samples(self, session: Session) -> tuple[SampleSet, SessionMetadata]:
        nodes = tuple(session.nodes)
        return session_samples(
            session_facts(session),
            nodes,
            session.options,
            {leaf.id: line_drift(leaf, self.renderer) for leaf in leaves(nodes)},
            session.strands.discarded,
            wishes=self.wishes,
            renderer=self.renderer,
            replay_shape=self.replay_shape,
        )
