"""One sequence's rows in the KV store. Pure.

Owns the order of a sequence's blocks, and their rows as spans, merged as blocks are appended, so a step walks a few
spans, not all blocks. The pool decides on the block to take, and knows its content.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from stenograph.embedded.forward.base import RowSpan
from stenograph.embedded.kv.prefix_tree import BLOCK_TOKENS, BlockNode


class BlockTable:
    """One sequence's blocks. Its pool changes it; all others read.

    `path` are the nodes of its first blocks, the findable ones; the blocks after them are `private_blocks`.
    `num_filled` positions are computed: [0, num_filled).
    """

    __slots__ = ("_spans", "blocks", "num_filled", "path")

    def __init__(self, path: list[BlockNode]) -> None:
        self.path = path
        self.blocks: list[int] = []
        self._spans: list[RowSpan] = []
        for run in _runs_of([node.block for node in path]):
            self.append(run)
        self.num_filled = self.num_tokens

    def __repr__(self) -> str:
        return f"<BlockTable {self.num_filled} of {self.num_tokens} tokens filled, {len(self._spans)} spans>"

    @property
    def num_tokens(self) -> int:
        """Positions with rows: whole blocks."""
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def private_blocks(self) -> list[int]:
        """The blocks found by no other sequence."""
        return self.blocks[len(self.path) :]

    def spans(self, num_tokens: int, first: int = 0) -> tuple[RowSpan, ...]:
        """The rows of positions [first, num_tokens), in order; none is empty, and touching ones are merged."""
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} positions of {self!r}"
        spans: list[RowSpan] = []
        for begin, end in self._spans:
            if num_tokens <= 0:
                break
            size = end - begin
            if first < min(size, num_tokens):
                spans.append(RowSpan(begin + max(0, first), min(end, begin + num_tokens)))
            first -= size
            num_tokens -= size
        return tuple(spans)

    def append(self, run: range) -> None:
        """Go on in these blocks."""
        self.blocks += run
        begin, end = run.start * BLOCK_TOKENS, run.stop * BLOCK_TOKENS
        if self._spans and self._spans[-1].end == begin:
            begin = self._spans.pop().begin
        self._spans.append(RowSpan(begin, end))

    def check(self, root: BlockNode) -> None:
        """Raises AssertionError where path, blocks, spans and counts do not agree."""
        assert all(node.parent is parent for parent, node in pairwise([root, *self.path])), f"{self!r} holds no path"
        assert [node.block for node in self.path] == self.blocks[: len(self.path)], f"{self!r} is not where its path is"
        starts = chain.from_iterable(range(begin, end, BLOCK_TOKENS) for begin, end in self._spans)
        assert [row // BLOCK_TOKENS for row in starts] == self.blocks, f"{self!r} has other spans"
        assert all(one.end != next_.begin for one, next_ in pairwise(self._spans)), f"spans of {self!r} touch"
        assert len(self.path) * BLOCK_TOKENS <= self.num_filled <= self.num_tokens, f"{self!r} is filled wrong"


def _runs_of(blocks: Sequence[int]) -> Iterator[range]:
    """Runs of adjacent blocks."""
    breaks = [at for at, (one, next_) in enumerate(pairwise(blocks), start=1) if next_ != one + 1]
    for begin, end in pairwise([0, *breaks, len(blocks)]):
        if begin < end:
            yield range(blocks[begin], blocks[end - 1] + 1)
