"""The place of a fork, in the payload of its opening. Pure. Loaded by the first fork."""

from stenograph.core.types import SessionId
from stenograph.store.codec.turns import WrittenTurn, turn_read, turn_written
from stenograph.trajectory.commits import PlacedTurn
from stenograph.trajectory.forks import ForkPoint
from stenograph.trajectory.turn import Node

WrittenFork = tuple[str, int, int | None, int, WrittenTurn | None, bool]


def fork_written(fork: ForkPoint) -> WrittenFork:
    """The place, as a list of MessagePack."""
    cut = None if fork.cut is None else turn_written(PlacedTurn(turn=fork.cut))
    return fork.session_id, fork.turn, fork.token, fork.num_turns, cut, fork.replays


def fork_read(
    session_id: str, turn: int, token: int | None, num_turns: int, cut: WrittenTurn | None, replays: bool
) -> ForkPoint:
    """The place. Raises ValueError."""
    return ForkPoint(
        session_id=SessionId(session_id),
        turn=turn,
        token=token,
        num_turns=num_turns,
        cut=None if cut is None else turn_read(cut, _no_node).turn,
        replays=replays,
    )


def _no_node(id_: int) -> Node:
    raise ValueError(f"a cut turn says that it comes after turn {id_}, and brings all that it needs")
