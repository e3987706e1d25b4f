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
from google.genai import types

from stenograph.text.renderer import Renderer

from ..openresponses import check_response
from .images_kit import PAD, seeing_renderer
from .test_images import expansion_length, image, part, rig_of, samples
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

Run = Callable[[str, Any], Awaitable[None]]


@pytest.fixture(scope="module")
def seeing() -> Renderer:
    return seeing_renderer()


def data(number: int) -> str:
    return base64.b64encode(image(number)).decode()


async def openai_chat(url: str, _: Any) -> None:
    async with async_client(f"{url}/v1") as client:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}, part(1)]}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[SHOOT])
        (call,) = reply.choices[0].message.tool_calls or ()
        messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": [part(2)]}]
        async with client.chat.completions.stream(model="m", messages=messages, tools=[SHOOT]) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "seen"


async def litellm_chat(url: str, litellm: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}, part(1)]}]
    options = {"api_base": f"{url}/v1", **LITELLM}
    reply = (await litellm.acompletion("openai/m", messages, tools=[SHOOT], **options)).choices[0].message
    messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": [part(2)]}]
    reply = (await litellm.acompletion("openai/m", messages, tools=[SHOOT], **options)).choices[0].message
    assert reply.content == "seen"


async def openai_responses(url: str, _: Any) -> None:
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


async def anthropic_messages(url: str, _: Any) -> None:
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


async def google_chat(url: str, _: Any) -> None:
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
        assert (await chat.send_message(types.Part(function_response=result))).text == "seen"


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
        await run(f"{rig.url}/sessions/{session}", litellm)
        await check_line(rig, session)


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
