"""A line's tokens as typed bytes: nine bytes a token, whatever its number of turns. Pure; work for the CPU pool.

A page of N tokens is N ids (uint32), then N log-probabilities (float32, nats), then N bytes of flags, all
little-endian. Between the arrays of a turn and the page no token becomes a Python object. Knows no text: a viewer has
the vocabulary (vocabulary.py).
"""

import enum
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.core.kinds import TRAINED_KINDS, HistoryKind
from stenograph.core.logprobs import known_logprobs
from stenograph.core.outcome import Annotation, RolloutVerdict
from stenograph.core.types import LogprobsKind
from stenograph.export.turn_rows import BY_PREFERENCE
from stenograph.trajectory.strand_facts import SessionFacts, kept_leaves, leaves
from stenograph.trajectory.turn import CommittedTurn, Node

TOKEN_BYTES = 9
MAX_PAGE_TOKENS = 65_536
"""Most tokens of one page: 576 KiB."""

TRAINED = 1
"""The flag of a token trained by a sample, as `POST /sessions/{id}/samples` makes them by default."""
SOURCE_SHIFT = 1
VERSION_SHIFT = 3
MAX_VERSIONS = 30
"""Versions of weights distinct in the flags; all later ones share the next number. 0 stands for none."""


class TokenSource(enum.IntEnum):
    """The origin of a token in a line; two bits of its flags."""

    PROMPT = 0
    """The prompt of the line's first turn."""
    BRIDGE = 1
    """Added by a later turn's prompt after the turn before it."""
    SAMPLED = 2
    FORCED = 3
    """Sampled where a grammar allowed no other token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLook:
    """Facts of a session for a page, beside a line's turns.

    `versions` are the names of all weights of its tokens, numbered in order of appearance; `trained` counts by node id
    the first sampled tokens of a turn trained by a sample.
    """

    versions: Mapping[str, int]
    trained: Mapping[int, int]

    @staticmethod
    def of(facts: SessionFacts) -> "TokenLook":
        """The look at a session as it is now."""
        spans = (span for node in facts.nodes for span in node.turn.sampled.weights)
        names = dict.fromkeys(span.version for span in spans)
        return TokenLook(versions={name: number for number, name in enumerate(names, 1)}, trained=trained_tokens(facts))


def kept_lines(facts: SessionFacts) -> list[Node]:
    """The last turns of the lines exported as samples by default."""
    outcome = facts.outcome
    if outcome is not None and outcome.verdict is RolloutVerdict.INFRA_FAILED:
        return []
    kept = leaves(facts.nodes) if facts.options.history is HistoryKind.STRANDS else kept_leaves(facts.nodes)
    by_node = facts.by_node()
    return [leaf for leaf in kept if by_node[leaf.id].kind in TRAINED_KINDS]


def trained_tokens(facts: SessionFacts) -> dict[int, int]:
    """By node id, the number of a turn's sampled tokens trained by a sample, its first ones. Absent: none."""
    found = {leaf.id: len(leaf.turn.sampled.ids) for leaf in kept_lines(facts)}
    for node in reversed(facts.nodes):  # a turn comes after its parent
        if node.id in found and node.parent is not None:
            num = len(node.parent.turn.sampled.ids) - node.turn.num_trimmed
            found[node.parent.id] = max(num, found.get(node.parent.id, 0))
    return found


def shown_kind(turn: CommittedTurn) -> LogprobsKind:
    """The kind of a turn's displayed log-probabilities: as samples prefer them."""
    known = known_logprobs(turn.sampled, turn.params)
    return next(kind for kind in (*BY_PREFERENCE, LogprobsKind.OTHER) if kind in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTurns:
    """A line's turns, and for each the number of tokens down to it, to find those of a page."""

    nodes: Sequence[Node]
    ends: Sequence[int]

    @staticmethod
    def of(leaf: Node) -> "LineTurns":
        """The turns of the line down to `leaf`."""
        nodes = leaf.line()
        return LineTurns(nodes=nodes, ends=[node.num_tokens for node in nodes])

    def num_turns(self, start: int, stop: int) -> int:
        """About how many turns the tokens `[start, stop)` are of."""
        return bisect_right(self.ends, stop) - bisect_right(self.ends, start) + 1


def token_page(line: LineTurns, start: int, stop: int, look: TokenLook, scores: Annotation | None = None) -> bytes:
    """The tokens `[start, stop)` of a line, as far as it has them, with the log-probabilities of `scores` in place of
    the recorded ones. Takes a quarter of a millisecond at most for as many
    as a page has, if they are of few turns."""
    start, stop = max(start, 0), min(stop, line.ends[-1])
    page = _TokenArrays(start, max(stop - start, 0), look, scores)
    for node in line.nodes[bisect_right(line.ends, start) :]:
        turn = node.turn
        if node.num_tokens - len(turn.sampled.ids) - len(turn.new_prompt_ids) >= stop:
            break
        page.add(node)  # a turn writes over what it trims of the one before
    return page.written()


class _TokenArrays:
    """The arrays of a page while turns are written into them."""

    def __init__(self, start: int, num: int, look: TokenLook, scores: Annotation | None) -> None:
        self._start, self._scores = start, scores
        self._look = look
        self._ids: NDArray[np.uint32] = np.zeros(num, "<u4")
        self._logprobs: NDArray[np.float32] = np.full(num, np.nan, "<f4")
        self._flags: NDArray[np.uint8] = np.zeros(num, np.uint8)

    def add(self, node: Node) -> None:
        turn, num_sampled = node.turn, len(node.turn.sampled.ids)
        sampled_at, num_prompt = node.num_tokens - num_sampled, len(turn.new_prompt_ids)
        source = TokenSource.PROMPT if node.parent is None else TokenSource.BRIDGE
        here, there = self._places(sampled_at - num_prompt, num_prompt)
        if here.stop > here.start:
            self._ids[here] = np.frombuffer(turn.new_prompt_ids, np.int32)[there]
            self._logprobs[here] = np.nan
            self._flags[here] = source << SOURCE_SHIFT
        here, there = self._places(sampled_at, num_sampled)
        if here.stop > here.start:
            self._ids[here] = np.frombuffer(turn.sampled.ids, np.int32)[there]
            self._logprobs[here] = self._shown_logprobs(node)[there]
            self._flags[here] = self._sampled_flags(node)[there]

    def _shown_logprobs(self, node: Node) -> NDArray[np.float64]:
        turn = node.turn
        if self._scores is None:
            return np.frombuffer(known_logprobs(turn.sampled, turn.params)[shown_kind(turn)])
        found, scores = np.full(len(turn.sampled.ids), np.nan), self._scores.turns.get(node.id)
        if scores is not None:  # without what a later turn trimmed
            found[: len(scores.logprobs)] = np.frombuffer(scores.logprobs)
        return found

    def _sampled_flags(self, node: Node) -> NDArray[np.uint8]:
        sampled = node.turn.sampled
        flags = np.full(len(sampled.ids), TokenSource.SAMPLED << SOURCE_SHIFT, np.uint8)
        if sampled.forced is not None:
            flags |= np.frombuffer(sampled.forced, np.uint8) << SOURCE_SHIFT
        flags[: self._look.trained.get(node.id, 0)] |= TRAINED
        for span in sampled.weights:
            number = min(self._look.versions[span.version], MAX_VERSIONS + 1)
            flags[span.start : span.end] |= number << VERSION_SHIFT
        return flags

    def _places(self, at: int, num: int) -> tuple[slice, slice]:
        """Places of `num` tokens from `at` of the line on in the page, and which of them it has."""
        first, last = max(at, self._start), min(at + num, self._start + len(self._ids))
        last = max(first, last)
        return slice(first - self._start, last - self._start), slice(first - at, last - at)

    def written(self) -> bytes:
        return self._ids.tobytes() + self._logprobs.tobytes() + self._flags.tobytes()
