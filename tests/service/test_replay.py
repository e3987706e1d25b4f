"""Recorded sessions lived again: every dialect, byte for byte, at once and at the recorded pace, with an engine behind
and without; and where a request parts from the record.
"""

import asyncio
import gc
import hashlib
import json
import os
import random
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import ScriptedEngine
from stenograph.core.settings import Switch
from stenograph.engine.base import Engine
from stenograph.parts import ReplayPace
from stenograph.replay.manager import ReplayStorage
from stenograph.replay.part import NoEngine, ReplayProcesses
from stenograph.store.files import open_files
from stenograph.store.folder import DataFolder
from stenograph.store.settings import Durability
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark

from .conftest import Answer, Live, running, user
from .test_images import image, part, rig_of, seeing, sees

__all__ = ["seeing"]  # a fixture

MARK = ModelMark(name="tiny", digest=b"tiny")


@asynccontextmanager
async def server(
    renderer: Renderer, folder: Path, *, engine: Engine | None = None, **settings: Any
) -> AsyncIterator[Live]:
    """A server with its sessions in a folder; with `play` or without an engine one that lives them again."""
    scripted = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    if engine is not None:
        settings.setdefault("strict", Switch.ON)
    alone = {"alone": ReplayProcesses} if engine is not None or "play" in settings else {}
    held = DataFolder(folder, address="")
    store = await open_files(held, [0], durability=Durability.COMMIT, on_failed=print)
    try:
        async with (
            running(engine or scripted, renderer, store=store, mark=MARK, data_dir=folder, **alone, **settings) as (
                url,
                manager,
            ),
            aiohttp.ClientSession() as client,
        ):
            yield Live(url=url, engine=scripted, renderer=renderer, manager=manager, client=client)
    finally:
        await store.aclose()
        held.close()


def no_engine(renderer: Renderer) -> NoEngine:
    return NoEngine(Path("tiny"), renderer.tokenizer.vocab_size)


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI = "/v1beta/models/tiny:generateContent"
GEMINI_STREAM = "/v1beta/models/tiny:streamGenerateContent?alt=sse"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def requests_of(texts: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """First requests in every dialect, whole and streamed, each with a text of its own."""
    named = iter(texts)
    chat = [
        {"messages": [user(next(named))], **more}
        for more in ({}, {"logprobs": True, "tools": [TOOL]}, {"stream": True})
    ]
    return [
        *((CHAT, one) for one in chat),
        (RESPONSES, {"input": next(named)}),
        (RESPONSES, {"input": next(named), "stream": True}),
        (MESSAGES, {"max_tokens": 50, "messages": [user(next(named))]}),
        (MESSAGES, {"max_tokens": 50, "messages": [user(next(named))], "stream": True}),
        (GEMINI, {"contents": [{"role": "user", "parts": [{"text": next(named)}]}]}),
        (GEMINI_STREAM, {"contents": [{"role": "user", "parts": [{"text": next(named)}]}]}),
        ("/v1/completions", {"prompt": next(named), "model": "tiny"}),
    ]


NAMES = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]


async def asked(live: Live, session: str, requests: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    return [await live.call("POST", f"/sessions/{session}{path}", body) for path, body in requests]


@pytest.mark.parametrize("history", ["strands", "tree"])
async def test_every_dialect_gets_the_bytes_that_it_got(renderer: Renderer, tmp_path: Path, history: str) -> None:
    requests = requests_of(NAMES)
    async with server(renderer, tmp_path) as live:
        session = await live.open(history=history)
        for name in NAMES:
            live.says(f"an answer to {name}")
        before = await asked(live, session, requests)
        assert [one.status for one in before] == [200] * len(requests), before
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        for _ in range(2):  # the second time each gets its last reply once more
            after = await asked(live, session, requests)
            assert [one.body for one in after] == [one.body for one in before]
        ids = [one.headers["x-request-id"] for one in before]
        assert [one.headers["x-request-id"] for one in after] == ids
        assert len(live.manager.sessions.get(session).nodes) == len(requests)


async def test_a_conversation_is_lived_turn_by_turn(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open(history="linear")
        told: list[dict[str, Any]] = []
        bodies: list[tuple[list[dict[str, Any]], Answer]] = []
        for text in ("one", "two", "two again", "three"):
            live.says(f"reply to {text}")
            ask = [*told, user("two" if text == "two again" else text)]
            answer = await live.chat(session, *ask)
            bodies.append((ask, answer))
            if text != "two":  # that one is tried again
                told = [*ask, answer.json()["choices"][0]["message"]]
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        for num, (ask, answer) in enumerate(bodies):
            assert (await live.chat(session, *ask)).body == answer.body
            assert len(live.manager.sessions.get(session).nodes) == (1, 2, 2, 3)[num]


async def test_the_record_is_as_it_was_whatever_is_done_to_the_sessions(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        live.says("hello")
        first = await live.chat(session, user("hi"))
    async with server(renderer, tmp_path, play=ReplayPace.AT_ONCE) as live:
        assert (await live.chat(session, user("hi"))).body == first.body
        live.says("other")
        other = await live.chat(session, user("something else"))
        assert other.status == 200
        assert (await live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0})).status == 200
        fresh = await live.open()
        live.says("new")
        assert (await live.chat(fresh, user("hi"))).status == 200
        assert (await live.call("DELETE", f"/sessions/{session}")).status in (200, 204)
        assert (await live.chat(session, user("hi"))).body == first.body, "a deleted session begins anew"
    async with server(renderer, tmp_path) as live:
        listed = (await live.call("GET", "/sessions")).json()["sessions"]
        assert [one["session_id"] for one in listed] == [session]
        shown = (await live.call("GET", f"/sessions/{session}")).json()
        assert len(shown["records"]) == 1
        assert (await live.call("GET", f"/sessions/{session}/outcome")).status != 200 or shown.get("outcome") is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda ask: ask.update(messages=[user("hello there")]),
            ["turn 0, message 0 (user), content, character 1", "'hi'", "'hello there'"],
        ),
        (lambda ask: ask["messages"].append(user("more")), ["message 1 was not there", "more"]),
        (lambda ask: ask.update(tools=[TOOL]), ["turn 0, tool 0, character 0: recorded 'no tool', sent", "look"]),
        (
            lambda ask: ask["messages"].insert(0, {"role": "system", "content": "be brief"}),
            ["message 0: recorded is a message of user, sent is one of system"],
        ),
    ],
)
async def test_a_request_that_differs_is_told_where(
    renderer: Renderer, tmp_path: Path, change: Callable[[dict[str, Any]], None], told: list[str]
) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        live.says("hello")
        await live.chat(session, user("hi"))
    for settings in ({"engine": no_engine(renderer)}, {"play": ReplayPace.AT_ONCE, "strict": Switch.ON}):
        async with server(renderer, tmp_path, **settings) as live:
            ask: dict[str, Any] = {"messages": [user("hi")]}
            change(ask)
            answer = await live.call("POST", f"/sessions/{session}{CHAT}", ask)
            assert answer.status == 400
            message = answer.json()["error"]["message"]
            assert all(one in message for one in told), message
            assert live.engine.requests == []


@pytest.mark.parametrize("history", ["linear", "strands", "tree"])
async def test_a_live_engine_takes_over_where_a_request_differs(
    renderer: Renderer, tmp_path: Path, history: str
) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open(history=history)
        told: list[dict[str, Any]] = []
        answers = []
        for text in ("one", "two", "three"):
            live.says(f"reply to {text}")
            answers.append(await live.chat(session, *told, user(text)))
            told += [user(text), answers[-1].json()["choices"][0]["message"]]
    async with server(renderer, tmp_path, play=ReplayPace.AT_ONCE) as live:
        for num in range(2):
            assert (await live.chat(session, *told[: 2 * num], user(("one", "two")[num]))).body == answers[num].body
        live.says("another reply")
        other = await live.chat(session, *told[:4], user("THREE"))
        assert (other.status, other.json()["choices"][0]["message"]["content"]) == (200, "another reply")
        (request,) = live.engine.requests
        sample = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"][-1]
        assert sample["tokens"][: len(request.prompt.ids)] == list(request.prompt.ids)
        assert sample["response"].count("reply to") == 2, "the turns before are in its sample"


async def test_without_an_engine_nothing_else_is_answered(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        live.says("hello")
        await live.chat(session, user("hi"))
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        for answer in (await live.chat(None, user("hi")), await live.chat(await live.open(), user("hi"))):
            assert (answer.status, "no engine" in answer.json()["error"]["message"]) == (400, True)


async def test_a_paced_reply_is_the_same_in_pieces(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        live.says("an answer of several words")
        whole = await live.chat(session, user("hi"), stream=False)
        live.says("an answer of several words")
        await live.chat(session, user("ho"), stream=True)
    async with server(renderer, tmp_path, engine=no_engine(renderer), play=ReplayPace.RECORDED) as live:
        assert (await live.chat(session, user("hi"))).body == whole.body
        streamed = await live.chat(session, user("ho"), stream=True)
        events = [json.loads(line[6:]) for line in streamed.body.decode().splitlines() if line.startswith("data: {")]
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
        assert text == "an answer of several words"


async def test_parts_that_are_ignored_may_differ(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        live.says("hello")
        first = await live.chat(session, user("run 12 at 10:05"))
    ignores = (r"(?P<hour>\d+):\d+", "(?i)(?P<hour>RUN) [0-9]+")  # each with its own flags and names
    async with server(renderer, tmp_path, engine=no_engine(renderer), play_ignores=ignores) as live:
        assert (await live.chat(session, user("run 7 at 9:59"))).body == first.body
        assert (await live.chat(session, user("run 7 at noon"))).status == 400


async def test_requests_at_once_wake_one_session(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        for name in NAMES:
            live.says(f"an answer to {name}")
        before = [await live.chat(session, user(name)) for name in NAMES]
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        after = await asyncio.gather(*(live.chat(session, user(name)) for name in reversed(NAMES)))
        assert [one.body for one in reversed(after)] == [one.body for one in before]
        assert len(live.manager.sessions.get(session).nodes) == len(NAMES)
        scripts = cast("ReplayStorage", live.manager.sessions.storage).scripts
        await live.call("DELETE", f"/sessions/{session}")
        gc.collect()
        assert len(scripts) == 0


async def test_a_session_in_use_outlives_its_idle_limit(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open(ttl_s=60)
        for name in NAMES[:3]:
            live.says(f"an answer to {name}")
            await live.chat(session, user(name))
    clock = ManualClock()
    async with server(renderer, tmp_path, engine=no_engine(renderer), clock=clock) as live:
        for num, name in enumerate(NAMES[:3]):
            assert (await live.chat(session, user(name))).status == 200
            clock.advance(40)
            assert len(live.manager.sessions.get(session).nodes) == num + 1


async def test_a_retry_gets_the_reply_of_its_first_try(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        for name in NAMES[:3]:
            live.says(f"an answer to {name}")
        first, second, third = [(await live.chat(session, user("hi"))).body for _ in range(3)]
    path, body = f"/sessions/{session}{CHAT}", {"messages": [user("hi")]}
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        for headers, reply in (
            ({"idempotency_key": "k"}, first),
            ({"idempotency_key": "k"}, first),
            ({}, second),
            ({"x_stainless_retry_count": "1"}, second),
            ({"idempotency_key": "other"}, third),
            ({"idempotency_key": "k"}, first),
        ):
            assert (await live.call("POST", path, body, **headers)).body == reply
        other = await live.call("POST", path, {"messages": [user("ho")]}, idempotency_key="k")
        assert (other.status, other.json()["error"]["code"]) == (422, "idempotency_mismatch")


async def test_a_turn_with_other_tools_is_told_so_before_later_turns_were_lived(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        live.says("hello")
        reply = (await live.chat(session, user("hi"))).json()["choices"][0]["message"]
        live.says("again")
        await live.chat(session, user("hi"), reply, user("more"))
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        await live.chat(session, user("hi"))
        answer = await live.chat(session, user("hi"), tools=[TOOL])
        assert "turn 0, tool 0, character 0: recorded 'no tool'" in answer.json()["error"]["message"]
        answer = await live.chat(session, user("hi"), reply)
        assert "turn 1, the request ends before message 2: recorded is" in answer.json()["error"]["message"]


async def test_a_damaged_session_is_told_and_deleted_as_ever(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        live.says("hello")
        await live.chat(session, user("hi"))
    with closing(DataFolder(tmp_path, address="")) as held, closing(sqlite3.connect(held.file())) as rows, rows:
        rows.execute("UPDATE rows SET body = x'00' WHERE seq = 1")
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        answer = await live.chat(session, user("hi"))
        assert (answer.status, answer.json()["error"]["code"]) == (500, "session_damaged")
        assert "stenograph_store_sessions_damaged_total 1.0" in (await live.call("GET", "/metrics")).body.decode()
        assert (await live.call("DELETE", f"/sessions/{session}")).status == 204


async def test_media_of_a_recorded_session_are_there(seeing: Renderer, tmp_path: Path) -> None:
    held = DataFolder(tmp_path, address="")
    store = await open_files(held, [0], durability=Durability.COMMIT, on_failed=print)
    asks: list[dict[str, Any]] = [
        {"input": [sees({"type": "input_image", "image_url": part(1)["image_url"]["url"]})], "store": True}
    ]
    try:
        async with rig_of(seeing, store=store, settings={"data_dir": tmp_path}) as rig:
            session = await rig.session()
            rig.says("seen")
            first = await rig.call("POST", f"/sessions/{session}{RESPONSES}", asks[0])
            assert first.status == 200, first.body
            asks.append({"input": "and now?", "previous_response_id": first.json()["id"]})
            rig.says("seen again")
            second = await rig.call("POST", f"/sessions/{session}{RESPONSES}", asks[1])
            assert second.status == 200, second.body
    finally:
        await store.aclose()
        held.close()
    async with server(seeing, tmp_path, engine=no_engine(seeing)) as live:
        for ask, answer in zip(asks, (first, second), strict=True):
            assert (await live.call("POST", f"/sessions/{session}{RESPONSES}", ask)).body == answer.body
        digest = hashlib.sha256(image(1)).hexdigest()
        assert (await live.call("GET", f"/sessions/{session}/media/{digest}")).body == image(1)


async def test_a_response_is_named_also_where_it_was_not_lived(renderer: Renderer, tmp_path: Path) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        path, asks, replies = f"/sessions/{session}{RESPONSES}", [], []
        ask: dict[str, Any] = {"input": "one"}
        for text in ("two", "three", "four"):
            live.says(f"before {text}")
            asks.append(ask)
            replies.append((await live.call("POST", path, ask)).body)
            ask = {"input": text, "previous_response_id": json.loads(replies[-1])["id"]}
    async with server(renderer, tmp_path, play=ReplayPace.AT_ONCE) as live:
        assert (await live.call("POST", path, asks[2])).body == replies[2], "the first request of this server"
        await live.call("DELETE", f"/sessions/{session}")
        live.says("another")
        assert (await live.call("POST", path, {"input": "beside"})).status == 200
        assert [(await live.call("POST", path, ask)).body for ask in asks] == replies, "after the engine answered one"
        live.says("fine")
        assert (await live.call("POST", path, ask)).status == 200


class CountedPattern:
    """A pattern of nothing, with the texts that were searched."""

    def __init__(self) -> None:
        self.searched: list[str] = []

    def sub(self, _: str, text: str) -> str:
        self.searched.append(text)
        return text


async def test_a_long_text_is_searched_once_however_many_turns_it_is_held_against(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with server(renderer, tmp_path) as live:
        session = await live.open()
        for name in NAMES:
            live.says(f"an answer to {name}")
            await live.chat(session, user(name))
    async with server(renderer, tmp_path, engine=no_engine(renderer)) as live:
        await live.call("GET", f"/sessions/{session}")
        pattern = CountedPattern()
        cast("ReplayStorage", live.manager.sessions.storage)._ignored = (cast("re.Pattern[str]", pattern),)
        assert (await live.chat(session, user("long"))).status == 400
        assert (pattern.searched.count("long"), set(pattern.searched)) == (1, {"long", *NAMES})


NUM_SESSIONS = int(os.environ.get("REPLAYED_SESSIONS", "20"))
"""More by hand: REPLAYED_SESSIONS=1000."""

WORDS = (
    "hello",
    "été",
    "\U0001f642",
    "<think>\nwhy\n</think>\n\nso",
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
)


def asked_of(dialect: str, told: list[tuple[str, str]], *, stream: bool) -> tuple[str, dict[str, Any]]:
    """A request in a dialect after what was told: pairs of a role and a text, replies in the words that came."""
    chats = [{"role": role, "content": text} for role, text in told]
    match dialect:
        case "chat":
            return CHAT, {
                "messages": chats,
                "stream": stream,
                "stream_options": {"include_usage": True},
            } if stream else {"messages": chats}
        case "messages":
            return MESSAGES, {"max_tokens": 200, "messages": chats, "stream": stream}
        case "responses":
            return RESPONSES, {"input": chats, "stream": stream}
        case _:
            roles = {"assistant": "model", "user": "user"}
            parts = [{"role": roles[role], "parts": [{"text": text}]} for role, text in told]
            return (GEMINI_STREAM if stream else GEMINI), {"contents": parts}


async def lived(live: Live, draw: random.Random) -> list[tuple[str, dict[str, Any], Answer]]:
    """A session of some turns, in dialects that change, some of them tried again: its requests and answers."""
    session, told = await live.open(), [("user", f"session {draw.random()}")]
    found: list[tuple[str, dict[str, Any], Answer]] = []
    for _ in range(draw.randint(1, 5)):
        for _ in range(1 + (draw.random() < 0.2)):
            text = " ".join(draw.choices(WORDS[:3], k=draw.randint(1, 6)))
            live.says(draw.choice(("", WORDS[3] + " ")) + text + draw.choice(("", "\n" + WORDS[4])))
            path, body = asked_of(
                draw.choice(("chat", "messages", "responses", "gemini")), told, stream=draw.random() < 0.5
            )
            answer = await live.call("POST", f"/sessions/{session}{path}", body)
            assert answer.status == 200, answer.body
            found.append((f"/sessions/{session}{path}", body, answer))
        latest = live.manager.sessions.get(session).latest
        assert latest is not None
        told += [("assistant", latest.turn.reply.message.content or ""), ("user", "on")]
    return found


async def test_sessions_of_all_dialects_are_lived_again_without_another_byte(
    renderer: Renderer, tmp_path: Path
) -> None:
    draw = random.Random(7)
    async with server(renderer, tmp_path, max_sessions=10**6) as live:
        recorded = [await lived(live, draw) for _ in range(NUM_SESSIONS)]
    draw.shuffle(recorded)
    async with server(renderer, tmp_path, engine=no_engine(renderer), max_sessions=10**6) as live:
        for requests in recorded:
            for path, body, answer in requests:
                again = await live.call("POST", path, body)
                assert (again.status, again.body) == (200, answer.body)
        assert live.engine.requests == []
