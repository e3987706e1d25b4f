"""The services of turns that a LoRA samples. Loaded by the first one."""

from dataclasses import replace

from stenograph.core.errors import EngineUnavailable
from stenograph.session.services import TurnServices


def services_of(services: TurnServices, policy: str) -> TurnServices:
    """The services of a session's turns. Raises EngineUnavailable where the engine would sample by its own model."""
    if services.engine.capabilities.policies is None:
        kind = services.engine.capabilities.engine
        raise EngineUnavailable(f"The session is sampled by the LoRA {policy!r}, and the engine {kind} takes none.")
    return replace(services, policy=policy)
