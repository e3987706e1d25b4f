"""Assigns blocks of the KV store to sequences, and finds computed prefixes again. Pure.

The store is blocks of 16 rows. Each of them is at any time one of three things:

    free      its content is not needed
    findable  a node of the prefix tree: full, or the filled tail of an ended sequence.
              Held by the live tables with it on their path; idle where there is none
    private   one table's alone: not full yet, or its ids are found in another block already

Invariants. A table is a path of the tree from its root, then private blocks. So the holder of a node holds its parents,
below an idle node all is idle, and every idle block can be had. A findable block's rows are not written. Blocks are
evicted only for new ones, the oldest first: an idle block is as old as the last table to leave it, and a path is left
from its end, so that a child is older than its parent and goes before it.

Knows no array, no model and no time: the owner of the rows writes and copies them.
"""

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import chain

from stenograph.embedded.kv.block_table import BlockTable as BlockTable
from stenograph.embedded.kv.free_blocks import FreeBlocks
from stenograph.embedded.kv.prefix_tree import BLOCK_TOKENS as BLOCK_TOKENS
from stenograph.embedded.kv.prefix_tree import ID_BYTES, BlockNode, Found, Near, PrefixTree

EVICTED_SHARE = 32
"""If blocks run short, at least one block in this many is evicted at once, so that growing tables find runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A sequence's cached prefix: tokens of all ids but its last, and how many whole blocks of them live tables hold.

    Those cost no block to take; taking an idle one leaves one less to be had. Where none is to be had at all, the few
    tokens to copy are not found.
    """

    num_tokens: int
    num_shared_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Rows [source, source + num_tokens) are to be copied to [target, …), at once: the pool counts them as filled."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Blocks by state; ids found and not found, and blocks evicted, since the start."""

    num_blocks: int
    num_free: int
    num_idle: int
    num_held: int
    num_hit_tokens: int
    num_missed_tokens: int
    num_evicted: int


class BlockPool:
    """All blocks of a KV store. `ids` are arrays of type "i". With `reuse` False nothing is found, for comparison.

    Not for several threads.
    """

    def __init__(self, num_blocks: int, *, reuse: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool has at least one block, got {num_blocks}")
        self._num_blocks = num_blocks
        self._reuse = reuse
        self._free = FreeBlocks(num_blocks)
        self._tree = PrefixTree()
        self._tables: set[BlockTable] = set()
        # The oldest first. Of a plain dict the first is found by passing all that went before it.
        self._idle: OrderedDict[BlockNode, None] = OrderedDict()
        self._num_hit_tokens = self._num_missed_tokens = self._num_evicted = 0

    def __repr__(self) -> str:
        num_held = self._num_blocks - self.num_available
        return f"<BlockPool {num_held} held, {len(self._idle)} idle, {len(self._free)} free>"

    @property
    def num_available(self) -> int:
        """Blocks to be had: the free ones, and the idle ones, then found no more."""
        return len(self._free) + len(self._idle)

    def own_blocks(self, table: BlockTable) -> int:
        """Blocks held by `table` alone: so many more can be had once it is closed."""
        return len(table.blocks) - _num_held(table.path, by_at_least=2)

    def match(self, ids: "array[int]") -> Match:
        """The tokens and blocks for `open` to find. Mutates nothing."""
        found = self._find(ids)
        return Match(num_tokens=found.num_tokens, num_shared_blocks=_num_held(found.path, by_at_least=1))

    def open(self, ids: "array[int]") -> tuple[BlockTable, Copy | None]:
        """A table of the found prefix of all ids but the last: the last is always computed, for its logits.

        Whole blocks are shared. Where the next one begins alike, a tail continued by the ids is taken over where it
        lies; of any other block the beginning is to be copied, if there is a block to copy it to.
        """
        found = self._find(ids)
        for node in found.path:
            if not node.num_holders:
                del self._idle[node]
            node.num_holders += 1
        table = BlockTable(found.path)
        self._tables.add(table)
        copy = None if found.near is None else self._begin_like(table, found.near)
        self._num_hit_tokens += table.num_filled
        self._num_missed_tokens += len(ids) - table.num_filled
        return table, copy

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Take blocks for positions [0, num_tokens). False, and no change, if too few are free or idle."""
        num_blocks = -(-num_tokens // BLOCK_TOKENS) - len(table.blocks)
        if num_blocks > self.num_available:
            return False
        if num_blocks > 0:
            self._take(table, num_blocks)
        return True

    def fill(self, table: BlockTable, ids: "array[int]", num_filled: int) -> None:
        """Positions [0, num_filled) of `ids` are computed now: full blocks can be found.

        A block stays private if its ids are found elsewhere (two computed them at once), and so do the blocks after it,
        until the other one is evicted or the table is closed.
        """
        assert table.num_filled <= num_filled <= min(len(ids), table.num_tokens), f"{num_filled} filled of {table!r}"
        table.num_filled = num_filled
        for index in range(len(table.path), num_filled // BLOCK_TOKENS):
            own_ids = _bytes_of_block(ids, index, num_filled)
            node = self._publish(self._end_of(table), own_ids, table.blocks[index])
            if node is None:
                break
            node.num_holders = 1
            table.path.append(node)

    def close(self, table: BlockTable, ids: "array[int]") -> None:
        """Give back all blocks. Filled ones can be found, the tail too, until they are evicted."""
        assert table.num_filled <= len(ids), f"{len(ids)} ids for {table!r}"
        self._tables.remove(table)
        for node in table.path:
            node.num_holders -= 1
        for index in range(len(table.path), len(table.blocks)):
            self._leave_private(table, index, _bytes_of_block(ids, index, table.num_filled))
        for node in reversed(table.path):
            if not node.num_holders:
                self._idle[node] = None
                self._idle.move_to_end(node)

    def forget_idle(self) -> None:
        """Make all idle blocks free: nothing is found any more but the blocks of live tables."""
        self._evict(len(self._idle))

    def stats(self) -> PoolStats:
        """Counts, now."""
        return PoolStats(
            num_blocks=self._num_blocks,
            num_free=len(self._free),
            num_idle=len(self._idle),
            num_held=self._num_blocks - self.num_available,
            num_hit_tokens=self._num_hit_tokens,
            num_missed_tokens=self._num_missed_tokens,
            num_evicted=self._num_evicted,
        )

    def check(self) -> None:
        """Raise AssertionError where an invariant above does not hold. Reads everything: for tests and idle times."""
        self._tree.check()
        self._free.check()
        nodes = self._tree.nodes()
        for table in self._tables:
            table.check(self._tree.root)
        holders = Counter(chain.from_iterable(table.path for table in self._tables))
        assert all(node.num_holders == holders[node] for node in nodes), "a node's holders are not its tables"
        assert set(self._idle) == {node for node in nodes if not node.num_holders}, "idle are not those without holders"
        ages = {node: age for age, node in enumerate(self._idle)}
        pairs = [(node, node.parent) for node in ages if node.parent in ages]
        assert all(ages[node] < ages[parent] for node, parent in pairs), "a parent is older than its child"
        private = chain.from_iterable(table.private_blocks for table in self._tables)
        free = (block for block in range(self._num_blocks) if block in self._free)
        blocks = sorted(chain(free, private, (node.block for node in nodes)))
        assert blocks == list(range(self._num_blocks)), "a block is lost, or is two things"

    def _find(self, ids: "array[int]") -> Found:
        assert len(ids) > 0, "a sequence has at least one id"
        return self._tree.find(_bytes_of(ids, 0, len(ids) - 1))

    def _leave_private(self, table: BlockTable, index: int, own_ids: bytes) -> None:
        """Make a block of a closing table findable, or free where its ids are found elsewhere: the path leads there."""
        parent = self._end_of(table)
        node = self._publish(parent, own_ids, table.blocks[index])
        if node is None:
            self._free.give(table.blocks[index])
            node = self._tree.child(parent, own_ids)
        if node is not None:
            table.path.append(node)

    def _end_of(self, table: BlockTable) -> BlockNode:
        return table.path[-1] if table.path else self._tree.root

    def _begin_like(self, table: BlockTable, near: Near) -> Copy | None:
        """Give an opening table the tokens in common between the block after its path and its ids."""
        node, num_tokens = near.node, near.num_bytes // ID_BYTES
        if near.is_whole:
            self._forget(node)
            table.append(range(node.block, node.block + 1))
            table.num_filled += num_tokens
            return None
        is_idle = not node.num_holders
        if self.num_available == is_idle:
            return None
        if is_idle:
            del self._idle[node]  # it is not evicted for its own copy
        self._take(table, 1)
        if is_idle:
            self._idle[node] = None
        table.num_filled += num_tokens
        source, target = node.block * BLOCK_TOKENS, table.blocks[-1] * BLOCK_TOKENS
        return Copy(source=source, target=target, num_tokens=num_tokens)

    def _take(self, table: BlockTable, num_blocks: int) -> None:
        """Append private blocks; so many can be had."""
        num_short = num_blocks - len(self._free)
        if num_short > 0:
            self._evict(max(num_short, self._num_blocks // EVICTED_SHARE))
        for run in self._free.take(num_blocks, after=table.blocks[-1] if table.blocks else None):
            table.append(run)

    def _evict(self, num_blocks: int) -> None:
        for _ in range(min(num_blocks, len(self._idle))):
            node = next(iter(self._idle))
            self._forget(node)
            self._free.give(node.block)
            self._num_evicted += 1

    def _publish(self, parent: BlockNode, own_ids: bytes, block: int) -> BlockNode | None:
        """Make a private block findable; None where its ids are found already, or there are none."""
        if not own_ids or not self._reuse:
            return None
        near = self._tree.nearest(parent, own_ids)
        if near is not None and near.num_bytes == len(own_ids):
            return None
        if near is not None and near.is_whole:  # a tail that this block goes on from
            self._forget(near.node)
            self._free.give(near.node.block)
        return self._tree.add(parent, own_ids, block)

    def _forget(self, node: BlockNode) -> None:
        """Make an idle block private: it is found no more."""
        del self._idle[node]
        self._tree.remove(node)


def _num_held(path: list[BlockNode], *, by_at_least: int) -> int:
    """Nodes of a path held by so many tables: its first ones, since the holder of a node holds its parents."""
    return bisect_right(path, -by_at_least, key=lambda node: -node.num_holders)


def _bytes_of(ids: "array[int]", begin: int, end: int) -> bytes:
    assert ids.typecode == "i", f"ids of type {ids.typecode}"
    return ids[begin:end].tobytes()


def _bytes_of_block(ids: "array[int]", index: int, num_filled: int) -> bytes:
    return _bytes_of(ids, index * BLOCK_TOKENS, min((index + 1) * BLOCK_TOKENS, num_filled))
