"""The files of `pins/` hold, byte for byte, what a client can see of the server; pinned.py says how to write them anew.

Random ids are masked, and the clock stands still. A change that a client is meant to see changes its pin with it.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from typing import Any

import aiohttp
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.cli.main import main
from stenograph.cli.settings_table import CommandSettings as Settings
from stenograph.cli.settings_table import load_settings
from stenograph.core import errors
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import StenographError
from stenograph.core.kinds import Compat
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.settings import EngineKind
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, assistant, running, user
from .pinned import FOLDER, check_bodies, check_lines, check_rows, masked
from .test_harness_recordings import RECORDINGS, Client
from .test_openapi import ForwardingEngine

VOCAB_SIZE = 320
NAMES = {one.name for one in fields(Settings)}
SETTINGS = sorted((FOLDER / "settings").glob("*.toml"))
CHAT, TOOL_CALL = "/v1/chat/completions", '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


@pytest.fixture
async def live(renderer: Renderer) -> AsyncIterator[Live]:
    """A server whose time stands still."""
    engine = ScriptedEngine(vocab_size=VOCAB_SIZE, max_context_tokens=65536)
    async with (
        running(engine, renderer, clock=ManualClock()) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return masked(answer.body.decode())


# --- documents ------------------------------------------------------------------------------------------------------


async def test_openapi_is_the_same_with_each_file_of_settings(renderer: Renderer) -> None:
    found: dict[str, str] = {}
    for path in SETTINGS:
        settings = load_settings({}, {}, path)
        given = {name: getattr(settings, name) for name in NAMES - {"drain_timeout_s", "engine"}}
        kind = ScriptedEngine if settings.engine is EngineKind.EMBEDDED else ForwardingEngine
        async with (
            running(kind(vocab_size=VOCAB_SIZE), renderer, **given) as (url, _),
            aiohttp.request("GET", f"{url}/openapi.json") as answer,
        ):
            assert answer.status == 200
            found[path.stem] = await answer.text()
    assert len(found) == 5
    check_bodies("openapi.jsonl", found)


def test_the_help_of_serve_is_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    check_lines("serve_help.txt", capsys.readouterr().out.removesuffix("\n").split("\n"))


# --- errors ---------------------------------------------------------------------------------------------------------

GEMINI = "/v1beta/models/tiny"
HI = [user("hi")]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HI}),
    "completion": ("/v1/completions", {"prompt": "hi"}),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 100, "messages": HI}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "gemini": (f"{GEMINI}:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
}
TOKENS = (70, 71)


def errors_of_facts() -> tuple[StenographError, ...]:
    """The errors that are made of more than a message."""
    return (
        errors.GrammarBesideCall(),
        errors.HistoryMismatch("it differs", blame=Blame(RequestPart.MESSAGES, 0)),
        errors.NothingToAnswer("nothing is asked", blame=Blame(RequestPart.MESSAGES, 0)),
        errors.ContextLengthExceeded(num_prompt_tokens=9, max_tokens=5, max_context_tokens=12),
        errors.BudgetSpent(errors.Limit.SESSION_TURNS, "its turns are spent"),
        errors.SessionNotFound("none"),
        errors.MethodNotAllowed("GET", "/x", allowed=("POST", "PUT")),
        errors.ModelMismatch("one", made_with="a", served="b"),
        errors.IdempotencyMismatch(),
        errors.UpstreamInvalid("lengths", "2 ids but 1 logprobs"),
        errors.UpstreamRefused(
            status=418, content_type="application/json", headers=(("x-of-the-engine", "1"),), body=b'{"no": 1}'
        ),
        errors.UpstreamUnreachable("it broke", reason="no"),
        errors.SessionDamaged("one", place="turns", problem="a row is cut"),
        errors.SessionBusy("one"),
        errors.LimitExceeded(errors.Limit.IN_FLIGHT, "all turns run", retry_after_s=2.0),
        errors.StorageUnavailable("the disk is full", is_full=True),
        errors.SessionElsewhere("one", url="http://10.0.0.1:8080", retry_after_s=3.0),
    )


BLAMES = [
    Blame(RequestPart.MESSAGES),
    Blame(RequestPart.MESSAGES, 0, ("role",)),
    Blame(RequestPart.TOOLS, 1, ("parameters",)),
    Blame(RequestPart.TOOL_CHOICE),
    Blame(RequestPart.TEMPLATE_KWARGS, None, ("x",)),
    Blame(RequestPart.PROMPT),
    Blame(RequestPart.PROMPT, 0, (1,)),
    Blame(RequestPart.TRUNCATION),
    Blame(RequestPart.MAX_TOKENS),
    Blame(RequestPart.GRAMMAR),
    *(Blame(RequestPart.SAMPLING, None, (name,)) for name in ("temperature", "stop", "top_k", "seed")),
    Blame(RequestPart.TEXT_VIEW, None, ("keeps_stop",)),
    Blame(RequestPart.REPLY_OPTIONS, None, ("logprobs",)),
]


def kinds(above: type[StenographError] = StenographError) -> Iterator[type[StenographError]]:
    """The errors that have a code."""
    for kind in above.__subclasses__():
        if hasattr(kind, "code"):
            yield kind
        yield from kinds(kind)


def every_error() -> Iterator[tuple[str, StenographError]]:
    """An error of each kind, and one for each part of a request that can be at fault, by name."""
    of_facts = {type(error): error for error in errors_of_facts()}
    for kind in kinds():
        yield kind.__name__, of_facts.get(kind) or kind(f"this is {kind.__name__}", retry_after_s=1.5)
    for blame in BLAMES:
        parts = (blame.part, blame.index, *blame.path)
        where = "/".join(str(one) for one in parts if one is not None)
        yield f"InvalidRequest at {where}", errors.InvalidRequest("it is bad", blame=blame)


async def seen(
    live: Live, prefix: str, call: str, *, streams: bool, drawn: tuple[int, ...], error: StenographError
) -> Any:
    """Status, headers and body of the answer to a turn that fails so; of a stream that had begun its last event."""
    live.engine.plan(Script(ids=drawn, finish=None, error=error))
    path, body = CALLS[call]
    if call == "gemini" and streams:
        path = f"{GEMINI}:streamGenerateContent?alt=sse"
    elif streams:
        body = {**body, "stream": True}
    answer = await live.call("POST", prefix + path, body)
    text = masked(answer.body.decode())
    if answer.status == 200:
        return text.removesuffix("\n\n").split("\n\n")[-1]
    told = {name: masked(value) for name, value in answer.headers.items() if name not in ("Date", "Content-Length")}
    return [answer.status, told, text]


@pytest.mark.parametrize(("call", "compat"), [*((call, None) for call in CALLS), ("chat", Compat.MILES)])
async def test_every_error_is_sent_as_it_was_on_each_route(
    renderer: Renderer, call: str, compat: Compat | None
) -> None:
    engine = ScriptedEngine(vocab_size=VOCAB_SIZE)
    found: dict[str, Any] = {}
    async with (
        running(engine, renderer, clock=ManualClock(), compat=compat) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        prefix = f"/sessions/{await live.open()}" if compat else ""
        for streams, drawn in ((False, ()), (True, ()), (True, TOKENS)):
            where = f"{'in' if drawn else 'before'} a stream" if streams else "whole"
            for name, error in every_error():
                found[f"{name}, {where}"] = await seen(live, prefix, call, streams=streams, drawn=drawn, error=error)
    check_rows(f"errors/{call}{'' if compat is None else '-miles'}.txt", found)


# --- sessions -------------------------------------------------------------------------------------------------------


async def views_of(live: Live, session: str) -> dict[str, str]:
    """The records and samples of a session."""
    samples = f"/sessions/{session}/samples"
    return {
        "records": text_of(await live.call("GET", f"/sessions/{session}")),
        "samples": text_of(await live.call("POST", samples, {"format": "json", "include_side": True})),
    }


SPELLED_IDS = {"smolagents", "smolagents-stream"}
"""Clients that write the random ids of calls into texts, so that the tokens of a prompt are random too."""


@pytest.mark.parametrize("name", sorted(RECORDINGS.keys() - SPELLED_IDS))
async def test_records_and_samples_of_a_recorded_session_are_the_same(live: Live, name: str) -> None:
    recording = RECORDINGS[name]
    session = await live.open(history=recording["histories"][-1], metadata={"task": name})
    client = Client(live, recording, session)
    for request in recording["requests"]:
        await client.send(request)
    check_bodies(f"sessions/{name}.jsonl", await views_of(live, session))


PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}}
LOOK = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
THOUGHT = "<think>\nLook first.\n</think>\n\nI look.\n"


def chat_after(reply: Any) -> list[Any]:
    message = reply["choices"][0]["message"]
    return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seen"}]


def messages_after(reply: Any) -> list[Any]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
        for block in reply["content"]
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]


def responses_after(reply: Any) -> list[Any]:
    call_id = reply["output"][-1]["call_id"]
    return [*reply["output"], {"type": "function_call_output", "call_id": call_id, "output": "seen"}]


def gemini_after(reply: Any) -> list[Any]:
    result = {"functionResponse": {"name": "look", "response": {"output": "seen"}}}
    return [reply["candidates"][0]["content"], {"role": "user", "parts": [result]}]


TALKS: dict[str, tuple[str, dict[str, Any], Callable[[Any], list[Any]]]] = {
    "chat": ("messages", {"tools": [{"type": "function", "function": LOOK}], "logprobs": True}, chat_after),
    "messages": (
        "messages",
        {"tools": [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]},
        messages_after,
    ),
    "responses": ("input", {"tools": [{"type": "function", **LOOK}]}, responses_after),
    "gemini": ("contents", {"tools": [{"functionDeclarations": [LOOK]}]}, gemini_after),
}


@pytest.mark.parametrize("call", TALKS)
async def test_replies_records_and_samples_of_each_protocol_are_the_same(live: Live, call: str) -> None:
    path, body = CALLS[call]
    key, more, after = TALKS[call]
    opening = [{"role": "user", "content": "hi"}] if call == "responses" else body[key]
    body = {**body, **more, key: opening}
    session = await live.open(group="pins", metadata={"task": call})
    prefix = f"/sessions/{session}"
    live.says(THOUGHT + TOOL_CALL)
    first = await live.call("POST", prefix + path, body)
    body[key] = [*opening, *after(first.json())]
    live.says("It is there. ☃")
    if call == "gemini":
        path = f"{GEMINI}:streamGenerateContent?alt=sse"
    else:
        body["stream"] = True
    second = await live.call("POST", prefix + path, body)
    assert len(live.manager.sessions.get(session).nodes) == 2
    assert live.manager.sessions.get(session).nodes[1].depth == 2
    check_lines(f"replies/{call}.txt", [text_of(first), *text_of(second).split("\n")])
    delta = text_of(await live.call("GET", f"{prefix}?records=delta"))
    check_bodies(f"sessions/of-{call}.jsonl", {**await views_of(live, session), "delta": delta})


# --- metrics --------------------------------------------------------------------------------------------------------

OF_THE_MACHINE = re.compile(r"(process_\w+|stenograph_loop_lag_seconds\w*(?:\{[^}]*\})?) .*")


async def test_metrics_of_a_fixed_load_are_the_same(live: Live) -> None:
    """Every line but for values of the process and of the event loop; times are 0, for the clock stands still."""
    session = await live.open(group="pins")
    live.says("one")
    await live.chat(session, user("hi"))
    live.says("two", finish=Finish(reason=FinishReason.LENGTH))
    await live.chat(session, user("hi"), assistant("one"), user("on"), stream=True)
    live.says("alone")
    await live.chat(None, user("hi"))
    await live.chat(session, user("other"), max_tokens=0)
    await live.call("POST", "/nowhere", {})
    for error in (errors.UpstreamTimeout("late"), errors.UpstreamInvalid("lengths", "2 ids but 1 logprobs")):
        live.engine.plan(Script(ids=TOKENS, finish=None, error=error))
        await live.chat(session, user("hi"), stream=True)
    await live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0, "verdict": "ok"})
    await live.call("POST", f"/sessions/{session}/samples", {})
    await live.call("GET", f"/sessions/{session}/drift")
    await live.call("DELETE", f"/sessions/{session}")
    lines = text_of(await live.call("GET", "/metrics")).removesuffix("\n").split("\n")
    check_lines("metrics.txt", [OF_THE_MACHINE.sub(r"\1 …", line) for line in lines])
