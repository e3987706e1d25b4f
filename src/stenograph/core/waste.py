"""Counts the fates of sampled tokens, by the group of their session. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stenograph.core.outcome import TokenFate

MAX_GROUPS = 10_000
"""Groups counted apart; the counts of the one heard of first go to the sessions without a group."""


@dataclass(slots=True)
class GroupCounts:
    """The ended sessions of a group, their sampled tokens by fate, and those of failed or abandoned turns, kept in no
    session."""

    num_ended: int = 0
    num_wasted: int = 0
    num_tokens: dict[TokenFate, int] = field(default_factory=lambda: dict.fromkeys(TokenFate, 0))

    def add(self, other: "GroupCounts") -> None:
        """Add another's counts to these."""
        self.num_ended += other.num_ended
        self.num_wasted += other.num_wasted
        for fate, num_tokens in other.num_tokens.items():
            self.num_tokens[fate] += num_tokens


class WasteCounts:
    """Counts by group since the start; None stands for sessions without one, and for no session."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._max_groups = max_groups
        self._groups: dict[str | None, GroupCounts] = {}

    def __repr__(self) -> str:
        return f"<WasteCounts of {len(self._groups)} groups>"

    @property
    def groups(self) -> Mapping[str | None, GroupCounts]:
        """The counts of each group. A view."""
        return self._groups

    def turn_wasted(self, group: str | None, num_tokens: int) -> None:
        """A turn failed or was abandoned after so many tokens."""
        self._of(group).num_wasted += num_tokens

    def session_ended(self, group: str | None, num_tokens: Mapping[TokenFate, int]) -> None:
        """A session ended, with so many sampled tokens of each fate."""
        self._of(group).add(GroupCounts(num_ended=1, num_tokens=dict(num_tokens)))

    def _of(self, group: str | None) -> GroupCounts:
        counts = self._groups.get(group)
        if counts is None:
            counts = self._groups[group] = GroupCounts()
            named = (one for one in self._groups if one is not None)
            if len(self._groups) > self._max_groups and (oldest := next(named)) != group:
                gone = self._groups.pop(oldest)  # first: the next line may make a group
                self._of(None).add(gone)
        return counts
