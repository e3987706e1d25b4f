"""/openapi.json says what the server does: each route, and whatever schemathesis can think of to ask of it."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.request import Request, urlopen

import jsonschema
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from schemathesis.engine.run import PhaseName
from schemathesis.generation.meta import CoveragePhaseData, CoverageScenario
from starlette.routing import Route

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.cli.parts import PARTS
from stenograph.core import errors
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StenographError
from stenograph.core.types import Chunk, Finish, FinishReason
from stenograph.core.weights import ControlAnswer, PauseGeneration, WeightCommand
from stenograph.dialects.settings import DialectKind, UnknownFields
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.transport import HttpReply
from stenograph.http.app import make_app
from stenograph.http.binding import LaterRoutes
from stenograph.http.openapi.document import openapi_document
from stenograph.http.openapi.schemas import Described
from stenograph.http.settings import Settings
from stenograph.offload.pool import CpuPool
from stenograph.text.renderer import Renderer

from .conftest import END, Live, assistant, running, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]
Json = dict[str, Any]

HEX = re.compile("[0-9a-f]{32}")
OWN_TURNS = {
    f"POST {prefix}/{name}"
    for prefix in ("", "/sessions/{id}")
    for name in (
        "v1/chat/completions",
        "v1/completions",
        "v1/messages",
        "v1/messages/count_tokens",
        "v1/responses",
        "v1beta/models/{model}:generateContent",
        "v1beta/models/{model}:streamGenerateContent",
        "v1beta/models/{model}:countTokens",
    )
}
OPEN = {"SessionMetadata", "RecordedRequest"}
"""Replies with keys of the client's own: its metadata, and the sampling fields that it sent."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class ObligingEngine(ScriptedEngine):
    """Answers any number of requests: one token of text and the end, or only the text if no more is wanted."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if request.params.max_tokens == 1:
            self.plan(Script(ids=(70,), finish=Finish(reason=FinishReason.LENGTH)))
        else:
            self.plan(Script(ids=(70, END), finish=Finish(reason=FinishReason.STOP, matched=END)))
        async for chunk in super().generate(request):
            yield chunk

    async def control(self, command: WeightCommand) -> Sequence[ControlAnswer]:
        """A pause would let everything wait that comes after it: it is refused. test_weight_routes.py is about them."""
        return (ControlAnswer(name="obliging", problem="no" if isinstance(command, PauseGeneration) else ""),)


class ForwardingEngine(ScriptedEngine):
    """An engine that is a server; nobody asks it anything here."""

    @property
    def forwards(self) -> bool:
        return True

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> HttpReply:
        raise NotImplementedError


# --- the routes -----------------------------------------------------------------------------------------------------


def document_of(
    *, has_keys: bool = False, unknown: UnknownFields = UnknownFields.REFUSE, forwards: bool = False
) -> Json:
    described = Described(
        dialects=Settings().dialects,
        has_keys=has_keys,
        unknown_fields=unknown,
        matchers=("harness",),
        rewrites=("cc-date",),
        vocab_size=320,
        proxy_allow=Settings().proxy_allow,
        forwards=forwards,
        parts=PARTS,
    )
    document: Json = json.loads(openapi_document(described))
    return document


def operations_in(document: Json) -> dict[str, Json]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def routes_of(app: Any) -> list[Route]:
    """Every route of a server: it binds most of them when the first request comes to one."""
    found: list[Route] = []
    for later in app._control.app.routes:
        if isinstance(later, LaterRoutes):
            asyncio.run(later.made())
            found += later.routes
    return found


def bound_routes(renderer: Renderer, engine: ScriptedEngine, settings: Settings | None = None) -> tuple[set[str], Json]:
    """The methods and paths of a server's route table, `HEAD` aside, and its document."""
    pool = CpuPool(1)
    app, _ = make_app(
        settings or Settings(),
        engine=engine,
        renderer=renderer,
        pool=pool,
        model="tiny",
        clock=SystemClock(),
        parts=PARTS,
    )
    routes = routes_of(app)
    pool.close()
    paths = [(re.sub(r"\{(name|file):path\}", r"{\1}", route.path), route.methods or ()) for route in routes]
    bound = {f"{method} {path}" for path, methods in paths for method in methods if method != "HEAD"}
    (served,) = (route.endpoint for route in routes if route.path == "/openapi.json")
    return bound, json.loads(served.__self__.openapi())


def test_the_document_has_every_route_that_is_bound_and_no_other(renderer: Renderer) -> None:
    bound, document = bound_routes(renderer, ScriptedEngine(vocab_size=320))
    own = {name for name in bound if not name.endswith("{path:path}")}
    local = {
        "GET /sessions/{id}/v1/models",
        "POST /sessions/{id}/tokenize",
        "POST /sessions/{id}/detokenize",
    }
    assert set(operations_in(document)) == own | OWN_TURNS | local


@pytest.mark.parametrize("kind", DialectKind)
def test_the_document_has_the_turns_of_the_dialects_that_are_spoken(renderer: Renderer, kind: DialectKind) -> None:
    bound, document = bound_routes(renderer, ScriptedEngine(vocab_size=320), Settings(dialects=(kind,)))
    pattern = {
        DialectKind.OPENAI: r"/(chat/)?completions$",
        DialectKind.RESPONSES: r"/v1/responses$",
        DialectKind.ANTHROPIC: r"/v1/messages",
        DialectKind.GEMINI: r"/v1beta/",
    }[kind]
    turns = {name for name in operations_in(document) if name in OWN_TURNS}
    assert turns == {name for name in OWN_TURNS if re.search(pattern, name)}
    held = {name for name in operations_in(document) if "{response}" in name}
    assert held == {name for name in bound if "{response}" in name}
    assert bool(held) == (kind is DialectKind.RESPONSES)


@pytest.mark.parametrize("kind", DialectKind)
async def test_a_dialect_that_is_not_spoken_has_no_paths(serve: Serve, kind: DialectKind) -> None:
    paths = {
        DialectKind.OPENAI: ("/v1/chat/completions", "/v1/completions"),
        DialectKind.RESPONSES: ("/v1/responses", "/v1/responses/resp_0"),
        DialectKind.ANTHROPIC: ("/v1/messages", "/v1/messages/count_tokens"),
        DialectKind.GEMINI: ("/v1beta/models/tiny:generateContent", "/v1beta/models/tiny:countTokens"),
    }
    async with serve(dialects=tuple(one for one in DialectKind if one is not kind)) as live:
        for path in paths[kind]:
            method = "GET" if "resp_" in path else "POST"
            answer = await live.call(method, path)
            assert (answer.status, answer.json()["error"]["code"]) in ((403, "forbidden"), (404, "route_not_found"))
        for path in (path for other in paths if other is not kind for path in paths[other] if "resp_" not in path):
            assert (await live.call("POST", path)).status == 400, path


def test_of_an_engine_that_is_a_server_the_allow_list_is_documented_for_every_method(renderer: Renderer) -> None:
    bound, document = bound_routes(renderer, ForwardingEngine(vocab_size=320))
    own = {name for name in bound if not name.endswith("{path:path}")}
    passed = {
        name.replace("{path:path}", entry if "{id}" in name else entry.removeprefix("v1/"))
        for name in bound
        if name.endswith("{path:path}")
        for entry in Settings().proxy_allow
        if "{id}" in name or entry.startswith("v1/")
    }
    assert set(operations_in(document)) == own | OWN_TURNS | passed


def test_every_error_is_documented_somewhere_and_under_its_status() -> None:
    def leaves(kind: type[StenographError]) -> set[type[StenographError]]:
        below = kind.__subclasses__()
        return {kind} if not below else set().union(*map(leaves, below))

    told = {
        (status, code)
        for operation in operations_in(document_of(has_keys=True)).values()
        for status, answer in operation["responses"].items()
        for schema in answer.get("content", {}).get("application/json", {}).get("schema", {}).get("allOf", [])
        if "properties" in schema
        for code in schema["properties"]["error"]["properties"]["code"]["enum"]
    }
    # Of these the first two are not of a route, and the last goes out in the engine's own words.
    elsewhere = {errors.MethodNotAllowed, errors.UpgradeRequired, errors.UpstreamRefused}
    assert told == {(str(kind.status), kind.code) for kind in leaves(StenographError) - elsewhere}


def test_where_an_engines_own_answers_go_out_no_shape_is_promised_for_errors() -> None:
    passed = [o for o in operations_in(document_of(forwards=True)).values() if "default" in o["responses"]]
    contents = [
        answer["content"] for o in passed for status, answer in o["responses"].items() if not status.startswith("2")
    ]
    assert len(contents) > 100
    assert all(content == {"*/*": {}} for content in contents)


@pytest.mark.parametrize("forwards", [False, True])
@pytest.mark.parametrize("unknown", list(UnknownFields))
def test_all_schemas_are_schemas_and_all_references_lead_somewhere(forwards: bool, unknown: UnknownFields) -> None:
    document = document_of(has_keys=True, unknown=unknown, forwards=forwards)
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    for ref in re.findall(r'"\$ref": "#/([^"]+)"', text):
        found: Any = document
        for step in ref.split("/"):
            found = found[step]
    ids = [operation["operationId"] for operation in operations_in(document).values()]
    assert len(ids) == len(set(ids))


async def test_what_is_said_to_ask_for_a_key_does_and_the_rest_does_not(serve: Serve) -> None:
    async with serve(api_key=("secret",)) as live:
        document = (await live.call("GET", "/openapi.json")).json()
        assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key", "x-goog-api-key", "key"}
        for name, operation in operations_in(document).items():
            method, path = name.split()
            answer = await live.call(method, path.replace("{id}", "0" * 32))
            assert (answer.status == 401) == ("security" in operation), name
            if answer.status == 401:
                validate(
                    answer.json(), document, operation["responses"]["401"]["content"]["application/json"]["schema"]
                )
        assert [name for name, o in operations_in(document).items() if "security" not in o] == [
            "GET /",
            "GET /health",
            "GET /ready",
            "GET /metrics",
            "GET /openapi.json",
            "GET /console",
            "GET /console/{file}",
        ]


async def test_a_server_without_keys_documents_none(live: Live) -> None:
    document = (await live.call("GET", "/openapi.json")).json()
    assert "securitySchemes" not in document["components"]
    assert not any("security" in operation for operation in operations_in(document).values())


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PATCH", "/sessions", "DELETE, GET, HEAD, POST"),
        ("PUT", "/sessions/{id}", "DELETE, GET, HEAD"),
        ("GET", "/sessions/{id}/samples", "POST"),
        ("POST", "/sessions/{id}/drift", "GET, HEAD"),
        ("TRACE", "/sessions/{id}/drift", "GET, HEAD"),
        ("POST", "/sessions/{id}/outcome", "GET, HEAD, PUT"),
        ("GET", "/sessions/{id}/v1/chat/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("GET", "/sessions/{id}/v1/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("TRACE", "/v1/models", "GET, HEAD"),
        ("GET", "/sessions/{id}/tokenize", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_a_405_names_the_methods_that_there_are(live: Live, method: str, path: str, allow: str) -> None:
    answer = await live.call(method, path.replace("{id}", await live.open()))
    assert (answer.status, answer.headers.get("allow")) == (405, allow)


# --- the bodies -----------------------------------------------------------------------------------------------------


def closed(document: Json) -> Json:
    """The document with every reply's shape closed: a field that it does not list is a mistake then."""
    for name, schema in document["components"]["schemas"].items():
        if "properties" in schema and name not in OPEN:
            schema.setdefault("additionalProperties", False)
    return document


def validate(value: Any, document: Json, schema: Json | str) -> None:
    """Hold a value against a schema, or one of the components."""
    root = {"$ref": f"#/components/schemas/{schema}"} if isinstance(schema, str) else schema
    jsonschema.Draft202012Validator({**root, "components": document["components"]}).validate(value)


async def test_what_a_session_with_tool_calls_and_logprobs_answers_is_as_documented(live: Live) -> None:
    document = closed((await live.call("GET", "/openapi.json")).json())
    session = await live.open(history="tree", metadata={"task": [1, {"a": None}]})
    fields = {"tools": [TOOL], "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    text = 'hm<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    live.says(text)
    answer = await live.chat(session, user("a"), **fields)
    validate(answer.json(), document, "ChatCompletion")
    message = answer.json()["choices"][0]["message"]
    assert message["tool_calls"]
    live.says(text)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x", "name": "look"}
    await live.chat(session, user("a"), message, result, **fields)
    live.says(text)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await live.chat(session, user("b"), **fields, **stream)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = [json.loads(line[6:]) for line in streamed.body.decode().split("\n\n") if line.startswith("data: {")]
    assert any(choice["delta"].get("tool_calls") for chunk in chunks for choice in chunk["choices"])
    for chunk in chunks:
        validate(chunk, document, "ChatCompletionChunk")
    for query in ("", "?records=delta"):
        validate((await live.call("GET", f"/sessions/{session}{query}")).json(), document, "SessionView")
    wanted = {"format": "json", "token_texts": True, "metadata": {"k": 1}}
    samples = await live.call("POST", f"/sessions/{session}/samples", wanted)
    validate(samples.json(), document, "JsonSamples")
    assert len(samples.json()["samples"]) == 2
    live.says(text)
    body = {"prompt": samples.json()["samples"][0]["tokens"] + [70], "logprobs": 1, "return_token_ids": True}
    completed = await live.call("POST", f"/sessions/{session}/v1/completions", body)
    validate(completed.json(), document, "TextCompletion")
    live.says(text)
    streamed = await live.call("POST", f"/sessions/{session}/v1/completions", {**body, **stream})
    for line in streamed.body.decode().split("\n\n"):
        if line.startswith("data: {"):
            validate(json.loads(line[6:]), document, "TextCompletion")
    for query in ("", "?records=delta"):
        view = (await live.call("GET", f"/sessions/{session}{query}")).json()
        assert view["records"][-1]["path"] == "/v1/completions"
        validate(view, document, "SessionView")
    validate((await live.call("POST", f"/sessions/{session}/samples", wanted)).json(), document, "JsonSamples")
    validate((await live.call("GET", f"/sessions/{session}/drift")).json(), document, "DriftReports")
    validate((await live.call("GET", f"/sessions/{session}/why")).json(), document, "SessionFindings")
    validate((await live.call("GET", "/sessions")).json(), document, "SessionPage")


async def test_what_messages_answers_is_as_documented(live: Live) -> None:
    document = closed((await live.call("GET", "/openapi.json")).json())
    session = await live.open()
    asked_of: Json = {
        "max_tokens": 500,
        "messages": [user("a")],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "return_token_ids": True,
    }
    validate(asked_of, document, "MessagesRequest")
    live.says('<think>\nhm\n</think>\n\nso<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>')
    answer = await live.call("POST", f"/sessions/{session}/v1/messages", asked_of)
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text", "tool_use"]
    validate(answer.json(), document, "MessagesReply")
    counted = await live.call("POST", f"/sessions/{session}/v1/messages/count_tokens", asked_of)
    validate(counted.json(), document, "CountedTokens")
    refused = await live.call("POST", f"/sessions/{session}/v1/messages", {**asked_of, "max_tokens": 0})
    validate(refused.json(), document, "MessagesErrorBody")
    validate((await live.call("GET", f"/sessions/{session}")).json(), document, "SessionView")


GRAMMARS: list[Json] = [
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"json_object": True, "regex": None}},
    {"structured_outputs": {"json": {"type": "object"}}},
    {"structured_outputs": {"json": {}, "regex": "a"}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": ["a", ""]}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'start: "a"'}},
    {"structured_outputs": {"whitespace_pattern": " "}},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {"regex": "a", "ebnf": 'root ::= "a"'},
    {"regex": " "},
    {"regex": "a", "ebnf": None},
    {"ebnf": 'root ::= "a"'},
    {"json_schema": {"type": "object"}},
    {"json_schema": [1]},
    {"guided_json": {"type": "object"}},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
    {"guided_grammar": ""},
]
"""Grammars, in all spellings."""

ROLLOUT_FIELDS: list[Json] = [
    {"skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True},
    {"skip_special_tokens": False, "spaces_between_special_tokens": True},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"min_tokens": 0},
    {"min_new_tokens": 3},
    {"min_tokens": -1},
    {"min_new_tokens": 1.5},
    {"sampling_seed": 7},
    {"sampling_seed": 2**64},
    {"priority": -1},
    {"priority": "high"},
    {"priority": 2**31},
    {"return_tokens_as_token_ids": True},
    {"no_stop_trim": 1},
    {"truncate_prompt_tokens": 5},
    {"lora_path": "adapter"},
    {"bad_words": ["x"]},
]

CHATS: list[Json] = [
    *ROLLOUT_FIELDS,
    {"separate_reasoning": False},
    {"separate_reasoning": "no"},
    {},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
    {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
    {"messages": [{"role": "user", "content": "x", "tool_call_id": ""}]},
    {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
    {"messages": [{"role": "user", "content": "x", "reasoning": "r"}]},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [user("a"), {"role": "assistant"}]},
    {"messages": [user("a"), {"role": "assistant", "content": None, "reasoning_content": "r"}]},
    {"messages": [user("a"), {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
    {"messages": [user("a"), {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": ""}}]}]},
    {"messages": [user("a"), assistant("b"), {"role": "tool", "content": "x"}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "code", "function": {"name": "f"}}]},
    {"tools": [TOOL], "tool_choice": "any"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text", "json_schema": None}},
    {"response_format": {"type": "xml"}},
    {"stop": ""},
    {"stop": ["a"] * 64},
    {"stop": ["a"] * 65},
    {"logit_bias": {"1": -100}},
    {"logit_bias": {"1": -100.5}},
    {"logit_bias": {"-1": 0}},
    {"logit_bias": {"1234567890": 0}},
    {"chat_template_kwargs": {"messages": None}},
    {"top_k": -1},
    {"top_k": -2},
    {"n": 2},
    {"user": {"any": [1]}},
    {"audio": {}},
    {"wat": 1},
    *GRAMMARS,
    *({name: None} for name in ("n", "tools", "tool_choice", "stop", "logit_bias", "response_format", "stream")),
]
"""What is changed in a request that is accepted; half of them make it one that is not."""


@pytest.mark.parametrize("unknown", list(UnknownFields))
async def test_the_schema_of_a_chat_accepts_what_the_server_accepts(renderer: Renderer, unknown: UnknownFields) -> None:
    engine = ObligingEngine(vocab_size=320, max_context_tokens=4096)
    document = document_of(unknown=unknown)
    validator = jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/ChatRequest", "components": document["components"]}
    )
    async with running(engine, renderer, unknown_fields=unknown) as (url, _):
        for change in CHATS:
            body = {"messages": [user("x")], **change}
            status, answer = await asyncio.to_thread(asked, "POST", f"{url}/v1/chat/completions", body)
            assert status == (200 if validator.is_valid(body) else 400), (change, answer)


COMPLETIONS: list[Json] = [
    *GRAMMARS,
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [""]},
    {"prompt": ["a", ""]},
    {"prompt": ["a", "b"]},
    {"prompt": [[]]},
    {"prompt": [[1], []]},
    {"prompt": [[1, 2], [3]]},
    {"prompt": [0, 319]},
    {"prompt": [320]},
    {"prompt": [-1]},
    {"prompt": [True]},
    {"prompt": [1, "a"]},
    {"prompt": ["a", 1]},
    {"prompt": [["a"]]},
    {"prompt": {}},
    {"prompt": None},
    {"logprobs": 0},
    {"logprobs": 20},
    {"logprobs": 21},
    {"logprobs": True},
    {"echo": False},
    {"echo": True},
    {"suffix": ""},
    {"suffix": "x"},
    {"best_of": 1},
    {"best_of": 2},
    {"n": 2},
    {"truncate_prompt_tokens": -2},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": 1, "truncation_side": "right"},
    {"truncate_prompt_tokens": 1, "truncation_side": "middle"},
    {"add_special_tokens": False},
    {"add_special_tokens": True},
    {"skip_special_tokens": False, "include_stop_str_in_output": True},
    *ROLLOUT_FIELDS,
    {"stop": ["a"] * 65},
    {"messages": []},
    {"prompt_logprobs": 1},
    {"max_tokens": 0},
    *({name: None} for name in ("n", "best_of", "echo", "suffix", "logprobs", "stop", "stream", "prompt_logprobs")),
]
"""The same for a completion."""


@pytest.mark.parametrize("unknown", list(UnknownFields))
async def test_the_schema_of_a_completion_accepts_what_the_server_accepts(
    renderer: Renderer, unknown: UnknownFields
) -> None:
    engine = ObligingEngine(vocab_size=320, max_context_tokens=4096)
    document = closed(document_of(unknown=unknown))
    root = {"$ref": "#/components/schemas/CompletionRequest", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(root)
    async with running(engine, renderer, unknown_fields=unknown) as (url, _):
        for change in COMPLETIONS:
            body = {"prompt": "x", **change}
            status, answer = await asyncio.to_thread(asked, "POST", f"{url}/v1/completions", body)
            if change == {"prompt_logprobs": None} and unknown is UnknownFields.REFUSE:
                assert status == 200  # what is refused may come as null, which this schema leaves out
                continue
            assert status == (200 if validator.is_valid(body) else 400), (change, answer)
            if status == 200:
                validate(answer, document, "TextCompletion")


def item(kind: str, **fields: Any) -> Json:
    return {"input": [{"type": "message", "role": "user", "content": "x"}, {"type": kind, **fields}]}


def tool(**fields: Any) -> Json:
    return {"tools": [fields]}


LOOK: Json = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}

RESPONSES: list[Json] = [
    *GRAMMARS,
    *ROLLOUT_FIELDS,
    {},
    {"input": ""},
    {"input": []},
    {"input": 1},
    {"input": None},
    {"input": [{"role": "user", "content": "x"}]},
    {"input": [{"role": "wizard", "content": "x"}]},
    {"input": [{"role": "user"}]},
    {"input": [{"role": "user", "content": None}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]}]},
    {"input": [{}]},
    {"input": [{"type": "message"}]},
    {"input": [{"type": None, "role": "user", "content": "x"}]},
    item("reasoning"),
    item("reasoning", summary=[{"type": "summary_text", "text": "x"}], content=None, encrypted_content="x"),
    item("reasoning", summary=[{"type": "output_text", "text": "x"}]),
    item("function_call", call_id="c", name="f", arguments="{}"),
    item("function_call", call_id="c", name="f"),
    item("function_call", call_id="c", name="", arguments="{}"),
    item("function_call", call_id="c", name="f", namespace="n", arguments="{}", status="completed", id="fc_1"),
    item("function_call", call_id="c", name="f", arguments="{}", wat=1),
    item("custom_tool_call", call_id="c", name="f", input="x"),
    item("custom_tool_call", call_id="c", name="f", arguments="x"),
    item("tool_search_call", call_id="c", arguments={}),
    item("web_search_call"),
    item("computer_call_output"),
    item("compaction", encrypted_content="x"),
    tool(**LOOK),
    tool(type="function"),
    tool(type="function", name=""),
    tool(type="function", name="f", parameters=1),
    tool(type="function", name="f", strict=None, description=None),
    tool(type="custom", name="f", format={"type": "text"}),
    tool(type="custom", name="f", format={"type": "grammar", "syntax": "lark", "definition": "x"}),
    tool(type="custom", name="f", format={"type": "grammar", "syntax": "lark"}),
    tool(type="custom", name="f", format={"type": "json"}),
    tool(type="namespace", name="n", description="d", tools=[LOOK]),
    tool(type="namespace", name="n", tools=[{"type": "namespace", "name": "m", "tools": []}]),
    tool(type="tool_search", execution="client", parameters={}),
    tool(type="tool_search"),
    tool(type="web_search", external_web_access=True),
    tool(type="magic"),
    tool(name="f"),
    {"tools": [LOOK], "tool_choice": "any"},
    {"tools": [LOOK], "tool_choice": {"type": "function", "name": "look"}},
    {"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    {"text": {"format": {"type": "json_object"}}},
    {"text": {"format": {"type": "text"}}, "regex": "a"},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
    {"text": {"format": {"type": "json_schema", "name": "n"}}},
    {"text": {"format": {"type": "text", "schema": {}}}},
    {"text": {"format": {"type": "xml"}}},
    {"text": {"verbosity": "low"}},
    {"reasoning": {"effort": "low", "summary": "auto"}},
    {"reasoning": {"efort": "low"}},
    {"include": ["message.output_text.logprobs"]},
    {"include": "all"},
    {"top_logprobs": 21},
    {"max_output_tokens": 0},
    {"max_output_tokens": 1},
    {"background": True},
    {"conversation": "c"},
    {"truncation": "auto"},
    {"metadata": {"any": [1]}},
    {"wat": 1},
    *({name: None} for name in ("tools", "tool_choice", "text", "reasoning", "include", "instructions", "stream")),
]
"""The same for a response."""


@pytest.mark.parametrize("unknown", list(UnknownFields))
async def test_the_schema_of_a_responses_request_accepts_what_the_server_accepts(
    renderer: Renderer, unknown: UnknownFields
) -> None:
    engine = ObligingEngine(vocab_size=320, max_context_tokens=4096)
    document = closed(document_of(unknown=unknown))
    root = {"$ref": "#/components/schemas/ResponsesRequest", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(root)
    async with running(engine, renderer, unknown_fields=unknown) as (url, _):
        for change in RESPONSES:
            body = {"input": "x", **change}
            status, answer = await asyncio.to_thread(asked, "POST", f"{url}/v1/responses", body)
            assert status == (200 if validator.is_valid(body) else 400), (change, answer)
            if status == 200:
                validate(answer, document, "ResponseBody")


def asked(method: str, url: str, body: Json | None = None) -> tuple[int, Any]:
    """A request from a thread."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urlopen(request) as response:
            return response.status, json.loads(response.read() or b"null")
    except OSError as error:
        return error.code, json.loads(error.read())  # type: ignore[attr-defined]


# --- schemathesis ---------------------------------------------------------------------------------------------------

NOT_IN_THE_SCHEMA = (
    "cache_salt 'pin': the engine scripted cannot keep a cache",
    "policy: no engine has the LoRA ",
    "Expected `int`, got `float`",
    "Expected `int | null`, got `float`",
    "token_texts needs format 'json'.",
    "The session has no turn ",
    "The session has no scores ",
    "token must be at most ",
    "A completion cannot be cut at a token",
    "top_logprobs needs logprobs: true.",
    "stream_options needs stream: true.",
    "max_tokens and max_completion_tokens disagree",
    "tool_choice 'required' needs tools.",
    "reasoning and reasoning_content disagree",
    "tool_choice names a tool that is not in tools: ",
    "response_format cannot be combined with a forced tool call",
    "A tool message answers a tool call, but none comes before it.",
    "This model's maximum context length is ",
    "truncation_side needs truncate_prompt_tokens.",
    "strand must be a number below ",
    "leaf must be a turn of this session",
    "truncate_prompt_tokens is not for a chat on a session",
    "seed and sampling_seed disagree",
    "min_tokens and min_new_tokens disagree",
    "include_stop_str_in_output and no_stop_trim disagree",
    "min_tokens must be at most",
    "min_new_tokens must be at most",
    "include_side is all kinds: ",
    "The session has no annotation ",
    "There is no turn with sampled tokens to score",
    "Give position or question, not both.",
    "question is the place of named tokens",
    "position is the place of named tokens",
    "position must be from ",
    "A token is named twice.",
    "A named token is one token of this model",
    "The session has no turn ",
    "The session has no scores ",
    "Give group or sessions, not both.",
    "A session is trained or left out, not both",
    "Say which sessions: give sessions or group.",
    "first counts a group's sessions",
    "Say which group: ",
    "A turn has a reward for each sampled token",
    "A turn has its rewards once",
    "engine is one of scripted, got ",
    "strand must be below ",
    "Say which sessions: give sessions, or else",
    "max_tokens and max_output_tokens disagree",
    "previous_response_id needs a session",
    "Previous response with id ",
    "An item_reference needs a session",
    "This session has given out no item ",
    "Two tools are called ",
    "'text' and '",
    "text cannot be combined with a forced tool call",
    "topK must be a whole number",
    "logprobs needs responseLogprobs",
    "responseSchema and responseJsonSchema are",
    "responseSchema needs responseMimeType",
    "responseJsonSchema needs responseMimeType",
    "responseMimeType 'text/x.enum' needs",
    "The schema of 'text/x.enum' needs",
    "parameters and parametersJsonSchema are",
    "mode ANY needs functions",
    "allowedFunctionNames ",
    "A part has one of text",
    "No open call of ",
    "responseMimeType cannot be combined",
    "A grammar cannot be combined",
    "The input token count",
    "history is 'linear' with compat 'miles'",
    "Required field 'max_tokens' is missing.",
    "The last message is the assistant's: ",
    "messages is empty: ",
    "tool_choice names a tool that cannot be called: ",
    "tool_choice 'any' needs tools.",
    "A name belongs to the tool_choice of type 'tool'.",
    "A tool_reference names a tool that is not in tools: ",
    "'output_config.format' and 'output_format' each ask for a format",
    "output_config.format cannot be combined with a forced tool call",
    "prompt is too long: ",
    "input length and `max_tokens` exceed context limit: ",
    "after_length is 'refuse' with compat 'miles'",
    "sampling_mask needs format 'json'.",
    "support: the engine scripted does not report",
    "Say which sessions: ",
    "Give sessions, or ",
    "Give abort_all or group, not both.",
    "abort_all must be true here, or group be given",
    "path must not contain NUL: ",
    "An image cannot have text.",
    "A text part cannot have ",
    "An input_image needs its image_url",
    "Required field 'text' is missing.",
    "An image of the model's cannot be shown",
    "A part of type ",
    "An image has at most ",
    "A request has at most ",
    "An image is a data URI or an http URL",
    "An image's source of type ",
    "A data URI of an image must be base64",
    "This server fetches no media by URL",
    "Media of type ",
    "The image is ",
    "Images cannot be shown to a model of the family",
    "A content part of type image_url cannot be shown",
    "A content part of type 'image_url' cannot be shown",
    "The tokens of images are not counted ahead",
    "A content part of type 'input_image' cannot be shown to the model; only text can.",
    "The engine scripted cannot be given an image",
    "The model's chat template writes 0 ",
)
"""How a message begins that says why a request is refused which the schemas allow. The document says these in words."""


@schemathesis.check
def what_the_schemas_allow_is_accepted(ctx: Any, response: Any, case: Any) -> None:
    phase = case.meta.phase.data
    if isinstance(phase, CoveragePhaseData) and phase.scenario is CoverageScenario.UNSPECIFIED_HTTP_METHOD:
        return
    if case.meta.generation.mode.is_positive and response.status_code == 400:
        told = response.json()  # without an error, of a route of weights: an engine has refused
        assert "error" not in told or told["error"]["message"].startswith(NOT_IN_THE_SCHEMA), told


RANK = "X-data-parallel-rank"


class LiveIds:
    """Gives requests that name a session which never was a real one: what comes after a 404 is worth a look too."""

    def __init__(self) -> None:
        self.url = ""
        self._id = ""

    def put_in(self, case: Any) -> None:
        """Replace the ids of a case. Those of the stateful phase come from the document's links, and stay."""
        if case.meta.phase.name is PhaseName.STATEFUL_TESTING:
            return
        if HEX.fullmatch(str((case.path_parameters or {}).get("id", ""))):
            case.path_parameters["id"] = self._open() if case.method == "DELETE" else self._standing()
        if HEX.fullmatch(str((case.headers or {}).get("X-Session-Id", ""))):
            case.headers["X-Session-Id"] = self._standing()
        if RANK in (case.headers or {}):  # what is no rank has tests of its own
            case.headers[RANK] = "0"
        # What deletes by a filter would delete the sessions of other cases.
        if case.method == "DELETE" and case.path == "/sessions" and {"group", "state"} & set(case.query or {}):
            case.query["group"] = "nobody's"
        if case.path == "/samples" and isinstance(case.body, dict) and case.body.get("delete") is True:
            case.body["delete"] = False

    def _standing(self) -> str:
        self._id = self._id or self._open()
        return self._id

    def _open(self) -> str:
        return str(asked("POST", f"{self.url}/sessions", {"history": "tree"})[1]["session_id"])


@pytest.fixture
def live_ids() -> Iterator[LiveIds]:
    ids = LiveIds()

    @schemathesis.hook
    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        ids.put_in(case)

    yield ids
    schemathesis.hooks.unregister(before_call)


def found_by_schemathesis(document: Json, url: str) -> Iterator[str]:
    """Run all phases, and tell what failed."""
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "max-failures": 50,
            "generation": {"deterministic": True, "max-examples": 12, "database": "none", "no-shrink": True},
            "phases": {"stateful": {"generation": {"max-examples": 10}}},
            # Their bodies are those of the sessions' routes, which have it.
            "operations": [
                {"include-name": f"POST /v1/{name}", "phases": {"coverage": {"enabled": False}}}
                for name in ("chat/completions", "completions", "messages", "messages/count_tokens", "responses")
            ],
            "checks": {"positive_data_acceptance": {"enabled": False}},
        }
    )
    schema = schemathesis.openapi.from_dict(document, config=config)
    schema.config.update(base_url=url)
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError):
            yield f"{event.label}: {event.value!r}"
        if isinstance(event, events.ScenarioFinished):
            for case_id, checks in event.recorder.checks.items():
                for check in checks:
                    if check.failure_info is not None:
                        case, failure = event.recorder.cases[case_id].value, check.failure_info.failure
                        yield f"{case.operation.label}: {failure!r}\n  {case.as_curl_command()[:2000]}"


@pytest.mark.timeout(600)  # a minute of work, but on a machine that does other work too
async def test_a_live_server_does_what_its_document_says(renderer: Renderer, live_ids: LiveIds) -> None:
    engine = ObligingEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    async with running(engine, renderer, max_sessions=100_000) as (url, _):
        live_ids.url = url
        _, document = await asyncio.to_thread(asked, "GET", f"{url}/openapi.json")
        found = await asyncio.to_thread(lambda: list(found_by_schemathesis(closed(document), url)))
        assert not found, "\n\n".join(found)
        num_chats = sum(request.chat is not None for request in engine.requests)
        assert min(num_chats, len(engine.requests) - num_chats) > 10, num_chats
