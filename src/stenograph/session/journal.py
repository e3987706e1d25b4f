"""The log's lines about turns and sessions: one at the end of each.

A turn that failed on a bug of ours has its traceback in that line, and an invalid reply is a warning. What an outage or
a client's request costs is no warning: the outage has its own line, where it begins.
"""

import logging
from collections.abc import Mapping, Sequence

from stenograph.core.errors import InternalError, StenographError, UpstreamInvalid
from stenograph.core.log_line import LogLine
from stenograph.core.outcome import NO_VERDICT, TokenFate
from stenograph.core.telemetry import SessionEnd, SessionReport, TurnReport
from stenograph.session.session import Session
from stenograph.session.steps import TurnRun

log = logging.getLogger(__name__)


def log_turn_end(
    turn: TurnRun, report: TurnReport, *, session: Session | None, client: str, error: BaseException | None
) -> None:
    """Log a turn that has ended. `client` is what it calls itself; `error` what the turn failed with."""
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


def log_discarded(session: Session, turns: Sequence[TurnRun]) -> None:
    """Name each turn that a request's commit took out of its session: nothing that was sampled goes silently."""
    for turn in turns:
        for gone in turn.discarded:
            log.warning(
                "session %s: turn %s replaced turn %s, whose %d sampled tokens are discarded; a session with history"
                " 'tree' keeps both",
                session.id,
                turn.request_id,
                gone.request_id,
                len(gone.sampled.ids),
            )


STOPPED = "stopped"
"""The status of a session that ends with the process."""


def log_session_end(session: Session, end: SessionEnd | str, *, age_s: float, fates: Mapping[TokenFate, int]) -> None:
    """Log a session that is gone; `end` is the reason, STOPPED if the process ends. `fates` are those of its tokens."""
    if log.isEnabledFor(logging.INFO):
        facts: dict[str, str | int | float | None] = {
            "session": session.id,
            "status": str(end),
            "turns": session.strands.num_turns,
            "tokens": session.strands.num_tokens,
            "group": session.options.group,
            "verdict": NO_VERDICT if session.outcome is None else session.outcome.verdict.value,
            **{f"{fate.value}_tokens": num for fate, num in fates.items()},
            "age_s": round(age_s, 3),
        }
        log.info(LogLine(event="session_end", facts=facts))


def session_report(session: Session, end: SessionEnd) -> SessionReport:
    """The report of a session that is gone, for the metrics."""
    verdict = None if session.outcome is None else session.outcome.verdict
    fates = session.num_tokens_by_fate()
    return SessionReport(end=end, group=session.options.group, verdict=verdict, num_tokens=fates)
