"""`stenograph inspect` and `stenograph check`: a look at a server's kept sessions, and a check that they are as
written.

They need no server and change nothing. Exit codes: 0, 1 where `check` found a fault, 2 (a StartupError) for a folder
held by a server or without sessions.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from stenograph.cli.places import Look, StorePlace, looks_at
from stenograph.core.errors import SessionDamaged, StartupError, StorageUnavailable
from stenograph.core.loaded import entry
from stenograph.core.types import SessionId
from stenograph.model.progress import Progress, StreamProgress
from stenograph.store.base import SessionColumns, StoredSession, StoredSummary
from stenograph.store.codec.rows import RowDamaged
from stenograph.store.restored import RestoredTurns, listed_session, restored_turns
from stenograph.trajectory.matching import MATCHERS, HarnessMatcher, Matcher
from stenograph.trajectory.strand import Strands
from stenograph.trajectory.turn import Node

EXIT_WHOLE = 0
EXIT_FAULTS = 1

_SHOWN_CHARS = 60


def inspect(options: dict[str, Any]) -> int:
    """Carry out `inspect`; returns the exit code. Raises StartupError."""
    return inspect_folder(**options, out=sys.stdout)


def inspect_folder(folder: StorePlace, session: str | None, *, out: TextIO) -> int:
    """Write the sessions of a folder or a database, or the turns of one. Raises StartupError, if there is none too."""
    with looks_at(folder) as files:
        lines = _session_lines(files) if session is None else _turn_lines(_strands(files, SessionId(session)))
        for line in lines:
            print(line, file=out)
    return EXIT_WHOLE


def check(options: dict[str, Any]) -> int:
    """Carry out `check`; returns the exit code. Raises StartupError."""
    progress = StreamProgress(sys.stderr)
    if samples := options.pop("samples"):
        check_samples = entry("stenograph.cli.samples_check:check_samples")
        return int(check_samples(options["folder"], samples, out=sys.stdout, progress=progress))
    return check_folder(**options, out=sys.stdout, progress=progress)


def check_folder(folder: StorePlace, *, out: TextIO, progress: Progress) -> int:
    """Read every row of every session, and write each fault; returns the exit code. Raises StartupError."""
    num_sessions = num_rows = num_faults = 0
    with looks_at(folder) as files:
        for file in files:
            summaries, faults = _listed(file)
            for index, summary in enumerate(summaries):
                progress("checking", index, len(summaries))
                num, fault = _checked(file, summary.session_id)
                num_rows += num
                faults += fault
            progress("checking", len(summaries), len(summaries))
            num_sessions, num_faults = num_sessions + len(summaries), num_faults + len(faults)
            print(*(f"{file.name}: {fault}\n" for fault in faults), sep="", end="", file=out)
    verdict = "whole" if not num_faults else f"{num_faults} faults"
    print(f"{num_sessions} sessions, {num_rows} rows: {verdict}", file=out)
    return EXIT_FAULTS if num_faults else EXIT_WHOLE


def _listed(file: Look) -> tuple[list[StoredSummary], list[str]]:
    """The sessions of a file, as far as it can be read, and the faults of its structure."""
    summaries, faults = list[StoredSummary](), file.faults()
    try:
        for summary in file.summaries():
            summaries.append(summary)
    except StorageUnavailable as error:
        faults.append(f"structure: no session after {len(summaries)} can be listed: {error.__cause__}")
    return summaries, faults


def _checked(file: Look, session_id: SessionId) -> tuple[int, list[str]]:
    """The number of a session's rows read, and their faults."""
    try:
        stored = rows_of(file, session_id)
        made = restored(stored)
    except SessionDamaged as error:
        return 0, [str(error)]
    return len(stored.rows), [
        str(SessionDamaged(session_id, place=place, problem=problem))
        for place, problem in (
            *_beside(file.columns(session_id), made),
            *lost_media(made.nodes.values(), lambda: file.media(session_id)),
        )
    ]


def lost_media(nodes: Iterable[Node], kept: Callable[[], Collection[str]]) -> Iterator[tuple[str, str]]:
    """The media of turns that their session does not have. `kept` gives the hashes of those that it has."""
    named = {one.ref.sha256: node.id for node in nodes for message in node.turn.messages for one in message.media}
    for sha256 in named.keys() - kept() if named else ():
        yield f"turn {named[sha256]}", f"its media {sha256} is not there"


def _beside(columns: SessionColumns, made: RestoredTurns) -> Iterator[tuple[str, str]]:
    """The columns in disagreement with the rows beside them."""
    opened, times = made.opened, {0: made.opened.created_at, **made.times}
    if columns.ttl_s != opened.options.ttl_s:
        yield "its ttl_s", f"it is {columns.ttl_s}, the opening says {opened.options.ttl_s}"
    key = None if opened.request is None else opened.request.key
    if columns.key != key:
        yield "its key", f"it is {columns.key!r}, the opening says {key!r}"
    for seq, at in times.items():
        if columns.times.get(seq) != at:
            yield f"the time of row {seq}", f"it is {columns.times.get(seq)}, the row says {at}"


def rows_of(file: Look, session_id: SessionId) -> StoredSession:
    """The rows of a listed session. Raises SessionDamaged."""
    stored = file.read(session_id)
    if stored is None:
        raise SessionDamaged(session_id, place="the list", problem="no rows have its id")
    return stored


def found_rows(files: Sequence[Look], session_id: SessionId) -> StoredSession:
    """The rows of a session of a folder. Raises StartupError if it is not there, SessionDamaged."""
    stored = next((one for file in files if (one := file.read(session_id)) is not None), None)
    if stored is None:
        raise StartupError(f"there is no session {session_id!r} here")
    return stored


def _strands(files: Sequence[Look], session_id: SessionId) -> Strands:
    """The strands of a session of a folder. Raises StartupError if it is not there, or damaged."""
    try:
        return restored(found_rows(files, session_id)).strands
    except SessionDamaged as error:
        raise StartupError(str(error)) from error


def restored(stored: StoredSession) -> RestoredTurns:
    """A session from its rows, to be read. Raises SessionDamaged."""
    return restored_turns(stored, some_matcher)


def some_matcher(name: str) -> Matcher:
    """The matcher of a name, or another: nothing is matched by who only reads."""
    return MATCHERS.get(name) or HarnessMatcher()


def _session_lines(files: Sequence[Look]) -> Iterator[str]:
    yield f"{'session':32}  {'created (UTC)':19}  {'history':8} {'turns':>6} {'tokens':>9}  model"
    for summary in (summary for file in files for summary in file.summaries()):
        try:
            found = listed_session(summary)
        except (SessionDamaged, RowDamaged) as error:
            yield f"{summary.session_id:32}  damaged: {error}"
            continue
        opened, totals = found.opened, found.totals
        created = datetime.fromtimestamp(opened.created_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        yield (
            f"{opened.session_id:32}  {created}  {opened.options.history:8} {totals.num_turns:6} {totals.num_tokens:9}"
            f"  {opened.model.name}"
        )


def _turn_lines(strands: Strands) -> Iterator[str]:
    yield f"{'turn':>5} {'after':>5} {'strand':>6} {'prompt':>7} {'new':>6} {'sampled':>7}  status     reply"
    for strand in strands.kept:
        yield from (_turn_line(node, strand.number) for node in strand.history.nodes)


def _turn_line(node: Node, strand: int | None) -> str:
    turn = node.turn
    after = "-" if node.parent is None else node.parent.id
    num_sampled = len(turn.sampled.ids)
    text = " ".join((turn.reply.message.content or "").split())[:_SHOWN_CHARS]
    calls = ", ".join(call.name for call in turn.reply.message.tool_calls)
    shown = text if not calls else f"{text} [calls {calls}]".strip()
    return (
        f"{node.id:5} {after:>5} {strand:>6} {node.num_tokens - num_sampled:7} {len(turn.new_prompt_ids):6}"
        f" {num_sampled:7}  {turn.status:9}  {shown}"
    )
