"""The rollouts of a batch as they ended: a run of the agent, a task's group, all of them; and why runs failed. Pure."""

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from stenograph.client.samples import DecodedSamples, Reward
from stenograph.client.session import RolloutEnd
from stenograph.client.shown import error_line, html_page, one_line, printable, repr_line, reward_text
from stenograph.client.tree import Tree, tree_of

T = TypeVar("T")

_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Rollout(Generic[T]):
    """One run of the agent. `error` is set if its end is not `ok`; `samples` is None if none were collected.

    `num_tries` counts sessions: more than one after failures by infrastructure.
    """

    task: T
    group: str
    session_id: str | None
    end: RolloutEnd
    reward: Reward | None
    error: BaseException | None
    samples: DecodedSamples | None
    seconds: float
    num_tries: int

    @property
    def num_trained(self) -> int:
        """Trained tokens of all samples."""
        return sum(sample.num_trained for sample in self.samples or ())

    def __repr__(self) -> str:
        samples = "no samples" if self.samples is None else f"{len(self.samples)} samples"
        failed = "" if self.error is None else f", {error_line(self.error)}"
        return (
            f"<Rollout of {repr_line(self.task)}: {self.end}, reward {reward_text(self.reward)}, {samples},"
            f" {self.num_trained} trained tokens, {self.seconds:.1f} s{failed}>"
        )

    def _repr_html_(self) -> str:
        below = "" if self.error is None else RolloutError.of([self]).traceback
        return html_page(f"Rollout of {repr_line(self.task)}", _COLUMNS, [_row(self)], below=below)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RolloutGroup(Generic[T]):
    """The rollouts of one task. `rollouts` are the counted ones, in the order of their ends; `others` the rest.

    `index` is the number of the task among the batch's.
    """

    index: int
    name: str
    task: T
    is_whole: bool
    rollouts: tuple[Rollout[T], ...]
    others: tuple[Rollout[T], ...]

    def tree(self) -> Tree:
        """The samples of the counted rollouts as one tree, in their order."""
        return tree_of(sample for rollout in self.rollouts for sample in rollout.samples or ())

    def __repr__(self) -> str:
        rewards = one_line(", ".join(reward_text(rollout.reward) for rollout in self.rollouts))
        whole = "whole" if self.is_whole else "not whole"
        return (
            f"<RolloutGroup {self.index} of {repr_line(self.task)}: {whole}, {len(self.rollouts)} rollouts and"
            f" {len(self.others)} others, rewards {rewards or 'none'}>"
        )

    def _repr_html_(self) -> str:
        title = f"Group {self.index} of {repr_line(self.task)}, {'whole' if self.is_whole else 'not whole'}"
        return html_page(title, _COLUMNS, map(_row, (*self.rollouts, *self.others)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RolloutError:
    """Failures alike: errors of one class, raised at one line. `error` is the first; `traceback` begins in the agent.

    `ends` counts the rollouts by their ends.
    """

    error: BaseException
    traceback: str
    ends: Counter[RolloutEnd]

    @classmethod
    def of(cls, rollouts: "Iterable[Rollout[T]]") -> "RolloutError":
        """The common failure of these rollouts; the first one's error stands for all."""
        failed = [rollout for rollout in rollouts if rollout.error is not None]
        first = failed[0].error
        assert first is not None, "these have failed"
        return cls(error=first, traceback=agent_traceback(first), ends=Counter(rollout.end for rollout in failed))

    def __repr__(self) -> str:
        return f"<RolloutError {self.count} times {error_line(self.error)}>"

    @property
    def count(self) -> int:
        """Rollouts with this failure."""
        return self.ends.total()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RolloutBatch(Generic[T]):
    """`groups` are whole, in the order of their tasks, at most `keep_groups`; `others` all other begun ones."""

    groups: tuple[RolloutGroup[T], ...]
    others: tuple[RolloutGroup[T], ...]
    is_complete: bool
    seconds: float

    @property
    def rollouts(self) -> tuple[Rollout[T], ...]:
        """The counted rollouts of the whole groups."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    def errors(self) -> tuple[RolloutError, ...]:
        """The distinct failures of all rollouts, the most frequent first. Cancelled rollouts have not failed."""
        alike: dict[object, list[Rollout[T]]] = {}
        for rollout in self._every():
            if rollout.error is not None and rollout.end != "aborted":
                alike.setdefault(error_place(rollout.error), []).append(rollout)
        found = map(RolloutError.of, alike.values())
        return tuple(sorted(found, key=lambda one: one.count, reverse=True))

    def __repr__(self) -> str:
        ends = Counter(rollout.end for rollout in self._every())
        told = ", ".join(f"{number} {end}" for end, number in ends.most_common()) or "no rollout"
        errors = self.errors()
        failed = f"; {repr(errors[0])[1:-1]} (see .errors())" if errors else ""
        whole = f"{len(self.groups)} of {len(self.groups) + len(self.others)} groups whole"
        return f"<RolloutBatch {whole}, {told}, {self.seconds:.1f} s{failed}>"

    def _repr_html_(self) -> str:
        rows = (
            (
                group.index,
                repr_line(group.task),
                len(group.rollouts),
                len(group.others),
                one_line(", ".join(reward_text(rollout.reward) for rollout in group.rollouts)),
                sum(rollout.num_trained for rollout in group.rollouts),
            )
            for group in sorted((*self.groups, *self.others), key=lambda group: group.index)
        )
        columns = ("group", "task", "rollouts", "others", "rewards", "trained tokens")
        below = "\n".join(f"{error.count} times:\n{error.traceback}" for error in self.errors())
        return html_page(repr(self)[1:-1], columns, rows, below=below)

    def _every(self) -> Iterator[Rollout[T]]:
        for group in (*self.groups, *self.others):
            yield from group.rollouts
            yield from group.others


_COLUMNS = ("session", "end", "reward", "samples", "trained tokens", "seconds", "error")


def _row(rollout: Rollout[T]) -> tuple[object, ...]:
    return (
        rollout.session_id,
        rollout.end,
        reward_text(rollout.reward),
        len(rollout.samples or ()),
        rollout.num_trained,
        f"{rollout.seconds:.1f}",
        "" if rollout.error is None else error_line(rollout.error),
    )


def error_place(error: BaseException) -> object:
    """The common key of like failures: the class and the raising line; without a traceback, the message."""
    frames = traceback.extract_tb(error.__traceback__)
    return (type(error), *((frames[-1].filename, frames[-1].lineno) if frames else (error_line(error),)))


def agent_traceback(error: BaseException) -> str:
    """The traceback from the agent's first line on; control characters are escaped."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == _PACKAGE and trace.tb_next is not None:
        trace = trace.tb_next
    return printable("".join(traceback.format_exception(type(error), error, trace)))
