"""The log's lines about turns and sessions: one at the end of each.

A turn failed by a bug of ours has its traceback in its line, and an invalid reply is a warning. The effects of an
outage or a client's request are no warning: the outage has its own line, where it begins.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from stenograph.core.errors import InternalError, StenographError, UpstreamInvalid
from stenograph.core.loaded import entry
from stenograph.core.log_line import LogLine
from stenograph.core.outcome import NO_VERDICT, TokenFate
from stenograph.core.telemetry import SessionEnd, SessionReport, TurnEnd, TurnReport
from stenograph.core.types import FinishReason
from stenograph.session.session import Session
from stenograph.session.steps import RunningTurn
from stenograph.session.turn import TurnOutcome

log = logging.getLogger(__name__)


def turn_report(turn: RunningTurn, index: int, task: "asyncio.Task[TurnOutcome]") -> TurnReport:
    """The report of a turn, the one of this index in a request with an ended task."""
    meter = turn.meter
    report = partial(
        TurnReport,
        num_completion=meter.num_sampled,
        ttft_s=meter.ttft_s,
        tpot_s=meter.tpot_s,
        itl_s=tuple(meter.gaps_s),
        unasked_replay=meter.unasked_replay,
        kind=turn.kind,
    )
    if task.cancelled():
        return report(end=TurnEnd.ABANDONED, stages_s=turn.stages.durations_s())
    error = task.exception()
    if error is not None:
        code = error.code if isinstance(error, StenographError) else "internal_error"
        law = error.law if isinstance(error, UpstreamInvalid) else None
        return report(end=TurnEnd.FAILED, stages_s=turn.stages.durations_s(), code=code, law=law)
    outcome = task.result()
    reply, num_discarded = outcome.replies[index], 0
    for gone in turn.discarded:
        num_discarded += len(gone.sampled.ids) - gone.num_inherited
    return report(
        end=TurnEnd.COMMITTED if outcome.committed else TurnEnd.UNRECORDED,
        stages_s=reply.stages_s,
        was_aborted=reply.sampled.finish.reason is FinishReason.ABORT,
        num_prompt=reply.usage.num_prompt,
        num_kept=reply.prompt.num_kept,
        num_cached=reply.usage.num_cached,
        finish=reply.sampled.finish.reason.value,
        num_discarded_turns=len(turn.discarded),
        num_discarded_tokens=num_discarded,
        rewrites=turn.rewrites,
    )


def log_turn_end(
    turn: RunningTurn, report: TurnReport, *, session: Session | None, client: str, error: BaseException | None
) -> None:
    """Log an ended turn. `client` is the client's name for itself, `error` the error it failed with."""
    level = logging.INFO
    if error is not None and (not isinstance(error, StenographError) or isinstance(error, InternalError)):
        level = logging.ERROR
    elif isinstance(error, UpstreamInvalid):
        level = logging.WARNING
    if not log.isEnabledFor(level):
        return
    line = LogLine(
        event="turn_end",
        facts={
            "session": None if session is None else session.id,
            "request": turn.request_id,
            "client": client or None,
            "status": report.end,
            "finish": report.finish,
            "error": report.code,
            "prompt_tokens": turn.prompt.num_tokens if turn.is_open else None,
            "cached_tokens": None if report.finish is None else report.num_cached,
            "sampled_tokens": report.num_completion if turn.is_open else None,
            "detail": None if error is None else str(error) or type(error).__name__,
        },
        stages_s=report.stages_s,
    )
    is_ours = error is not None and level == logging.ERROR
    about = (type(error), error, error.__traceback__) if is_ours and error is not None else None
    # Not `log.log`, which looks for its caller on the stack: that costs more than all else here.
    log.handle(logging.LogRecord(log.name, level, "", 0, line, None, about))


def log_discarded(session: Session, turns: Sequence[RunningTurn]) -> None:
    """Name each turn taken out of its session by a request's commit: no sampled token goes silently."""
    for turn in turns:
        for gone in turn.discarded:
            log.warning(
                "session %s: turn %s replaced turn %s, whose %d sampled tokens are discarded; a session with history"
                " 'tree' keeps both",
                session.id,
                turn.request_id,
                gone.request_id,
                len(gone.sampled.ids) - gone.num_inherited,
            )


STOPPED = "stopped"
"""The status of a session ended by the end of the process."""


def log_session_end(session: Session, end: SessionEnd | str, *, age_s: float, fates: Mapping[TokenFate, int]) -> None:
    """Log the end of a session; `end` is the reason, STOPPED if the process ends. `fates` are those of its tokens."""
    if log.isEnabledFor(logging.INFO):
        facts: dict[str, str | int | float | None] = {
            "session": session.id,
            "status": str(end),
            "turns": session.strands.num_turns,
            "tokens": session.strands.num_tokens,
            "group": session.options.stated.group,
            "verdict": NO_VERDICT if session.outcome is None else session.outcome.verdict.value,
            **{f"{fate.value}_tokens": num for fate, num in fates.items()},
            "age_s": round(age_s, 3),
        }
        log.info(LogLine(event="session_end", facts=facts))


def session_report(session: Session, end: SessionEnd) -> SessionReport:
    """The report of the end of a session, for the metrics."""
    verdict = None if session.outcome is None else session.outcome.verdict
    fates = entry("stenograph.session.fates:num_by_fate")(session, is_gone=True)
    return SessionReport(end=end, verdict=verdict, num_tokens=fates)
