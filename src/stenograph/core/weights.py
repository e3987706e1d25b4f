"""Commands of a trainer about the policy's weights, an engine's answers, and whose cache a turn reads. Pure.

An engine takes a `WeightCommand`, with SGLang's modes, and gives one answer for each engine behind it (engine/base.py).
The session room settles differing answers, and the waiting of turns (session/weights.py).
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from stenograph.core.kinds import SaltMode

UNNAMED = "default"
"""SGLang's and vLLM's name of their first weights, if nobody named them."""


class PauseMode(enum.StrEnum):
    """Fate of running generations at a pause."""

    ABORT = "abort"
    """They end with the tokens sampled so far."""
    RETRACT = "retract"
    """They wait, and compute their keys and values again."""
    IN_PLACE = "in_place"
    """They stand still, and keep their keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """Load the weights in a folder and sample with them from then on, under the name `version`.

    `stands_in_place`: generations stand still with the keys and values made by the weights before, and go on with these
    weights. `options` are fields of the engine's own, for engines that know them.
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
    """Forget the keys and values kept for prompts to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameWeights:
    """The present weights have this name from now on: somebody else has sent them."""

    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLora:
    """Load the LoRA in a folder as `name`, in the place of one of that name; its version has the name `version`.

    `replaces`: the engine lists one of that name.
    """

    name: str
    path: str
    version: str
    replaces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadLora:
    """Forget a LoRA."""

    name: str


LoraCommand = LoadLora | UnloadLora
WeightCommand = UpdateWeights | PauseGeneration | ContinueGeneration | FlushCache | NameWeights | LoraCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAnswer:
    """One engine's answer. `problem`: why it has not done it; empty where it has, and then `note` has news for the
    trainer all the same. `num_paused` generations stood still meanwhile."""

    name: str
    problem: str = ""
    note: str = ""
    num_paused: int = 0


class CacheSalt(Struct, frozen=True, kw_only=True, gc=False):
    """A session's mode, and its pinned version, if this was known and anything is pinned."""

    mode: SaltMode = SaltMode.FOLLOW
    pinned: str | None = None

    @staticmethod
    def at(mode: SaltMode, version: str | None) -> "CacheSalt":
        """The salt of a session, or of a turn without one, at its beginning under weights `version`."""
        return CacheSalt(mode=mode, pinned=version if mode is SaltMode.PIN else None)

    def of(self, version: str, known: Collection[SaltMode]) -> str | None:
        """The salt of a turn sampled by weights `version`, at an engine that knows these modes; None: no salt."""
        if self.mode is SaltMode.OFF or self.mode not in known:
            return None
        return (self.pinned if self.mode is SaltMode.PIN else version) or None


FOLLOWING = CacheSalt()


def without_weights(engine: str, command: WeightCommand) -> str:
    """Answer of an engine that only samples: why it cannot do this, or nothing if there is nothing for it to do.

    Its running turns are aborted, and new ones held, by this server.
    """
    match command:
        case UpdateWeights():
            return f"{engine} loads no weights while it runs"
        case LoadLora() | UnloadLora():
            return f"{engine} takes no LoRAs"
        case PauseGeneration(mode=mode) if mode is not PauseMode.ABORT:
            return f"{engine} cannot make running generations stand still; mode 'abort' ends them"
        case FlushCache():
            return f"{engine} has no route that empties its cache"
        case _:
            return ""
