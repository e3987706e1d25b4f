"""The outcome of a rollout, as its trainer or its agent says it. Pure."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass


class RolloutVerdict(enum.StrEnum):
    """Verdicts on a rollout."""

    OK = "ok"
    """The agent came to its end, well or badly: the reward says how."""
    AGENT_FAILED = "agent_failed"
    """The agent broke, by the policy's doing or by itself."""
    INFRA_FAILED = "infra_failed"
    """Something else broke: the policy is not to blame, and its tokens say nothing about it."""
    ABORTED = "aborted"
    """Somebody ended it early."""


class TokenFate(enum.StrEnum):
    """Fates of a session's sampled tokens; each token has the first fitting one."""

    TRAINED = "trained"
    """In samples given out, with mask 1."""
    DISCARDED = "discarded"
    """In a turn replaced by a later turn of the session."""
    INFRA_FAILED = "infra_failed"
    """In a rollout with an infrastructure failure."""
    ABORTED = "aborted"
    """In a turn ended early by the engine."""
    UNTRAINED = "untrained"
    """In none of these: nobody asked for them, or they were left out."""


NO_VERDICT = "none"
"""Stands for the verdict of a session ended without an outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """A verdict, a reward if there is one (a number, or numbers by name), and words for a person."""

    verdict: RolloutVerdict = RolloutVerdict.OK
    reward: float | Mapping[str, float] | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        values = self.reward.values() if isinstance(self.reward, Mapping) else (self.reward or 0.0,)
        if not all(map(math.isfinite, values)):
            raise ValueError(f"a reward is a finite number, got {self.reward!r}")
