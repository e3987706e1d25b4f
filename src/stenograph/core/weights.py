"""Commands of a trainer about the policy's weights, and an engine's answers. Pure.

An engine takes a `WeightCommand`, with SGLang's modes, and gives one answer for each engine behind it (engine/base.py);
what is done with answers that differ, and when turns wait, the session room says (session/weights.py).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class PauseMode(enum.StrEnum):
    """Fate of running generations at a pause."""

    ABORT = "abort"
    """They end with what they have sampled."""
    RETRACT = "retract"
    """They wait, and compute their keys and values again."""
    IN_PLACE = "in_place"
    """They stand still, and keep their keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """Load the weights in a folder and sample with them from then on, under the name `version`.

    `stands_in_place`: generations stand still with the keys and values that the weights before made, and go on with
    these weights. `options` are fields of the engine's own, which only an engine that knows them takes.
    """

    path: str
    version: str
    flushes_cache: bool = True
    stands_in_place: bool = False
    options: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseGeneration:
    """Sample nothing until `ContinueGeneration`."""

    mode: PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueGeneration:
    """Go on after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Forget the keys and values of prompts that may come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameWeights:
    """The weights that are there have this name from now on: somebody else has sent them."""

    version: str


WeightCommand = UpdateWeights | PauseGeneration | ContinueGeneration | FlushCache | NameWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAnswer:
    """One engine's answer. `problem`: why it has not done it; empty where it has, and then `note` says what a trainer
    should know all the same. `num_paused` generations stood still meanwhile."""

    name: str
    problem: str = ""
    note: str = ""
    num_paused: int = 0


def without_weights(engine: str, command: WeightCommand) -> str:
    """Answer of an engine that only samples: why it cannot do this, or nothing if there is nothing for it to do.

    Its running turns are aborted, and new ones held, by this server.
    """
    match command:
        case UpdateWeights():
            return f"{engine} loads no weights while it runs"
        case PauseGeneration(mode=mode) if mode is not PauseMode.ABORT:
            return f"{engine} cannot make running generations stand still; mode 'abort' ends them"
        case FlushCache():
            return f"{engine} has no route that empties its cache"
        case _:
            return ""
