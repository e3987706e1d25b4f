"""The official OpenAI SDK and LiteLLM over a real socket: what they send, replay, retry and abandon."""

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import httpx
import openai
import pydantic
import pytest

from standins.scripted_engine import Script
from stenograph.core.errors import EngineUnavailable
from stenograph.core.types import GrammarKind
from stenograph.offload.pool import CpuPool

from .conftest import Live, output_ids, user

# litellm, its own code: what it does when it is imported and with its clients, not what we do.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),
]

T = TypeVar("T")
Serve = Callable[..., AbstractAsyncContextManager[Live]]

SYSTEM = {"role": "system", "content": "Be brief."}
BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
STRICT_BASH = {**BASH, "function": {**BASH["function"], "strict": True}}
LITELLM = {"api_key": "sk-test", "num_retries": 0, "_skip_mcp_handler": True}
"""The last one: without it LiteLLM cannot use tools where its `mcp` extra is not installed."""

RUN = (
    "<think>\nLook first.\n</think>\n\nI will look.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls -a", "depth": 1.0}}\n</tool_call>',
    "<think>\nTwo more.\n</think>\n\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command":"cat README.md"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "git status"}}\n</tool_call>',
    " It is naïve ☃.\n",
    "<think>\nSay goodbye.\n</think>\n\nBye.",
)
"""Replies of a run with one call, two parallel ones, a text with space around it, and a second user turn."""


def async_client(base_url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key="sk-test", **{"max_retries": 0, **options})


def base_url_of(live: Live, session: str) -> str:
    return f"{live.url}/sessions/{session}/v1"


@pytest.fixture(scope="session")
def litellm_module() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the default downloads it
        yield importlib.import_module("litellm")


@pytest.fixture
async def litellm(litellm_module: Any) -> AsyncIterator[Any]:
    """LiteLLM; the connections that it keeps are closed on the loop that they belong to."""
    litellm_module.in_memory_llm_clients_cache.flush_cache()
    yield litellm_module
    await litellm_module.close_litellm_async_clients()
    litellm_module.in_memory_llm_clients_cache.flush_cache()


# --- What each client replays -----------------------------------------------------------------------------------------

Ask = Callable[[str, list[Any], Any], Awaitable[Any]]
"""(base URL, messages, litellm) -> the assistant message as that client's loop appends it to its messages."""


async def sdk_object(base_url: str, messages: list[Any], _: Any) -> Any:
    async with async_client(base_url) as client:
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[BASH])
        return reply.choices[0].message


async def sdk_dump(base_url: str, messages: list[Any], _: Any) -> Any:
    """With every field that the SDK's type has: refusal, annotations, audio and function_call are null."""
    return (await sdk_object(base_url, messages, _)).model_dump()


async def sdk_dump_without_nulls(base_url: str, messages: list[Any], _: Any) -> Any:
    return (await sdk_object(base_url, messages, _)).model_dump(exclude_none=True)


async def sdk_parse(base_url: str, messages: list[Any], _: Any) -> Any:
    """The parsing calls want strict tools, and add `parsed` and `parsed_arguments` to what they replay."""
    async with async_client(base_url) as client:
        reply = await client.chat.completions.parse(model="m", messages=messages, tools=[STRICT_BASH])
        return reply.choices[0].message


async def sdk_stream_helper(base_url: str, messages: list[Any], _: Any) -> Any:
    async with (
        async_client(base_url) as client,
        client.chat.completions.stream(model="m", messages=messages, tools=[STRICT_BASH]) as stream,
    ):
        return (await stream.get_final_completion()).choices[0].message


async def sdk_stream_by_hand(base_url: str, messages: list[Any], _: Any) -> Any:
    """As many an agent does it: text and calls are kept, the reasoning is dropped."""
    async with async_client(base_url) as client:
        stream = await client.chat.completions.create(model="m", messages=messages, tools=[BASH], stream=True)
        text, calls = "", dict[int, dict[str, Any]]()
        async for chunk in stream:
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for part in delta.tool_calls or ():
                call = calls.setdefault(part.index, {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = part.id or call["id"]
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments
        return {"role": "assistant", "content": text, **({"tool_calls": list(calls.values())} if calls else {})}


async def sync_sdk(base_url: str, messages: list[Any], _: Any) -> Any:
    def ask() -> Any:
        with openai.OpenAI(base_url=base_url, api_key="sk-test", max_retries=0) as client:
            reply = client.chat.completions.create(model="m", messages=messages, tools=[BASH])
            return reply.choices[0].message

    return await asyncio.to_thread(ask)


async def sync_sdk_stream(base_url: str, messages: list[Any], _: Any) -> Any:
    def ask() -> Any:
        with (
            openai.OpenAI(base_url=base_url, api_key="sk-test", max_retries=0) as client,
            client.chat.completions.stream(model="m", messages=messages, tools=[STRICT_BASH]) as stream,
        ):
            return stream.get_final_completion().choices[0].message.to_dict()

    return await asyncio.to_thread(ask)


def litellm_whole(provider: str, *, dump: bool) -> Ask:
    async def ask(base_url: str, messages: list[Any], litellm: Any) -> Any:
        reply = await litellm.acompletion(f"{provider}/m", messages, tools=[BASH], api_base=base_url, **LITELLM)
        message = reply.choices[0].message
        return message.model_dump() if dump else message

    return ask


def litellm_stream(provider: str) -> Ask:
    async def ask(base_url: str, messages: list[Any], litellm: Any) -> Any:
        stream = await litellm.acompletion(
            f"{provider}/m",
            messages,
            tools=[BASH],
            api_base=base_url,
            **LITELLM,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message.model_dump()

    return ask


CLIENTS: dict[str, Ask] = {
    "openai-object": sdk_object,
    "openai-dump": sdk_dump,
    "openai-dump-without-nulls": sdk_dump_without_nulls,
    "openai-parse": sdk_parse,
    "openai-stream-helper": sdk_stream_helper,
    "openai-stream-by-hand": sdk_stream_by_hand,
    "openai-sync": sync_sdk,
    "openai-sync-stream": sync_sdk_stream,
    "litellm-openai-object": litellm_whole("openai", dump=False),
    "litellm-openai-dump": litellm_whole("openai", dump=True),
    "litellm-openai-stream": litellm_stream("openai"),
    "litellm-hosted_vllm-object": litellm_whole("hosted_vllm", dump=False),
    "litellm-hosted_vllm-dump": litellm_whole("hosted_vllm", dump=True),
    "litellm-hosted_vllm-stream": litellm_stream("hosted_vllm"),
}


def as_dict(message: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = message if isinstance(message, dict) else message.model_dump()
    return dumped


async def converse(live: Live, base_url: str, ask: Ask, replies: Sequence[str], litellm: Any) -> list[Script]:
    """Play `replies` to a client that runs the tools that it is told to, and goes on with a user's word."""
    scripts = [live.says(reply) for reply in replies]
    messages: list[Any] = [SYSTEM, user("What is here?")]
    for _ in replies:
        message = await ask(base_url, messages, litellm)
        messages.append(message)
        calls = as_dict(message).get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "README.md"} for call in calls]
        if not calls:
            messages.append(user("Go on."))
    return scripts


async def check_one_line(live: Live, session: str, scripts: Sequence[Script]) -> None:
    """Every turn extended the one before it, and the one sample is what the engine got and drew."""
    prompts = [list(request.prompt.ids) for request in live.engine.requests]
    assert len(prompts) == len(scripts)
    for turn, script in enumerate(scripts[:-1]):
        before = prompts[turn] + list(script.ids)
        assert prompts[turn + 1][: len(before)] == before
    nodes = live.manager.sessions.get(session).nodes
    assert [node.id for node in nodes] == list(range(len(scripts)))
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert [output_ids(record) for record in view["records"]] == [list(script.ids) for script in scripts]
    (sample,) = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert sample["tokens"] == prompts[-1] + list(scripts[-1].ids)
    response = sample["tokens"][-sample["response_length"] :]
    kept = [
        pair for *pair, mask in zip(response, sample["rollout_log_probs"], sample["loss_mask"], strict=True) if mask
    ]
    drawn = [[id_, -(i + 1) / 8] for script in scripts for i, id_ in enumerate(script.ids)]
    assert kept == drawn


MARKED = ("<thinking>Look.</thinking>I will.", "<think>\na\n</think>\n\n<think>b</think>Ok.", "<b>c</b>", "<thinking>d")
"""Replies whose text begins with what a client may take for reasoning; LiteLLM moves the first one's there."""


@pytest.mark.parametrize("client", CLIENTS)
async def test_reasoning_that_only_the_client_recognizes_keeps_the_line(live: Live, litellm: Any, client: str) -> None:
    session = await live.open()
    scripts = await converse(live, base_url_of(live, session), CLIENTS[client], MARKED, litellm)
    await check_one_line(live, session, scripts)


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_run_of_a_real_client_is_one_line_that_only_grows(live: Live, litellm: Any, client: str) -> None:
    session = await live.open()
    scripts = await converse(live, base_url_of(live, session), CLIENTS[client], RUN, litellm)
    await check_one_line(live, session, scripts)


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_the_sdk_are_one_line_that_only_grows(live: Live, stream: bool) -> None:
    """As a rollout by ids: each prompt is what the last one was, what was sampled, and new ids."""
    session = await live.open()
    scripts = [live.says(text) for text in ("one", "naïve ☃", "bye")]
    line: list[int] = []
    async with async_client(base_url_of(live, session)) as client:
        for new in ([5, 6], [7], [8]):
            line += new
            asked: dict[str, Any] = {
                "model": "m",
                "prompt": list(line),
                "max_tokens": 64,
                "logprobs": 1,
                "extra_body": {"return_token_ids": True},
            }
            if stream:
                chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
                choices: list[Any] = [choice for chunk in chunks for choice in chunk.choices]
            else:
                choices = list((await client.completions.create(**asked)).choices)
            ids = [id_ for choice in choices for id_ in getattr(choice, "token_ids", None) or []]
            logprobs = [lp for choice in choices if choice.logprobs for lp in choice.logprobs.token_logprobs]
            assert choices[0].prompt_token_ids == line
            assert choices[-1].finish_reason == "stop"
            assert logprobs == [-(i + 1) / 8 for i in range(len(ids))]
            line += ids
    await check_one_line(live, session, scripts)


async def test_the_sdk_sends_several_prompts_and_is_told_of_a_context_that_is_too_long(live: Live) -> None:
    async with async_client(f"{live.url}/v1") as client:
        for text in ("one", "two"):
            live.says(text)
        reply = await client.completions.create(model="m", prompt=["a", "b"], stop=["zz"], n=1, best_of=1, echo=False)
        assert [choice.text for choice in reply.choices] == ["one", "two"]
        assert reply.usage is not None
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt=[5] * 100, max_tokens=4096)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "/max_tokens")


async def test_litellm_takes_a_context_that_is_too_long_for_what_it_is(live: Live, litellm: Any) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion("openai/m", [user("hi")], api_base=f"{live.url}/v1", max_tokens=32000, **LITELLM)


async def test_numbers_that_a_javascript_client_spells_its_own_way_keep_the_line(live: Live) -> None:
    """Its numbers are doubles: `JSON.stringify(JSON.parse(arguments))` is what it sends back."""
    session = await live.open()
    arguments = '{"id": 12345678901234567890, "big": 123456789012345678901234, "whole": 1.0, "zero": -0.0, "e": 1e21}'
    scripts = [live.says(f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'), live.says("ok")]
    answer = await live.chat(session, user("hi"), tools=[BASH])
    message = answer.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == arguments
    call["function"]["arguments"] = (
        '{"id":12345678901234567000,"big":1.2345678901234568e+23,"whole":1,"zero":0,"e":1e+21}'
    )
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    assert (await live.chat(session, user("hi"), message, result, tools=[BASH])).status == 200
    await check_one_line(live, session, scripts)


async def test_reasoning_text_and_calls_reach_a_real_client_as_its_own_types(live: Live, litellm: Any) -> None:
    for ask in (
        sdk_object,
        sdk_stream_helper,
        litellm_whole("openai", dump=False),
        litellm_whole("hosted_vllm", dump=False),
    ):
        live.says(RUN[0])
        session = await live.open()
        message = await ask(base_url_of(live, session), [SYSTEM, user("hi")], litellm)
        assert (message.content, message.reasoning_content) == ("I will look.", "Look first.")
        (call,) = message.tool_calls
        assert call.function.name == "bash"
        assert call.function.arguments == '{"command":  "ls -a", "depth": 1.0}'


async def test_a_session_can_be_named_by_the_key_that_a_client_is_configured_with(live: Live) -> None:
    session = await live.open()
    scripts = [live.says("one"), live.says("two")]
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=session, max_retries=0) as client:
        messages: list[Any] = []
        for _ in scripts:
            messages.append(user("hi"))
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message)
        assert [model.id async for model in client.models.list()] == ["tiny"]
    await check_one_line(live, session, scripts)


class Verdict(pydantic.BaseModel):
    """What a client wants to be answered with."""

    passed: bool
    reason: str


async def test_a_json_schema_of_a_real_client_holds_the_engine_and_comes_back_parsed(live: Live, litellm: Any) -> None:
    session = await live.open()
    scripts = [live.says('{"passed": true, "reason": "ok"}'), live.says('{"passed": false, "reason": ""}')]
    messages: list[Any] = [user("judge")]
    async with async_client(base_url_of(live, session)) as client:
        reply = await client.chat.completions.parse(model="m", messages=messages, response_format=Verdict)
    assert reply.choices[0].message.parsed == Verdict(passed=True, reason="ok")
    messages += [reply.choices[0].message.to_dict(), user("again")]
    answer = await litellm.acompletion(
        "openai/m", messages, response_format=Verdict, api_base=base_url_of(live, session), api_key="sk-test"
    )
    assert Verdict.model_validate_json(answer.choices[0].message.content) == Verdict(passed=False, reason="")
    for request in live.engine.requests:
        assert request.params.grammar is not None
        assert request.params.grammar.kind is GrammarKind.JSON_SCHEMA
        assert set(json.loads(request.params.grammar.source)["properties"]) == {"passed", "reason"}
    await check_one_line(live, session, scripts)


async def test_a_forced_call_of_a_real_client_is_held_by_a_grammar(live: Live) -> None:
    session = await live.open()
    async with async_client(base_url_of(live, session)) as client:
        for choice in ("required", {"type": "function", "function": {"name": "bash"}}):
            live.says(RUN[0])
            await client.chat.completions.create(
                model="m", messages=[user("hi")], tools=[BASH], tool_choice=choice, parallel_tool_calls=False
            )
    assert all(request.params.grammar is not None for request in live.engine.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_has_one_server_and_one_date_header(live: Live, stream: bool) -> None:
    """LiteLLM's transport refuses a reply that has two of either."""
    session = await live.open()
    path = f"{base_url_of(live, session)}/chat/completions"
    async with httpx.AsyncClient() as client:
        for bodies in ({"messages": [user("hi")], "stream": stream}, {"messages": []}):
            live.says("x")
            answer = await client.post(path, json=bodies)
            for name in ("server", "date"):
                assert len(answer.headers.get_list(name)) == 1


# --- Retries ----------------------------------------------------------------------------------------------------------


class Wire(httpx.AsyncBaseTransport):
    """A real transport that notes each request and lets a test lose the reply of the first.

    `lose` gets the first exchange as a task and returns when its reply is to be lost.
    """

    def __init__(self, lose: Callable[["asyncio.Task[httpx.Response]"], Awaitable[None]] | None = None) -> None:
        self.requests: list[httpx.Request] = []
        self.lost: asyncio.Task[httpx.Response] | None = None
        self._lose = lose
        self._transport = httpx.AsyncHTTPTransport()

    @property
    def retry_counts(self) -> list[str]:
        return [request.headers["x-stainless-retry-count"] for request in self.requests]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self._lose is None or len(self.requests) > 1:
            return await self._transport.handle_async_request(request)
        self.lost = asyncio.ensure_future(self._transport.handle_async_request(request))
        await self._lose(self.lost)
        raise httpx.ReadTimeout("the reply was lost", request=request)

    async def aclose(self) -> None:
        await self._transport.aclose()


def wired(base_url: str, wire: Wire) -> openai.AsyncOpenAI:
    return async_client(base_url, max_retries=2, http_client=httpx.AsyncClient(transport=wire))


async def chat(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=[user("hi")], **options)


async def records(live: Live, session: str) -> list[Any]:
    found: list[Any] = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    return found


async def test_the_sdk_does_not_retry_a_busy_session(live: Live) -> None:
    session = await live.open()
    script = live.says("one", paused=True)
    running = asyncio.ensure_future(live.chat(session, user("hi")))
    await live.engine.begun(1)
    wire = Wire()
    async with wired(base_url_of(live, session), wire) as client:
        with pytest.raises(openai.ConflictError) as refused:
            await chat(client)
    assert refused.value.code == "session_busy"
    assert wire.retry_counts == ["0"]
    live.engine.step(len(script.ids) + 1)
    assert (await running).status == 200
    assert len(live.engine.requests) == 1


async def test_the_sdk_retries_an_engine_that_is_not_ready_when_it_is_told_to(live: Live) -> None:
    session = await live.open()
    live.engine.plan(Script(ids=(), error=EngineUnavailable("starting", retry_after_s=0.1)))
    script = live.says("ready")
    wire = Wire()
    async with wired(base_url_of(live, session), wire) as client:
        reply = await chat(client)
    assert reply.choices[0].message.content == "ready"
    assert wire.retry_counts == ["0", "1"]
    assert wire.requests[0].content == wire.requests[1].content
    assert [output_ids(record) for record in await records(live, session)] == [list(script.ids)]


@pytest.mark.parametrize("key", [None, "turn-1"])
async def test_a_retry_while_the_lost_attempt_is_still_connected_joins_it(live: Live, key: str | None) -> None:
    session = await live.open()
    script = live.says("once", paused=True)

    async def lose(_: Any) -> None:
        await live.engine.begun(1)

    wire = Wire(lose)
    headers = {} if key is None else {"Idempotency-Key": key}
    async with wired(base_url_of(live, session), wire) as client:
        call = asyncio.ensure_future(chat(client, extra_headers=headers))
        await until(live, "stenograph_retries_total", key_part="joined")
        live.engine.step(len(script.ids) + 1)
        reply = await call
        assert wire.lost is not None
        lost = await wire.lost
        assert json.loads(await lost.aread())["id"] == reply.id
    assert wire.retry_counts == ["0", "1"]
    assert reply.choices[0].message.content == "once"
    assert len(live.engine.requests) == 1
    assert [output_ids(record) for record in await records(live, session)] == [list(script.ids)]


async def until(live: Live, metric: str, *, key_part: str) -> None:
    """Wait until a counter of the server is above 0; every look is a round trip to it."""
    while True:
        text = (await live.call("GET", "/metrics")).body.decode()
        lines = (line for line in text.splitlines() if line.startswith(metric) and key_part in line)
        if any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines):
            return


async def test_a_retry_after_the_connection_broke_is_the_only_generation_that_is_kept(live: Live) -> None:
    session = await live.open()
    live.says("never heard", paused=True)
    script = live.says("heard")

    async def lose(exchange: "asyncio.Task[httpx.Response]") -> None:
        await live.engine.begun(1)
        exchange.cancel()  # closes the connection, as a client's timeout does
        await asyncio.wait({exchange})

    wire = Wire(lose)
    async with wired(base_url_of(live, session), wire) as client:
        assert (await chat(client)).choices[0].message.content == "heard"
    assert wire.retry_counts == ["0", "1"]
    assert live.engine.stopped == [live.engine.requests[0].request_id]
    assert [output_ids(record) for record in await records(live, session)] == [list(script.ids)]


@pytest.mark.parametrize("history", ["linear", "tree"])
async def test_a_reply_that_was_lost_on_the_way_comes_again_with_its_idempotency_key(live: Live, history: str) -> None:
    session = await live.open(history=history)
    script = live.says("once")

    async def lose(exchange: "asyncio.Task[httpx.Response]") -> None:
        await (await exchange).aread()

    wire = Wire(lose)
    async with wired(base_url_of(live, session), wire) as client:
        reply = await chat(client, extra_headers={"Idempotency-Key": "turn-1"})
        assert wire.lost is not None
        assert json.loads(wire.lost.result().content) == reply.to_dict()
        # The same key with another body is another request by mistake.
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await chat(client, extra_headers={"Idempotency-Key": "turn-1"}, seed=1)
    assert refused.value.code == "idempotency_mismatch"
    assert len(wire.requests) == 3
    assert len(live.engine.requests) == 1
    assert [output_ids(record) for record in await records(live, session)] == [list(script.ids)]


@pytest.mark.parametrize("history", ["linear", "tree"])
async def test_a_reply_that_was_delivered_and_asked_for_again_is_one_sample(live: Live, history: str) -> None:
    """Without a key nobody can tell it from an agent that wants another reply: the later one is kept."""
    session = await live.open(history=history)
    live.says("lost")
    script = live.says("kept")

    async def lose(exchange: "asyncio.Task[httpx.Response]") -> None:
        await (await exchange).aread()

    wire = Wire(lose)
    async with wired(base_url_of(live, session), wire) as client:
        assert (await chat(client)).choices[0].message.content == "kept"
    assert wire.retry_counts == ["0", "1"]
    (sample,) = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert sample["tokens"] == list(live.engine.requests[1].prompt.ids) + list(script.ids)


# --- Clients that hang up ---------------------------------------------------------------------------------------------


async def check_usable(live: Live, session: str, *, num_kept: int = 0) -> None:
    """Nothing half recorded, nothing held; the next chat is served."""
    assert len(await records(live, session)) == num_kept
    assert live.engine.num_running == 0
    script = live.says("again")
    async with async_client(base_url_of(live, session)) as client:
        assert (await chat(client)).choices[0].message.content == "again"
    found = await records(live, session)
    assert [output_ids(record) for record in found] == [list(script.ids)]  # a kept turn is replaced by this one
    assert not live.manager.sessions.get(session).is_busy


async def raw_request(live: Live, session: str, body: bytes, *, sent: int | None = None) -> Any:
    """A chat by hand: headers and the first `sent` bytes of the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(live.url.rsplit(":", 1)[1]))
    head = f"POST /sessions/{session}/v1/chat/completions HTTP/1.1\r\n"
    head += f"host: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:sent])
    await writer.drain()
    return reader, writer


BODY = json.dumps({"messages": [user("hi")]}).encode()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_before_its_body_is_whole_has_asked_for_nothing(live: Live, reset: bool) -> None:
    session = await live.open()
    for sent in (0, 1, len(BODY) - 1):
        _, writer = await raw_request(live, session, BODY, sent=sent)
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        await live.call("GET", "/health")
    assert live.engine.requests == []
    await check_usable(live, session)


class BlockedPool(CpuPool):
    """A pool whose first piece of work waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(2)
        self.entered = asyncio.Event()
        self.let_go = asyncio.Event()

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        self.entered.set()
        await self.let_go.wait()
        return await super().run(work, num_bytes=num_bytes)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_turn_renders_costs_the_engine_nothing(serve: Serve, stream: bool) -> None:
    pool = BlockedPool()
    async with serve(pool=pool) as live:
        session = await live.open()
        async with async_client(base_url_of(live, session)) as client:
            call = asyncio.ensure_future(chat(client, stream=stream))
            await pool.entered.wait()
            (turn,) = live.manager.sessions.get(session).running
            call.cancel()
            await asyncio.wait({call, turn.task})
        pool.let_go.set()
        assert live.engine.requests == []
        await check_usable(live, session)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
async def test_a_client_that_leaves_while_the_engine_draws_stops_the_engine(
    live: Live, stream: bool, num_steps: int
) -> None:
    """0: before the first token; 5: after the last one, while the engine has yet to say that it was the last."""
    session = await live.open()
    live.engine.plan(Script(ids=(70, 71, 72, 73, 74), paused=True))
    async with async_client(base_url_of(live, session)) as client:
        call = asyncio.ensure_future(chat(client, stream=stream))
        await live.engine.begun(1)
        live.engine.step(num_steps)
        if stream and num_steps:
            await (await call).close()
        else:
            call.cancel()
            await asyncio.wait({call})
        await live.engine.idle()
    assert live.engine.stopped == [live.engine.requests[0].request_id]
    await check_usable(live, session)


async def test_a_client_that_leaves_in_the_middle_of_a_stream_stops_the_engine(live: Live) -> None:
    session = await live.open()
    script = live.says("a long story", paused=True)
    live.engine.step(len(script.ids) - 1)
    async with async_client(base_url_of(live, session)) as client:
        stream = await chat(client, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await live.engine.idle()
    assert live.engine.stopped == [live.engine.requests[0].request_id]
    await check_usable(live, session)


async def test_litellm_that_leaves_in_the_middle_of_a_stream_stops_the_engine(live: Live, litellm: Any) -> None:
    session = await live.open()
    live.says("a long story", paused=True)
    live.engine.step(3)
    call = asyncio.ensure_future(litellm_stream("hosted_vllm")(base_url_of(live, session), [user("hi")], litellm))
    await live.engine.begun(1)
    call.cancel()
    await asyncio.wait({call})
    await live.engine.idle()
    assert live.engine.stopped == [live.engine.requests[0].request_id]
    await check_usable(live, session)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_after_the_last_token_without_reading_leaves_a_whole_turn(
    live: Live, stream: bool
) -> None:
    session = await live.open()
    script = live.says("whole", paused=True)
    body = json.dumps({"messages": [user("hi")], "stream": stream}).encode()
    _, writer = await raw_request(live, session, body)
    await live.engine.begun(1)
    (turn,) = live.manager.sessions.get(session).running
    live.engine.step(len(script.ids) + 1)
    await asyncio.wait({turn.task})
    writer.transport.abort()
    (record,) = await records(live, session)
    assert output_ids(record) == list(script.ids)
    assert live.engine.stopped == []
    await check_usable(live, session, num_kept=1)
