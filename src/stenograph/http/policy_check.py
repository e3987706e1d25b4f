"""The check of the LoRA of a new session, against those of the engines. Loaded by the first one that names one."""

import asyncio
from collections.abc import Collection

from stenograph.core.errors import EngineUnavailable, InvalidRequest
from stenograph.engine.base import Engine, EngineState

MAX_SHOWN = 50
"""LoRAs named in an error."""


async def check_policy(engine: Engine, policy: str) -> None:
    """Ask the engines anew if none has listed the LoRA `policy`. Raises InvalidRequest, with the names of the others;
    EngineUnavailable if an engine that may have it does not answer."""
    members = engine.members.values()
    if any(policy in _listed(one) for one in members):
        return
    await asyncio.gather(*(one.find_policies() for one in members))
    found = set[str]().union(*map(_listed, members))
    if policy in found:
        return
    if down := [name for name, one in engine.members.items() if one.health().state is not EngineState.READY]:
        raise EngineUnavailable(f"No engine that answers has the LoRA {policy[:200]!r}, and {down[0]} does not answer.")
    if all(one.capabilities.policies is None for one in members):
        told = f"the engine {engine.capabilities.engine} samples by none"
    else:
        told = f"they have {', '.join(map(repr, sorted(found)[:MAX_SHOWN])) or 'none'}"
    raise InvalidRequest(f"policy: no engine has the LoRA {policy[:200]!r}; {told}.", param="/policy")


def _listed(engine: Engine) -> Collection[str]:
    return engine.capabilities.policies or ()
