"""The state that all processes of a server have in common: whether turns wait, which weights there are, which engines.

One process changes it, the others follow (`Others`). A state is whole: whoever follows the last one has missed nothing
that still holds. Pure; how it gets there is not known here.
"""

from typing import Protocol

import msgspec

from stenograph.core.weights import UpdateWeights


class SharedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state of the server.

    `num_taken` changes of weights were taken by an engine, the last of them named `version`; the engines `lacking` have
    to take it still. `path` is the folder of the weights that were loaded last, `last_update` the command, if no other
    weights have come since. `addresses` are those of the engines, where they have any.
    """

    is_paused: bool = False
    is_frozen: bool = False
    is_changing: bool = False
    num_taken: int = 0
    version: str | None = None
    lacking: tuple[str, ...] = ()
    last_update: UpdateWeights | None = None
    path: str | None = None
    addresses: tuple[str, ...] = ()


class Others(Protocol):
    """The other processes of the server."""

    async def hold(self, state: SharedState) -> int:
        """Have all follow a state in which turns wait; returns how many turns they run. Raises WorkerUnavailable if one
        that is there does not answer."""
        ...

    async def follow(self, state: SharedState) -> None:
        """Have all follow a state; one that does not answer follows it when it can."""
        ...

    async def abort_all(self) -> int:
        """End every turn with what it has; returns how many there were."""
        ...

    async def change_engines(self, state: SharedState) -> None:
        """Have all use the engines of a state; returns when the turns at those that leave have ended. Raises
        InvalidRequest for one that cannot join."""
        ...


class NoOthers(Others):
    """The others of a server of one process."""

    async def hold(self, state: SharedState) -> int:
        return 0

    async def follow(self, state: SharedState) -> None:
        return

    async def abort_all(self) -> int:
        return 0

    async def change_engines(self, state: SharedState) -> None:
        return
