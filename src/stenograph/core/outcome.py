"""Judgements on a rollout after its turns: its outcome, as its trainer or its agent says it, and scores of its tokens,
as a model gives them. Pure."""

import enum
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain


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
    """Fates of sampled tokens. Each token has exactly one (session/fates.py)."""

    OPEN = "open"
    """Undecided: somebody may train it still."""
    TRAINED = "trained"
    """In samples with a receipt; of a session never claimed, in samples given out."""
    CUT = "cut"
    """In a session that was trained, and outside its samples: beyond `max_seq_len`, or re-emitted by the next turn."""
    RETRY = "retry"
    """In a turn replaced by a later turn of the session."""
    SIDE = "side"
    """In a side strand."""
    DISCARDED = "discarded"
    """In a turn without a reader, or in a session that ended or was abandoned before anybody trained it."""
    ABORTED = "aborted"
    """In a turn ended early by an update of the weights or an abort, and not trained."""
    STALE = "stale"
    """In a session abandoned for its age in versions of the weights."""
    INFRA = "infra"
    """In a turn that failed, or a rollout with an infrastructure failure."""


NO_VERDICT = "none"
"""Stands for the verdict of a session ended without an outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """A verdict, a reward if there is one (a number, or numbers by name), and words for a person.

    `turns` are rewards by turn, `tokens` rewards of each sampled token by turn; both by node id.
    """

    verdict: RolloutVerdict = RolloutVerdict.OK
    reward: float | Mapping[str, float] | None = None
    detail: str | None = None
    turns: Mapping[int, float] = field(default_factory=dict[int, float])
    tokens: "Mapping[int, array[float]]" = field(default_factory=dict[int, "array[float]"])

    def __post_init__(self) -> None:
        values = self.reward.values() if isinstance(self.reward, Mapping) else (self.reward or 0.0,)
        if not all(map(math.isfinite, chain(values, self.turns.values(), *self.tokens.values()))):
            raise ValueError(f"a reward is a finite number, got {self.reward!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScores:
    """Scores of a turn's first N sampled tokens: `logprobs` [N] float64, nats. `top_ids` int32 and `top_logprobs`
    float64 [N * K] are the K likeliest at each place, row by row; empty where none were asked for."""

    logprobs: "array[float]"
    top_ids: "array[int]"
    top_logprobs: "array[float]"

    def __post_init__(self) -> None:
        if len(self.top_ids) != len(self.top_logprobs) or (self.top_ids and len(self.top_ids) % len(self.logprobs)):
            raise ValueError(f"{len(self.top_ids)} alternatives of {len(self.logprobs)} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Scores of a session's recorded tokens by a teacher-forced pass: of the turns by node id, or of `tokens` by their
    text at one place.

    `digest` is that of everything scored and of the weights: the same again is not scored again. `policy` is the model
    or LoRA by the engine's name, None for the one that samples. `at` is in seconds of the epoch.
    """

    name: str
    digest: str
    engine: str
    policy: str | None
    version: str | None
    at: float
    turns: Mapping[int, TurnScores]
    tokens: Mapping[str, float]

    @property
    def num_scored(self) -> int:
        """Tokens with a score."""
        return len(self.tokens) + sum(len(turn.logprobs) for turn in self.turns.values())

    @property
    def num_held(self) -> int:
        """Its numbers in memory, as tokens are counted."""
        return self.num_scored + sum(len(turn.top_ids) for turn in self.turns.values())
