"""Readers of one reply: whenever they come and however they are interleaved, each gets all of it, once and in order."""

import asyncio
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import StreamPiece
from stenograph.core.messages import ReplyDelta, ToolCallDelta
from stenograph.core.types import Chunk
from stenograph.session.reply_buffer import BufferReader, ReplyBuffer

CALLS = st.builds(ToolCallDelta, index=st.integers(0, 2), arguments=st.text("{}a", max_size=3))
DELTAS = st.builds(
    ReplyDelta,
    content=st.text("xy", max_size=3),
    reasoning=st.text("rs", max_size=2),
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
)
CHUNKS = st.lists(st.integers(0, 9), max_size=3).map(lambda ids: Chunk(ids=tuple(ids), logprobs=(-1.0,) * len(ids)))


def joined(deltas: list[ReplyDelta]) -> tuple[str, str, dict[int, str]]:
    """What a client makes of deltas, piece by piece."""
    arguments: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), arguments


@given(st.lists(st.tuples(st.integers(0, 2), DELTAS, CHUNKS), max_size=8), st.integers(1, 3), st.data())
def test_every_reader_gets_exactly_what_was_written_to_each_buffer(
    pushes: list[tuple[int, ReplyDelta, Chunk]], num: int, data: st.DataObject
) -> None:
    pushes = [(index % num, delta, chunk) for index, delta, chunk in pushes]

    async def scenario() -> None:
        buffers = [ReplyBuffer() for _ in range(num)]
        readers: list[asyncio.Task[list[StreamPiece]]] = []

        async def read_all(gaps: list[int]) -> list[StreamPiece]:
            reader = BufferReader(buffers)
            pieces: list[StreamPiece] = []
            while (new := await reader.take()) is not None:
                assert new
                pieces += new
                for _ in range(gaps.pop() if gaps else 0):
                    await asyncio.sleep(0)
            reader.close()
            return pieces

        def join() -> None:
            gaps = data.draw(st.lists(st.integers(0, 3), max_size=4), label="passes between takes")
            readers.append(asyncio.get_running_loop().create_task(read_all(gaps)))

        steps: list[Callable[[], None]] = [lambda i=i, d=d, c=c: buffers[i].push(d, c) for i, d, c in pushes]
        join()
        for step in [*steps, *(buffer.close for buffer in buffers)]:
            step()
            if data.draw(st.booleans(), label="a reader joins"):
                join()
            for _ in range(data.draw(st.integers(0, 3), label="passes")):
                await asyncio.sleep(0)
        join()
        for pieces in await asyncio.gather(*readers):
            assert all(piece.delta or piece.chunks for piece in pieces)
            for index in range(num):
                own = [piece for piece in pieces if piece.index == index]
                assert joined([piece.delta for piece in own]) == joined([d for i, d, _ in pushes if i == index])
                ids = [id_ for i, _, chunk in pushes if i == index for id_ in chunk.ids]
                assert [id_ for piece in own for chunk in piece.chunks for id_ in chunk.ids] == ids

    asyncio.run(scenario())


async def test_a_call_that_came_in_pieces_is_taken_as_one_with_the_id_and_name_of_its_first() -> None:
    buffer = ReplyBuffer()
    reader = BufferReader([buffer])
    buffer.push(ReplyDelta(tool_calls=(ToolCallDelta(index=1, id="b", name="g"),)))
    buffer.push(ReplyDelta(tool_calls=(ToolCallDelta(index=0, id="a", name="f", arguments='{"x"'),)))
    buffer.push(
        ReplyDelta(tool_calls=(ToolCallDelta(index=0, arguments=": 1}"), ToolCallDelta(index=1, arguments="{}")))
    )
    pieces = await reader.take()
    assert pieces is not None
    (piece,) = pieces
    assert piece.delta.tool_calls == (
        ToolCallDelta(index=0, id="a", name="f", arguments='{"x": 1}'),
        ToolCallDelta(index=1, id="b", name="g", arguments="{}"),
    )


async def test_a_reader_that_is_closed_while_it_waits_is_told_that_there_is_no_more() -> None:
    buffer = ReplyBuffer()
    reader, other = BufferReader([buffer]), BufferReader([buffer])
    waiting = asyncio.ensure_future(reader.take())
    await asyncio.sleep(0)
    reader.close()
    buffer.push(ReplyDelta(content="later"))
    assert await waiting is None
    assert await reader.take() is None
    reader.close()
    pieces = await other.take()
    assert pieces is not None
    assert pieces[0].delta.content == "later"


async def test_what_brings_nothing_wakes_nobody_with_an_empty_piece() -> None:
    buffer = ReplyBuffer()
    reader = BufferReader([buffer])
    waiting = asyncio.ensure_future(reader.take())
    await asyncio.sleep(0)
    buffer.push(ReplyDelta(), Chunk(ids=(), logprobs=()))
    await asyncio.sleep(0)
    assert not waiting.done()
    buffer.close()
    assert await waiting is None
