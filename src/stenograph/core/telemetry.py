"""The events reported by the server about itself, as values; http/session_services.py wires their counter. Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import Struct

from stenograph.core.kinds import StrandKind
from stenograph.core.outcome import RolloutVerdict, TokenFate
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.stages import Stage


class TurnEnd(enum.StrEnum):
    """Ends of a turn."""

    COMMITTED = "committed"
    """The turn is in the history."""
    UNRECORDED = "unrecorded"
    """The turn was served without a session, or its session was deleted meanwhile."""
    FAILED = "failed"
    """The turn ended with an error; nothing is kept."""
    ABANDONED = "abandoned"
    """Its client left; nothing is kept."""


class GrammarStep(enum.StrEnum):
    """Steps of the embedded engine's work on a grammar."""

    COMPILE = "compile"
    """Once for each grammar not kept from before."""
    FILL = "fill"
    """The mask of the next token; once a token."""
    ACCEPT = "accept"
    """Step over a token; once a token."""


class TurnReport(Struct, frozen=True, kw_only=True, gc=False):
    """One turn, when it has ended. Counts are tokens, times are seconds.

    `code` is the error's, `law` the one broken by an invalid reply. `was_aborted`: the engine ended it early, by
    `finish_reason` abort; `finish` is the reason of any turn with a reply. `ttft_s` is from the request's first byte to
    the first token, `itl_s` the gaps between steps with sampled tokens, `tpot_s` their mean per token; None and empty
    where the engine does not stream. `num_kept` of `num_prompt` stood in the line before. `unasked_replay` names
    unrequested payloads in the reply. Its commit discarded `num_discarded_turns` turns of its session, with
    `num_discarded_tokens` sampled tokens in them. A rule named the `kind` of its request, None if none did; `rewrites`
    are the changes to the client's request.
    """

    end: TurnEnd
    code: str | None = None
    law: str | None = None
    was_aborted: bool = False
    stages_s: Mapping[Stage, float] = msgspec.field(default_factory=dict[Stage, float])
    num_prompt: int = 0
    num_completion: int = 0
    num_kept: int = 0
    num_cached: int = 0
    finish: str | None = None
    num_discarded_turns: int = 0
    num_discarded_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: tuple[float, ...] = ()
    unasked_replay: tuple[str, ...] = ()
    kind: StrandKind | None = None
    rewrites: tuple[AppliedRewrite, ...] = ()

    @property
    def num_wasted(self) -> int:
        """Sampled tokens of a failed or abandoned turn: they are in no record, and no client has all of them."""
        return self.num_completion if self.end in (TurnEnd.FAILED, TurnEnd.ABANDONED) else 0


class SessionEnd(enum.StrEnum):
    """The reason for a session's end."""

    DELETED = "deleted"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """One session, when it is gone: the verdict of its outcome, None if nobody has said one, and its sampled
    tokens."""

    end: SessionEnd
    verdict: RolloutVerdict | None = None
    num_tokens: Mapping[TokenFate, int] = field(default_factory=dict[TokenFate, int])


class Telemetry(Protocol):
    """Counts events. All methods are synchronous, cheap, and never raise."""

    def turn_ended(self, report: TurnReport) -> None:
        """A turn is over."""
        ...

    def reply_delivered(self, reply_s: float) -> None:
        """A reply's last byte has left through its connection, this long after the commit."""
        ...

    def retry_answered(self, *, joined: bool) -> None:
        """A repeated request joined a running turn, or (False) was given a finished one's reply again."""
        ...

    def session_ended(self, report: SessionReport) -> None:
        """A session is gone."""
        ...


class NoTelemetry:
    """Counts nothing."""

    def turn_ended(self, report: TurnReport) -> None: ...
    def reply_delivered(self, reply_s: float) -> None: ...
    def retry_answered(self, *, joined: bool) -> None: ...
    def session_ended(self, report: SessionReport) -> None: ...
