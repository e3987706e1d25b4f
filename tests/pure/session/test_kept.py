"""A kept reply that is streamed once more."""

import asyncio
from array import array

from stenograph.core.chat import ChatReply, ParsedReply
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, Prompt, SampledTurn, SamplingParams, Usage, token_ids
from stenograph.session import kept

NUM_IDS = 3_000_000


async def test_the_chunks_of_a_long_reply_are_made_while_the_loop_goes_on() -> None:
    sampled = SampledTurn(
        ids=token_ids([7]) * NUM_IDS,
        logprobs=array("d", [-0.5]) * NUM_IDS,
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=FinishReason.LENGTH),
        weights=(),
        num_cached_tokens=0,
        times=None,
    )
    reply = ChatReply(
        id="r",
        created=0,
        model="m",
        prompt=Prompt(new_ids=token_ids([1])),
        params=SamplingParams(),
        parsed=ParsedReply(message=Message(role=Role.ASSISTANT, content="x")),
        sampled=sampled,
        usage=Usage(num_prompt=1, num_completion=NUM_IDS),
    )
    made = asyncio.ensure_future(kept._piece(reply, 3))
    num_turns = 0
    while not made.done():
        num_turns += 1
        await asyncio.sleep(0)
    piece = await made
    assert num_turns >= 5, "others had their turns meanwhile"
    assert (sum(len(chunk.ids) for chunk in piece.chunks), piece.delta.content, piece.index) == (NUM_IDS, "x", 3)
