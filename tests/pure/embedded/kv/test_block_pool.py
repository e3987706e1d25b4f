"""What the block pool promises, one property at a time. All of them at once: test_block_pool_machine.py."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.embedded.forward.base import RowSpan
from stenograph.embedded.kv.block_pool import BLOCK_TOKENS, BlockPool, BlockTable, Copy, Match
from stenograph.embedded.kv.free_blocks import FreeBlocks
from stenograph.embedded.kv.prefix_tree import BLOCK_BYTES, ID_BYTES, PrefixTree

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK_TOKENS + 2).map(lambda ids: array("i", ids))


def ids_of(name: int, num_tokens: int) -> "array[int]":
    """A line that shares no token with one of another name."""
    return array("i", [1000 * name + position for position in range(num_tokens)])


def run(pool: BlockPool, ids: "array[int]") -> tuple[BlockTable, Copy | None]:
    """A sequence that is opened and computed to its end."""
    table, copy = pool.open(ids)
    assert pool.extend(table, len(ids))
    pool.fill(table, ids, len(ids))
    pool.check()
    return table, copy


def run_and_close(pool: BlockPool, ids: "array[int]") -> None:
    table, _ = run(pool, ids)
    pool.close(table, ids)
    pool.check()


def num_found(pool: BlockPool, ids: "array[int]") -> int:
    """Of all of `ids`: one more id stands for what would be computed."""
    return pool.match(ids + array("i", [-1])).num_tokens


def num_common(one: "array[int]", other: "array[int]") -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(IDS, max_size=8), IDS)
def test_all_that_was_computed_is_found_again_while_nothing_is_evicted(
    lines: list["array[int]"], ids: "array[int]"
) -> None:
    pool = BlockPool(256)
    for line in lines:
        run_and_close(pool, line)
    expected = max((num_common(line, ids[:-1]) for line in lines), default=0)
    assert pool.match(ids) == Match(num_tokens=expected, num_shared_blocks=0)
    table, _ = pool.open(ids)
    assert table.num_filled == expected
    assert pool.stats().num_evicted == 0


@given(st.lists(IDS, max_size=8), st.integers(0, 3))
def test_a_turn_of_a_session_computes_only_what_is_new(turns: list["array[int]"], num_others: int) -> None:
    pool, ids = BlockPool(64), array("i")
    for name in range(num_others):
        run_and_close(pool, ids_of(name + 1, 20))
    for turn in turns:
        before = len(ids)
        ids.extend(turn)
        assert num_common(ids[:before], ids) == before
        assert pool.match(ids).num_tokens >= min(before, len(ids) - 1)
        run_and_close(pool, ids)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_the_last_token_is_computed_even_if_all_is_found(num_tokens: int) -> None:
    pool, ids = BlockPool(8), ids_of(1, num_tokens)
    run_and_close(pool, ids)
    assert pool.match(ids).num_tokens == num_tokens - 1
    table, copy = run(pool, ids)
    assert table.num_filled == num_tokens
    # The last block is full, but its last token is to be computed: what comes before it is copied.
    assert (copy is not None) == (num_tokens > 1 and (num_tokens - 1) % BLOCK_TOKENS != 0)


def test_live_sequences_share_whole_blocks() -> None:
    pool, ids = BlockPool(8), ids_of(1, 40)
    first, _ = run(pool, ids)
    assert pool.match(ids) == Match(num_tokens=32, num_shared_blocks=2)
    second, copy = pool.open(ids)
    assert copy is None
    assert second.spans(32) == first.spans(32)
    assert (pool.own_blocks(first), pool.own_blocks(second)) == (1, 0)
    assert pool.stats().num_held == 3


def test_a_block_that_goes_on_differently_is_copied_as_far_as_it_is_the_same() -> None:
    pool, line = BlockPool(8), ids_of(1, 32)
    live, _ = run(pool, line)
    table, copy = pool.open(line[:20] + ids_of(2, 9))
    [row] = {span.begin for span in live.spans(17)}
    assert copy == Copy(source=row + 16, target=table.spans(20)[-1].end - 4, num_tokens=4)
    assert table.num_filled == 20


def test_of_blocks_that_begin_alike_the_one_that_shares_most_is_copied() -> None:
    pool = BlockPool(8)
    for shared in (3, 9, 6):
        run_and_close(pool, ids_of(1, shared) + ids_of(2 + shared, 16 - shared))
    table, copy = pool.open(ids_of(1, 12))
    assert copy is not None
    assert table.num_filled == copy.num_tokens == 9


def test_a_tail_that_the_ids_go_on_from_is_taken_over_where_it_lies() -> None:
    pool, ids = BlockPool(8), ids_of(1, 20)
    first, _ = run(pool, ids)
    rows = first.spans(20)
    pool.close(first, ids)
    table, copy = pool.open(ids + ids_of(2, 40))
    assert copy is None
    assert table.spans(20) == rows
    assert pool.extend(table, 60)
    assert len(table.spans(60)) == 1, "and the rows after it are the next ones"


def test_a_tail_is_not_kept_beside_a_block_that_holds_its_ids() -> None:
    pool, ids = BlockPool(8), ids_of(1, 16)
    one, _ = run(pool, ids[:5])
    other, _ = run(pool, ids)
    pool.close(one, ids[:5])  # the shorter last: found in the full block
    pool.check()
    assert pool.stats().num_idle == 0
    pool.close(other, ids)
    assert (pool.stats().num_idle, num_found(pool, ids[:5])) == (1, 5)


def test_two_that_compute_the_same_keep_their_own_blocks() -> None:
    pool, ids = BlockPool(8), ids_of(1, 40)
    first, second = pool.open(ids)[0], pool.open(ids)[0]
    for table in (first, second):
        assert pool.extend(table, 40)
        pool.fill(table, ids, 40)
        pool.check()
    assert not {row for span in first.spans(40) for row in range(*span)} & {
        row for span in second.spans(40) for row in range(*span)
    }
    assert (pool.own_blocks(first), pool.own_blocks(second)) == (3, 3)
    longer = ids + ids_of(2, 30)
    assert pool.extend(second, 70)
    pool.fill(second, longer, 70)
    assert num_found(pool, longer) == 32, "what follows a block that is found elsewhere stays private"
    pool.close(second, longer)
    pool.check()
    assert num_found(pool, longer) == 70, "until its table is closed"
    assert pool.stats().num_held == 3
    pool.close(first, ids)
    pool.check()
    assert pool.stats().num_idle == 5


def test_a_private_block_is_found_once_its_twin_is_evicted() -> None:
    pool, ids = BlockPool(4), ids_of(1, 32)
    first, second = pool.open(ids)[0], pool.open(ids)[0]
    for table in (first, second):
        assert pool.extend(table, 16)
        pool.fill(table, ids, 16)
    pool.close(first, ids)
    assert pool.extend(second, 4 * BLOCK_TOKENS)
    assert num_found(pool, ids) == 0
    pool.fill(second, ids, 32)
    pool.check()
    assert num_found(pool, ids) == 32


def test_the_oldest_goes_first_and_a_line_from_its_end() -> None:
    pool = BlockPool(8)
    old, young = ids_of(1, 48), ids_of(2, 48)
    run_and_close(pool, old)
    run_and_close(pool, young)
    found: list[tuple[int, int]] = []
    grown = pool.open(ids_of(3, 1))[0]
    for num_blocks in range(1, 9):
        assert pool.extend(grown, num_blocks * BLOCK_TOKENS)
        pool.check()
        found.append((num_found(pool, old), num_found(pool, young)))
    assert found == [(48, 48), (48, 48), (32, 48), (16, 48), (0, 48), (0, 32), (0, 16), (0, 0)]
    assert pool.stats().num_evicted == 6


def test_a_reused_block_is_evicted_last() -> None:
    pool = BlockPool(4)
    first, second = ids_of(1, 32), ids_of(2, 32)
    run_and_close(pool, first)
    run_and_close(pool, second)
    table, _ = pool.open(first + ids_of(3, 1))
    pool.close(table, first)
    run_and_close(pool, ids_of(4, 32))
    assert (num_found(pool, first), num_found(pool, second)) == (32, 0)


def test_a_large_pool_evicts_a_run_at_once() -> None:
    pool = BlockPool(128)
    old = ids_of(1, 128 * BLOCK_TOKENS)
    run_and_close(pool, old)
    table, _ = pool.open(ids_of(2, 1))
    for num_tokens in range(1, 65):
        assert pool.extend(table, num_tokens)
    assert pool.stats().num_evicted == 4
    assert len(table.spans(64)) <= 2


def test_a_prompt_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4)
    run_and_close(pool, ids_of(1, 32))
    held, _ = run(pool, ids_of(2, 16))
    table, _ = pool.open(ids_of(3, 64))
    before = (pool.stats(), table.num_tokens)
    assert not pool.extend(table, 49)
    assert (pool.stats(), table.num_tokens) == before
    assert num_found(pool, ids_of(1, 32)) == 32
    assert pool.extend(table, 48)
    pool.check()
    assert pool.num_available == 0
    assert pool.own_blocks(held) == 1


def test_a_block_is_not_evicted_for_its_own_copy() -> None:
    pool, line = BlockPool(1), ids_of(1, 16)
    run_and_close(pool, line)
    table, copy = pool.open(line[:8] + ids_of(2, 8))
    assert copy is None
    assert table.num_filled == table.num_tokens == 0
    assert num_found(pool, line) == 16
    assert pool.extend(table, 16)
    assert num_found(pool, line) == 0
    pool.check()


def test_a_copy_never_evicts_its_own_source() -> None:
    pool, line = BlockPool(2), ids_of(1, 16)
    run_and_close(pool, line)
    run_and_close(pool, ids_of(2, 16))
    table, copy = pool.open(line[:8] + ids_of(3, 8))
    assert copy is not None
    assert table.num_filled == 8
    assert (num_found(pool, line), num_found(pool, ids_of(2, 16))) == (16, 0)
    pool.check()


def test_without_reuse_nothing_is_found_and_nothing_is_kept() -> None:
    pool, ids = BlockPool(8, reuse=False), ids_of(1, 40)
    table, _ = run(pool, ids)
    assert pool.match(ids) == Match(num_tokens=0, num_shared_blocks=0)
    pool.close(table, ids)
    pool.check()
    stats = pool.stats()
    assert (stats.num_free, stats.num_idle, stats.num_hit_tokens, stats.num_missed_tokens) == (8, 0, 0, 40)


def test_ids_that_differ_late_or_in_their_parents_are_kept_apart() -> None:
    pool = BlockPool(16)
    end = ids_of(9, 16)
    run_and_close(pool, ids_of(1, 16) + end)
    run_and_close(pool, ids_of(2, 16))
    assert num_found(pool, ids_of(2, 16) + end) == 16
    assert num_found(pool, ids_of(1, 15) + array("i", [7]) + end) == 15
    assert num_found(pool, end) == 0


def test_a_pool_has_a_block_and_ids_have_their_type() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
    with pytest.raises(AssertionError, match="type q"):
        BlockPool(1).match(array("q", [1, 2]))
    with pytest.raises(AssertionError, match="at least one id"):
        BlockPool(1).open(array("i"))


def test_pool_and_table_tell_how_they_stand_in_a_line() -> None:
    pool = BlockPool(8)
    run_and_close(pool, ids_of(1, 16))
    table, _ = pool.open(ids_of(2, 20))
    assert pool.extend(table, 20)
    pool.fill(table, ids_of(2, 20), 18)
    assert repr(pool) == "<BlockPool 2 held, 1 idle, 5 free>"
    assert repr(table) == "<BlockTable 18 of 32 tokens filled, 1 spans>"


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12), st.lists(st.integers(0, 2), max_size=4)
)
def test_the_nearest_sibling_is_the_one_that_shares_most(lines: list[list[int]], wanted: list[int]) -> None:
    tree, kept = PrefixTree(), set[bytes]()
    for line in map(tuple, lines):
        ids = array("i", line).tobytes()
        if not any(ids.startswith(other) or other.startswith(ids) for other in kept):
            tree.add(tree.root, ids, block=len(kept))
            kept.add(ids)
    tree.check()
    near = tree.nearest(tree.root, array("i", wanted).tobytes())
    arrays = [array("i", ids) for ids in kept]
    expected = max((num_common(array("i", wanted), one) for one in arrays), default=0)
    assert (near.num_bytes if near else 0) == expected * ID_BYTES < BLOCK_BYTES


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_free_blocks_are_given_once_and_first_where_the_table_ends(is_taken: list[bool], data: st.DataObject) -> None:
    free = FreeBlocks(len(is_taken))
    free.take(len(is_taken), after=None)
    expected = {block for block, taken in enumerate(is_taken) if not taken}
    for block in expected:
        free.give(block)
    num_blocks = data.draw(st.integers(0, len(expected)))
    after = data.draw(st.none() | st.integers(0, len(is_taken) - 1))
    runs = free.take(num_blocks, after=after)
    free.check()
    blocks = [block for run in runs for block in run]
    assert len(blocks) == len(set(blocks)) == num_blocks
    assert set(blocks) <= expected
    assert {block for block in range(len(is_taken)) if block in free} == expected - set(blocks)
    if num_blocks and after is not None and after + 1 in expected:
        assert blocks[0] == after + 1


def test_sequences_that_grow_side_by_side_stay_contiguous_while_blocks_are_free() -> None:
    pool = BlockPool(64)
    tables = [pool.open(ids_of(name, 1))[0] for name in range(4)]
    for num_tokens in range(1, 8 * BLOCK_TOKENS + 1):
        for table in tables:
            assert pool.extend(table, num_tokens)
    assert [len(table.spans(8 * BLOCK_TOKENS)) for table in tables] == [1, 1, 1, 1]


def test_a_new_table_begins_inside_the_longest_free_run() -> None:
    free = FreeBlocks(10)
    free.take(10, after=None)
    for block in (0, 3, 4, 5, 6, 9):
        free.give(block)
    assert free.take(2, after=None) == [range(4, 6)]


def test_tables_that_share_a_path_have_the_same_spans() -> None:
    pool = BlockPool(16)
    tables = [pool.open(ids_of(name, 1))[0] for name in range(8)]
    assert all(pool.extend(table, BLOCK_TOKENS) for table in tables)
    ids = ids_of(9, 5 * BLOCK_TOKENS + 1)
    first, _ = run(pool, ids)
    assert len(first.spans(len(ids))) > 1
    second, _ = pool.open(ids)
    pool.check()
    assert second.spans(len(ids) - 1) == first.spans(len(ids) - 1)


@given(st.integers(0, 5 * BLOCK_TOKENS))
def test_spans_are_the_first_rows_of_the_table(num_tokens: int) -> None:
    pool = BlockPool(9)
    tables = [pool.open(ids_of(name, 1))[0] for name in range(3)]
    for num_blocks in (1, 2, 3):
        for table in tables:
            assert pool.extend(table, num_blocks * BLOCK_TOKENS)
    table = tables[0]
    pool.close(tables[1], array("i"))
    assert pool.extend(table, 5 * BLOCK_TOKENS)
    whole = [row for span in table.spans(5 * BLOCK_TOKENS) for row in range(*span)]
    spans = table.spans(num_tokens)
    assert [row for span in spans for row in range(*span)] == whole[:num_tokens]
    assert all(isinstance(span, RowSpan) and span.begin < span.end for span in spans)
    assert all(one.end != next_.begin for one, next_ in pairwise(spans))
