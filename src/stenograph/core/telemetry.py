"""What the server tells about itself, as values: who counts them is wired in http/app.py. Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stenograph.core.types import Stage


class TurnEnd(enum.StrEnum):
    """How a turn ended."""

    COMMITTED = "committed"
    """It is in the history."""
    UNRECORDED = "unrecorded"
    """It was served without a session, or its session was deleted meanwhile."""
    FAILED = "failed"
    """It ended with an error; nothing is kept."""
    ABANDONED = "abandoned"
    """Its client left; nothing is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """One turn, when it has ended. Counts are tokens, times are seconds.

    `code` is the error's, `law` the one that an invalid reply broke. `was_aborted`: the engine ended it early, by
    `finish_reason` abort. `ttft_s` is from the request's first byte to the first token, `itl_s` the gaps between steps
    that drew tokens, `tpot_s` their mean per token; None and empty where the engine does not stream. `num_kept` of
    `num_prompt` stood in the line before.
    """

    end: TurnEnd
    code: str | None = None
    law: str | None = None
    was_aborted: bool = False
    stages_s: Mapping[Stage, float] = field(default_factory=dict[Stage, float])
    num_prompt: int = 0
    num_completion: int = 0
    num_kept: int = 0
    num_cached: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: tuple[float, ...] = ()

    @property
    def num_wasted(self) -> int:
        """Tokens that were drawn for nobody: they are in no record, and no client has them whole."""
        return self.num_completion if self.end in (TurnEnd.FAILED, TurnEnd.ABANDONED) else 0


class SessionEnd(enum.StrEnum):
    """Why a session is gone."""

    DELETED = "deleted"
    EXPIRED = "expired"


class Telemetry(Protocol):
    """Who counts. All methods are synchronous, cheap, and never raise."""

    def turn_ended(self, report: TurnReport) -> None:
        """A turn is over."""
        ...

    def reply_delivered(self, reply_s: float) -> None:
        """A reply's last byte was handed to its connection, this long after the commit."""
        ...

    def retry_answered(self, *, joined: bool) -> None:
        """A repeated request joined a running turn, or (False) was given a finished one's reply again."""
        ...

    def session_ended(self, end: SessionEnd) -> None:
        """A session is gone."""
        ...


class NoTelemetry:
    """Counts nothing."""

    def turn_ended(self, report: TurnReport) -> None: ...
    def reply_delivered(self, reply_s: float) -> None: ...
    def retry_answered(self, *, joined: bool) -> None: ...
    def session_ended(self, end: SessionEnd) -> None: ...
