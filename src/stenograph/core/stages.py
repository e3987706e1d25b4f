"""The stages of a turn, and when each ended. Pure: whoever sets one brings the time."""

import enum
from operator import attrgetter, itemgetter

from msgspec import Struct


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
    """Ends of one turn's stages, in monotonic seconds; set as the turn goes on, by its owner alone. None: not yet."""

    start: float
    receive: float | None = None
    admit: float | None = None
    decode: float | None = None
    render: float | None = None
    tokenize: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode_tokens: float | None = None
    validate: float | None = None
    store: float | None = None
    commit: float | None = None
    reply: float | None = None

    @property
    def ends(self) -> dict[str, float]:
        """By the names of the stages that have ended."""
        return {name: end for name, end in zip(_STAGES, _ENDS(self), strict=True) if end is not None}

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
_ENDS = attrgetter(*_STAGES)

AFTER_WRITING = frozenset({Stage.STORE, Stage.COMMIT, Stage.REPLY})
"""Stages that end once a turn is written, or would be: no row has them, and so no record."""
