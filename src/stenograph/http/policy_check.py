"""The check of the LoRA of a new session, against those of the engines. Loaded by the first one that names one."""

import asyncio
from collections.abc import Collection
from weakref import WeakKeyDictionary

from stenograph.core.errors import EngineUnavailable, InvalidRequest
from stenograph.engine.base import Engine, EngineState

MAX_SHOWN = 50
"""LoRAs named in an error."""
RETRY_S = 3.0
"""The pause between two probes of an engine that is down."""


class SharedProbe:
    """An engine's answers to those who ask for its LoRAs: one probe at a time, the next one for all who came meanwhile.

    Each waits for a probe that begins after it came, so it finds a LoRA loaded just before.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_begun = self._last_ended = 0

    async def of(self, engine: Engine) -> None:
        """Have `engine.capabilities` newer than this call."""
        wanted = self._num_begun + 1
        async with self._turn:
            if self._last_ended >= wanted:
                return
            self._num_begun = number = self._num_begun + 1
            await engine.find_policies()  # cancelled with its caller, it has not ended: the next one begins another
            self._last_ended = number


_PROBES = WeakKeyDictionary[Engine, SharedProbe]()
"""By engine, as long as it lives: an engine that nobody asks for a LoRA has none."""


async def check_policy(engine: Engine, policy: str) -> None:
    """Ask the engines anew if none has listed the LoRA `policy`. Raises InvalidRequest, with the names of the others;
    EngineUnavailable if an engine that may have it does not answer."""
    members = engine.members.values()
    if any(policy in _listed(one) for one in members):
        return
    await asyncio.gather(*(_PROBES.setdefault(one, SharedProbe()).of(one) for one in members))
    found = set[str]().union(*map(_listed, members))
    if policy in found:
        return
    for name, one in engine.members.items():
        if (health := one.health()).state is not EngineState.READY:
            raise EngineUnavailable(
                f"No engine that is ready has the LoRA {policy[:200]!r}, and {name} is not: {health.detail}.",
                retry_after_s=RETRY_S,
            )
    if all(one.capabilities.policies is None for one in members):
        told = f"the engine {engine.capabilities.engine} samples by none"
    else:
        told = f"they have {', '.join(map(repr, sorted(found)[:MAX_SHOWN])) or 'none'}"
    raise InvalidRequest(f"policy: no engine has the LoRA {policy[:200]!r}; {told}.", param="/policy")


def _listed(engine: Engine) -> Collection[str]:
    return engine.capabilities.policies or ()
