"""The tree of cached blocks by their ids, for finding a prompt's beginning again. Pure.

A node is a findable block. Its key is exact, no hash: the serial number of its parent and the bytes of its own ids, so
a node stands for the ids of its whole path. Only full blocks have children; a node of fewer ids is the tail of a line.

Invariant: no node's ids are the beginning of a sibling's, because the sibling would serve the same look-ups. So, in the
order of their bytes, the sibling with most in common with given ids is just before or just after their place.

The pool knows the holders of a block, and decides when one is forgotten.
"""

from array import array
from bisect import bisect_left, insort
from itertools import pairwise
from typing import NamedTuple

BLOCK_TOKENS = 16
"""Positions of a block. Smaller ones share more and cost more to look up."""
ID_BYTES = array("i").itemsize
BLOCK_BYTES = BLOCK_TOKENS * ID_BYTES


class BlockNode:
    """A findable block. `ids` are its tokens as bytes, `num_holders` the live tables with it on their path."""

    __slots__ = ("block", "child_ids", "ids", "num_holders", "parent", "serial")

    def __init__(self, *, serial: int, parent: "BlockNode | None", ids: bytes, block: int) -> None:
        self.serial = serial
        self.parent = parent
        self.ids = ids
        self.block = block
        self.num_holders = 0
        self.child_ids: list[bytes] = []

    def __repr__(self) -> str:
        num_ids = len(self.ids) // ID_BYTES
        return f"<BlockNode {self.serial}: {num_ids} ids in block {self.block}, {self.num_holders} holders>"


class Near(NamedTuple):
    """A node beginning with `num_bytes` of the given ids."""

    node: BlockNode
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether the given ids begin with all of the node's."""
        return self.num_bytes == len(self.node.ids)


class Found(NamedTuple):
    """Whole blocks `path` of the first ids, and the node with some of the ids after them."""

    path: list[BlockNode]
    near: Near | None

    @property
    def num_tokens(self) -> int:
        """Found ids."""
        return len(self.path) * BLOCK_TOKENS + (self.near.num_bytes // ID_BYTES if self.near else 0)


class PrefixTree:
    """All nodes, under a root without a block."""

    def __init__(self) -> None:
        self.root = BlockNode(serial=0, parent=None, ids=b"", block=-1)
        self._nodes: dict[tuple[int, bytes], BlockNode] = {}
        self._num_made = 0

    def __repr__(self) -> str:
        return f"<PrefixTree of {len(self._nodes)} blocks>"

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> list[BlockNode]:
        """All of them but the root, a parent before its children."""
        return sorted(self._nodes.values(), key=lambda node: node.serial)

    def child(self, parent: BlockNode, ids: bytes) -> BlockNode | None:
        """The child with exactly these ids."""
        return self._nodes.get((parent.serial, ids))

    def find(self, ids: bytes) -> Found:
        """The longest beginning of `ids` in the tree: a look-up for each block, whatever the number of nodes."""
        path: list[BlockNode] = []
        nodes, node = self._nodes, self.root
        for begin in range(0, len(ids) - BLOCK_BYTES + 1, BLOCK_BYTES):
            child = nodes.get((node.serial, ids[begin : begin + BLOCK_BYTES]))
            if child is None:
                break
            path.append(child)
            node = child
        begin = len(path) * BLOCK_BYTES
        return Found(path, self.nearest(node, ids[begin : begin + BLOCK_BYTES]))

    def nearest(self, parent: BlockNode, ids: bytes) -> Near | None:
        """The child with the most in common with `ids` at its beginning; None where none shares a token."""
        siblings = parent.child_ids
        if not siblings:
            return None
        at = bisect_left(siblings, ids)
        beside = [(_num_common_bytes(other, ids), other) for other in siblings[max(0, at - 1) : at + 1]]
        num_bytes, other = max(beside)
        return Near(self._nodes[parent.serial, other], num_bytes) if num_bytes else None

    def add(self, parent: BlockNode, ids: bytes, block: int) -> BlockNode:
        """Make a block findable. The caller keeps the invariant of siblings, with `nearest`."""
        assert len(parent.ids) in (0, BLOCK_BYTES), f"{parent!r} is a tail: only full blocks have children"
        assert 0 < len(ids) <= BLOCK_BYTES, f"{len(ids)} bytes of ids for a block of {BLOCK_BYTES}"
        self._num_made += 1
        node = BlockNode(serial=self._num_made, parent=parent, ids=ids, block=block)
        assert self._nodes.setdefault((parent.serial, ids), node) is node, "a block is found under its ids already"
        insort(parent.child_ids, ids)
        return node

    def remove(self, node: BlockNode) -> None:
        """Forget a node; its children are forgotten before it."""
        assert node.parent is not None, "the root stays"
        assert not node.child_ids, f"{node!r} has children"
        del self._nodes[node.parent.serial, node.ids]
        del node.parent.child_ids[bisect_left(node.parent.child_ids, node.ids)]

    def check(self) -> None:
        """Raises AssertionError where keys, links and the order of siblings do not agree."""
        seen = {self.root}
        for node in self.nodes():  # a parent comes first
            assert node.parent in seen, f"{node!r} hangs loose"
            assert self._nodes.get((node.parent.serial, node.ids)) is node, f"{node!r} is under another key"
            assert len(node.ids) == BLOCK_BYTES or not node.child_ids, f"{node!r} is a tail with children"
            seen.add(node)
        for parent in seen:
            assert all((parent.serial, ids) in self._nodes for ids in parent.child_ids), f"{parent!r} lost a child"
            for one, next_ in pairwise(parent.child_ids):
                assert one < next_, f"children of {parent!r} are out of order"
                assert not next_.startswith(one), f"children of {parent!r} break the invariant of siblings"
        assert sum(len(parent.child_ids) for parent in seen) == len(self._nodes), "a child is not listed"


def _num_common_bytes(one: bytes, other: bytes) -> int:
    """Bytes of the ids at the beginning of both."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    steps = range(0, size, ID_BYTES)
    return next(begin for begin in steps if one[begin : begin + ID_BYTES] != other[begin : begin + ID_BYTES])
