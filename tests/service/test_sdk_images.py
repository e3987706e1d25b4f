"""The SDKs' own ways of sending an image, in a user's message and as a tool's result: one line, with exact ids."""

import base64
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors, types

from stenograph.text.renderer import Renderer

from ..openresponses import check_response
from .images_kit import PAD, seeing_renderer
from .test_images import effective_of, expansion_length, image, part, rig_of, samples
from .test_real_clients import LITELLM, async_client, litellm, litellm_module
from .test_vllm_sessions import Rig

__all__ = ["litellm", "litellm_module"]  # fixtures

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),
]

CALL = '<tool_call>\n{"name": "shoot", "arguments": {}}\n</tool_call>'
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
SHOOT: Any = {"type": "function", "function": {"name": "shoot", "strict": True, "parameters": NO_ARGUMENTS}}
ASKED = "What is here?"

Run = Callable[[str, Any], Awaitable[tuple[int, int]]]
"""Plays two turns at a session's URL, and returns the tokens of their prompts by the answers' usage."""


@pytest.fixture(scope="module")
def seeing() -> Renderer:
    return seeing_renderer()


def data(number: int) -> str:
    return base64.b64encode(image(number)).decode()


async def openai_chat(url: str, _: Any) -> tuple[int, int]:
    async with async_client(f"{url}/v1") as client:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}, part(1)]}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[SHOOT])
        (call,) = reply.choices[0].message.tool_calls or ()
        messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": [part(2)]}]
        options: Any = {"include_usage": True}
        streamed = client.chat.completions.stream(model="m", messages=messages, tools=[SHOOT], stream_options=options)
        async with streamed as stream:
            more = await stream.get_final_completion()
        assert more.choices[0].message.content == "seen"
        assert reply.usage is not None
        assert more.usage is not None
        return reply.usage.prompt_tokens, more.usage.prompt_tokens


async def litellm_chat(url: str, litellm: Any) -> tuple[int, int]:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}, part(1)]}]
    options = {"api_base": f"{url}/v1", **LITELLM}
    first = await litellm.acompletion("openai/m", messages, tools=[SHOOT], **options)
    reply = first.choices[0].message
    messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": [part(2)]}]
    second = await litellm.acompletion("openai/m", messages, tools=[SHOOT], **options)
    assert second.choices[0].message.content == "seen"
    return first.usage.prompt_tokens, second.usage.prompt_tokens


async def openai_responses(url: str, _: Any) -> tuple[int, int]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        tools: list[Any] = [{"type": "function", "name": "shoot", "parameters": NO_ARGUMENTS, "strict": True}]

        def shown(number: int) -> dict[str, Any]:
            return {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{data(number)}"}

        asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": ASKED}, shown(1)]}]
        answer = await client.responses.with_raw_response.create(model="m", input=asked, tools=tools)
        check_response(json.loads(answer.content))
        reply = answer.parse()
        call = next(item for item in reply.output if item.type == "function_call")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": [shown(2)]}
        more = await client.responses.create(model="m", input=[result], tools=tools, previous_response_id=reply.id)
        assert (more.status, more.output_text) == ("completed", "seen")
        assert reply.usage is not None
        assert more.usage is not None
        return reply.usage.input_tokens, more.usage.input_tokens


async def anthropic_messages(url: str, _: Any) -> tuple[int, int]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        tools: list[Any] = [{"name": "shoot", "input_schema": NO_ARGUMENTS}]

        def shown(number: int) -> Any:
            source = {"type": "base64", "media_type": "image/png", "data": data(number)}
            return {"type": "image", "source": source}

        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}, shown(1)]}]
        reply = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=tools)
        (call,) = (block for block in reply.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [shown(2)]}
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(model="m", max_tokens=99, messages=messages, tools=tools) as stream:
            assert await stream.get_final_text() == "seen"
            usages = reply.usage, (await stream.get_final_message()).usage
        with pytest.raises(anthropic.BadRequestError, match="not counted ahead"):
            await client.messages.count_tokens(model="m", messages=messages, tools=tools)
        first, second = (one.input_tokens + (one.cache_read_input_tokens or 0) for one in usages)
        return first, second


async def google_chat(url: str, _: Any) -> tuple[int, int]:
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[types.FunctionDeclaration(name="shoot")])]
    )
    options = types.HttpOptions(base_url=url)
    async with genai.Client(api_key="none", http_options=options).aio as client:
        chat = client.chats.create(model="m", config=config)
        reply = await chat.send_message([ASKED, types.Part.from_bytes(data=image(1), mime_type="image/png")])
        (call,) = reply.function_calls or ()
        shown = types.FunctionResponsePart(inline_data=types.FunctionResponseBlob(data=image(2), mime_type="image/png"))
        result = types.FunctionResponse(id=call.id, name="shoot", response={"at": "once"}, parts=[shown])
        more = await chat.send_message(types.Part(function_response=result))
        assert more.text == "seen"
        with pytest.raises(errors.ClientError, match="not counted ahead"):
            await client.models.count_tokens(model="m", contents=chat.get_history())
        assert reply.usage_metadata is not None
        assert more.usage_metadata is not None
        return reply.usage_metadata.prompt_token_count or 0, more.usage_metadata.prompt_token_count or 0


RUNS: dict[str, Run] = {
    "openai-chat": openai_chat,
    "litellm": litellm_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic_messages,
    "google-genai": google_chat,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
async def test_images_of_a_user_and_of_a_tool_are_one_line_with_exact_ids(
    seeing: Renderer, litellm: Any, run: Run
) -> None:
    async with rig_of(seeing, vocab_size=seeing.tokenizer.vocab_size) as rig:
        rig.says(CALL, "seen")
        session = await rig.session()
        told = await run(f"{rig.url}/sessions/{session}", litellm)
        await check_line(rig, session)
        prompts = [one.json["token_ids"] for one in rig.vllm.requests]
        images = [[1], [1, 2]]
        assert told == tuple(len(effective_of(rig, *one)) for one in zip(prompts, images, strict=True))


async def check_line(rig: Rig, session: str) -> None:
    asked = [one.json for one in rig.vllm.requests]
    assert [len(one["content_parts"]) for one in asked] == [1, 2]
    for before, after in pairwise(asked):
        assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
        assert after["content_parts"][0] == before["content_parts"][0]
    (sample,) = await samples(rig, session)
    assert [row["sha256"] for row in sample["media"]] == [one["uuid"] for one in asked[-1]["content_parts"]]
    assert [row["length"] for row in sample["media"]] == [expansion_length(image(number)) for number in (1, 2)]
    pad = rig.renderer.tokenizer.added_tokens[PAD]
    assert sample["tokens"].count(pad) == sum(row["length"] for row in sample["media"])
