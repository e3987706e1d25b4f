"""The seam between a load of conversations and its target, and the facts that are known of a request. Pure.

Two targets: a server spoken to by HTTP (http.py), and the embedded engine in this process (engine.py).
"""

from typing import Protocol

import msgspec

from stenograph.bench.serving.mix import Mix, SessionPlan, TurnPlan

CUT = "length"
"""The finish reason of a reply that had no room."""


class ServedReply(msgspec.Struct, kw_only=True):
    """A request that was answered. Times are monotonic seconds.

    `sent_s` is when the chat was sent, after its session was opened where it is the first; `first_s` None if there was
    nothing to read. `stages_s` is what the other side says of its own time, by stage; it may come later.
    """

    session: int
    turn: int
    due_s: float
    sent_s: float
    pieces_s: list[float]
    end_s: float
    num_prompt: int
    num_completion: int
    num_cached: int
    is_cut: bool
    request_id: str = ""
    stages_s: dict[str, float] = {}

    @property
    def first_s(self) -> float | None:
        """When the first thing to read came."""
        return self.pieces_s[0] if self.pieces_s else None


class Talk(Protocol):
    """A session's client. `prepare` is its own work, before the clock runs; the time after `due_s` is measured."""

    def prepare(self, turn: TurnPlan) -> None:
        """Make ready what `ask` sends."""
        ...

    async def ask(self, turn: TurnPlan, due_s: float) -> ServedReply:
        """Send a turn and hear its reply to the end. Raises RequestFailed."""
        ...

    def close(self) -> None:
        """Let go of what the client holds. A session at a server stays."""
        ...


class Target(Protocol):
    """The server or the engine that answers."""

    def talk(self, number: int, mix: Mix, plan: SessionPlan) -> Talk:
        """The client of a session."""
        ...

    async def collect(self, heard: list[ServedReply]) -> None:
        """After the load: add what the other side knows of the requests, close the sessions. Raises RequestFailed."""
        ...

    async def aclose(self) -> None:
        """End it."""
        ...
