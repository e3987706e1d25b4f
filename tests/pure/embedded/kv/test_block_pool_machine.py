"""The block pool beside a plain model of the store: every row holds the ids up to it, whatever is shared or evicted."""

from array import array
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stenograph.embedded.kv.block_pool import BLOCK_TOKENS, BlockPool, BlockTable

NEW_IDS = st.lists(st.integers(0, 1), min_size=1, max_size=2) | st.integers(1, 40).map(lambda size: [0] * size)
"""Few ids and long runs of one: beginnings, blocks and tails are often the same."""


@dataclass
class Live:
    """A sequence, as the engine would keep it."""

    ids: "array[int]"
    table: BlockTable


def rows_of(table: BlockTable, num_tokens: int) -> list[int]:
    return [row for begin, end in table.spans(num_tokens) for row in range(begin, end)]


class PoolMachine(RuleBasedStateMachine):
    """Sequences that open, grow, compute and close in any order. `store` is what the rows would really hold.

    What stands in for the keys and values of a position is all ids up to it, on which they depend.
    """

    @initialize(num_blocks=st.integers(1, 12), reuse=st.sampled_from([True, True, True, False]))
    def start(self, num_blocks: int, *, reuse: bool) -> None:
        self.num_blocks, self.reuse = num_blocks, reuse
        self.pool = BlockPool(num_blocks, reuse=reuse)
        self.store: dict[int, tuple[int, ...]] = {}
        self.live: list[Live] = []
        self.lines: list[array[int]] = [array("i")]

    def pick(self, data: st.DataObject) -> Live:
        return data.draw(st.sampled_from(range(len(self.live))).map(self.live.__getitem__))

    @rule(data=st.data(), new=NEW_IDS, cut=st.integers(0, 20))
    def open(self, data: st.DataObject, new: list[int], cut: int) -> None:
        line = data.draw(st.sampled_from(range(len(self.lines))).map(self.lines.__getitem__))
        ids = line[: max(0, len(line) - cut)] + array("i", new)
        before, available = self.pool.stats(), self.pool.num_available
        match = self.pool.match(ids)
        assert self.pool.stats() == before, "matching touches nothing"
        table, copy = self.pool.open(ids)
        if copy is not None:
            assert 0 < copy.num_tokens < BLOCK_TOKENS
            assert copy.source // BLOCK_TOKENS != copy.target // BLOCK_TOKENS
            for row in range(copy.num_tokens):
                self.store[copy.target + row] = self.store[copy.source + row]
        num_taken = available - self.pool.num_available
        assert num_taken == table.num_tokens // BLOCK_TOKENS - match.num_shared_blocks
        assert table.num_filled <= match.num_tokens <= len(ids) - 1
        assert table.num_filled == match.num_tokens or (self.pool.num_available <= 1 and copy is None)
        assert self.reuse or table.num_tokens == 0
        after = self.pool.stats()
        assert after.num_evicted == before.num_evicted or before.num_free == 0
        assert after.num_hit_tokens - before.num_hit_tokens == table.num_filled
        assert after.num_missed_tokens - before.num_missed_tokens == len(ids) - table.num_filled
        self.live.append(Live(ids, table))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), new=NEW_IDS)
    def draw(self, data: st.DataObject, new: list[int]) -> None:
        self.pick(data).ids.extend(new)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.integers(1, 64))
    def compute(self, data: st.DataObject, share: int) -> None:
        one = self.pick(data)
        num_filled = min(len(one.ids), one.table.num_filled + share)
        if self.extend(one, num_filled):
            rows = rows_of(one.table, num_filled)[one.table.num_filled :]
            others = {
                row for other in self.live if other is not one for row in rows_of(other.table, other.table.num_filled)
            }
            assert not others & set(rows), "rows that others read are not written"
            for position, row in enumerate(rows, start=one.table.num_filled):
                self.store[row] = tuple(one.ids[: position + 1])
            self.pool.fill(one.table, one.ids, num_filled)
            assert one.table.num_filled == num_filled

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(1, 16 * BLOCK_TOKENS))
    def make_room(self, data: st.DataObject, more: int) -> None:
        one = self.pick(data)
        self.extend(one, one.table.num_filled + more)

    def extend(self, one: Live, num_tokens: int) -> bool:
        table, before, spans = one.table, self.pool.stats(), one.table.spans(one.table.num_tokens)
        num_new = max(0, -(-num_tokens // BLOCK_TOKENS) - table.num_tokens // BLOCK_TOKENS)
        done = self.pool.extend(table, num_tokens)
        after = self.pool.stats()
        assert done == (num_new <= before.num_free + before.num_idle)
        assert after.num_evicted - before.num_evicted == (max(0, num_new - before.num_free) if done else 0)
        assert after.num_held - before.num_held == (num_new if done else 0)
        assert done or (after == before and table.spans(table.num_tokens) == spans)
        assert not done or table.num_tokens >= num_tokens
        return done

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.live.remove(one)
        available, num_evicted = self.pool.num_available, self.pool.stats().num_evicted
        own, num_filled = self.pool.own_blocks(one.table), one.table.num_filled
        self.pool.close(one.table, one.ids)
        assert self.pool.num_available == available + own
        assert self.pool.stats().num_evicted == num_evicted
        again = one.ids[:num_filled] + array("i", [-1])
        assert self.pool.match(again).num_tokens == (num_filled if self.reuse else 0), "what it computed is found"
        self.lines.append(one.ids)

    @invariant()
    def every_filled_position_is_in_its_row(self) -> None:
        for one in self.live:
            rows = rows_of(one.table, one.table.num_filled)
            assert [self.store[row] for row in rows] == [tuple(one.ids[: end + 1]) for end in range(len(rows))]

    @invariant()
    def no_block_is_lost(self) -> None:
        stats = self.pool.stats()
        held = {row // BLOCK_TOKENS for one in self.live for row in rows_of(one.table, one.table.num_tokens)}
        assert stats.num_held == len(held)
        assert stats.num_free + stats.num_idle + stats.num_held == stats.num_blocks == self.num_blocks
        assert self.pool.num_available == stats.num_free + stats.num_idle
        self.pool.check()


TestPool = PoolMachine.TestCase
