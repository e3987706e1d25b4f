"""A session as a rollout of its group, as far as figures of groups go: made where the session is. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.session.session import Session
from stenograph.session.storage import Listed
from stenograph.trajectory.turn import TurnStatus

MAX_NAME_CHARS = 200


class RolloutPoint(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A rollout of a group, as far as its figures go. `is_cut` and `version` are null of one in the store alone: they
    stand in its turns, which are not read for this."""

    group: str
    step: str | None
    opened_at: float
    reward: float | None
    has_failed: bool
    is_busy: bool
    num_turns: int
    num_tokens: int
    is_cut: bool | None
    version: str | None
    """The oldest version of the weights used to sample some of it."""


def point_of(session: Listed) -> RolloutPoint | None:
    """A session as a rollout of its group; None if it has none."""
    group, totals = session.options.stated.group, session.totals
    if group is None:
        return None
    is_cut, version = None, None
    if isinstance(session, Session):
        nodes = session.nodes
        is_cut = bool(nodes) and nodes[-1].turn.status is TurnStatus.TRUNCATED
        version = _oldest(node.turn.sampled.oldest_version for node in nodes)
    return RolloutPoint(
        group,
        _step_of(session.options.metadata),
        session.created_at,
        _reward_of(session.outcome),
        session.outcome is not None and session.outcome.verdict is not RolloutVerdict.OK,
        bool(session.is_busy),
        totals.num_turns,
        totals.num_tokens,
        is_cut,
        version,
    )


def _step_of(metadata: Mapping[str, object]) -> str | None:
    step = metadata.get("step")
    return str(step)[:MAX_NAME_CHARS] if isinstance(step, int | float | str) and not isinstance(step, bool) else None


def _reward_of(outcome: SessionOutcome | None) -> float | None:
    """A rollout's reward, of several by name the first; None for one failed by infrastructure."""
    if outcome is None or outcome.verdict is RolloutVerdict.INFRA_FAILED:
        return None
    reward = outcome.reward
    return next(iter(reward.values()), None) if isinstance(reward, Mapping) else reward


def _oldest(versions: Iterable[str | None]) -> str | None:
    """The least numeric version; None where there is none."""
    return min((one for one in versions if one is not None and is_number(one)), key=int, default=None)


def is_number(version: str) -> bool:
    """Whether a version of weights is a number, comparable with others."""
    return version.isascii() and version.isdecimal() and len(version) < 16
