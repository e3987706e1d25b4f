"""Where a fork begins, and how many of its tokens were sampled there. Pure. Loaded with the first fork."""

from collections.abc import Mapping

from msgspec import Struct

from stenograph.core.types import SessionId
from stenograph.trajectory.turn import CommittedTurn


class ForkPoint(Struct, frozen=True, kw_only=True, gc=False):
    """The place in another session where one was forked: behind its turn `turn`, or behind the first `token` sampled
    tokens of this turn.

    The fork begins with `num_turns` turns of the other. `cut` is the turn cut at the token, to be continued; None where
    the last turn is whole. `replays`: requests for its first turns get their recorded replies.
    """

    session_id: SessionId
    turn: int
    token: int | None = None
    num_turns: int = 0
    cut: CommittedTurn | None = None
    replays: bool = False

    def shown(self) -> Mapping[str, object]:
        """As metadata."""
        return {"session": self.session_id, "turn": self.turn, "token": self.token}
