"""The rollouts of a group side by side: their lengths, and where their tokens part. Pure; work for the CPU pool.

A rollout is made where its session is, and compared where its group was asked for, perhaps in another process.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from stenograph.core.json_types import Count
from stenograph.export.group_rollouts import COMPARED_TOKENS, GroupRollout, RolloutFacts

MAX_ROLLOUTS = 256
"""Most rollouts of a group to compare."""


class GroupView(TypedDict):
    """The rollouts of a group, so that those which go together for long stand together. The first `compared_tokens` of
    each line are compared; `num_left_out` rollouts are more than are shown."""

    group: str
    rollouts: Sequence[GroupRollout]
    compared_tokens: Count
    num_left_out: Count


def group_view(group: str, rollouts: Sequence[RolloutFacts], *, num_left_out: int) -> GroupView:
    """The rollouts in the order of their tokens."""
    ids = [one.ids for one in rollouts]
    order = sorted(range(len(rollouts)), key=lambda index: (ids[index].astype(">u4").tobytes(), index))
    shown: list[GroupRollout] = []
    for place, index in enumerate(order):
        before = order[place - 1] if place else None
        row = rollouts[index].row
        if before is not None:
            like = rollouts[before].row["session_id"]
            row = row.copy()
            row["like"], row["parts_at"] = like, num_common(ids[before], ids[index])
        shown.append(row)
    return {
        "group": group,
        "rollouts": shown,
        "compared_tokens": COMPARED_TOKENS,
        "num_left_out": num_left_out,
    }


def num_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of ids in the common beginning of two lines."""
    num = min(len(one), len(other))
    differs = one[:num] != other[:num]
    return int(differs.argmax()) if differs.any() else num
