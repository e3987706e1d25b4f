"""Turns that a LoRA samples: their services, and the versions of the LoRA. Loaded by the first one."""

from dataclasses import replace

from msgspec import structs

from stenograph.core.errors import EngineUnavailable
from stenograph.session.services import TurnServices
from stenograph.session.weights import SyncState, Weights


def services_of(services: TurnServices, policy: str) -> TurnServices:
    """The services of a session's turns. Raises EngineUnavailable where the engine would sample by its own model."""
    if services.engine.capabilities.policies is None:
        kind = services.engine.capabilities.engine
        raise EngineUnavailable(f"The session is sampled by the LoRA {policy!r}, and the engine {kind} takes none.")
    return replace(services, policy=policy, weights=services.weights.of(policy))


class LoraWeights(Weights):
    """The weights of turns by a LoRA. They change with the model's, and by each load of the LoRA.

    `version` is the name that its last load gave, the model's before. What is cached is named by both.
    """

    def __init__(self, model: Weights) -> None:
        self._model = model
        self.loaded: str | None = None
        """The name that its last load gave."""
        super().__init__(model.version)
        self.is_paused, self.is_held, self._is_frozen = model.is_paused, model.is_held, model.is_frozen
        self.num_changes = model.num_changes % 2

    def load(self, version: str | None) -> None:
        """End a load, under way since `begin_change`. None: no engine has taken it."""
        self.loaded = version or self.loaded
        self.end_change(version)
        if version is not None and self._model.on_taken is not None:
            self._model.on_taken()

    def name(self, version: str | None) -> None:
        super().name(self.loaded or version)

    def end_change(self, version: str | None) -> None:
        super().end_change(None if version is None else self.loaded or version)

    def follow(self, state: SyncState) -> None:
        super().follow(structs.replace(state, version=self.loaded or state.version))

    def _named(self, version: str | None) -> None:
        super()._named(version)
        if self.loaded is not None:
            self.cached_as = f"{self._model.cached_as or ''}+{self.loaded}"
