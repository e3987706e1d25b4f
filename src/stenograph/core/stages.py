"""The stages of a turn, and when each ended. Pure: whoever marks one brings the time."""

import enum
from operator import itemgetter

from msgspec import Struct, field


class Stage(enum.StrEnum):
    """A named, timed part of a turn, in the order in which they are passed."""

    RECEIVE = "receive"
    ADMIT = "admit"
    DECODE = "decode"
    RENDER = "render"
    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE_TOKENS = "decode_tokens"
    VALIDATE = "validate"
    STORE = "store"
    COMMIT = "commit"
    REPLY = "reply"


class StageTimes(Struct, kw_only=True, gc=False):
    """Ends of one turn's stages, in monotonic seconds; grown as the turn goes on, by its owner alone.

    `ends` is by the stages' names: the garbage collector does not scan a dict of strings and floats.
    """

    start: float
    ends: dict[str, float] = field(default_factory=dict[str, float])

    def mark(self, stage: Stage, now: float) -> None:
        """Record `now` as the end of `stage`."""
        self.ends[stage._value_] = now  # not `value`, a descriptor in Python

    def durations_s(self) -> dict[Stage, float]:
        """Seconds of each stage: from the end of the stage before it, in order of time."""
        durations: dict[Stage, float] = {}
        before = self.start
        for name, end in sorted(self.ends.items(), key=itemgetter(1)):
            if end > before:
                durations[_STAGES[name]] = end - before
                before = end
            else:
                durations[_STAGES[name]] = 0.0
        return durations


_STAGES = {stage.value: stage for stage in Stage}

AFTER_WRITING = frozenset({Stage.STORE, Stage.COMMIT, Stage.REPLY})
"""Stages that end once a turn is written, or would be: no row has them, and so no record."""
