"""A session that leaves memory between any two requests, by a restart or to make room, goes on as one that stays."""

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.base import GenerateRequest
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer

from .conftest import END, Live, assistant, running, user

pytestmark = pytest.mark.timeout(600)

STAY, EVICT, RESTART = "stay", "evict", "restart"
LONG = "a reply that is long enough to be known again wherever it stands, whoever has it"
DATED = "<environment_context>\n  <current_date>2026-11-{}</current_date>\n</environment_context>"
SYSTEM = {"role": "system", "content": "Be brief."}
HEX = re.compile(r"[0-9a-f]{32}")

KINDS = (
    "new", "go on", "other reply", "again", "other words", "chapter", "respond", "after", "references", "echo",
    "complete", "outcome", "repeat", "refused", "look",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Step:
    """A request of a client, about the conversation or the response number `which`, and what comes before it."""

    kind: str
    which: int = 0
    long: bool = False
    day: int = 21
    before: str = STAY


def steps_of(*kinds: str, before: str = RESTART) -> list[Step]:
    return [Step(kind=kind, which=0, before=before, long=number == 0) for number, kind in enumerate(kinds)]


steps = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(KINDS),
        which=st.integers(0, 7),
        long=st.booleans(),
        day=st.integers(21, 23),
        before=st.sampled_from([STAY, EVICT, RESTART]),
    ),
    min_size=2,
    max_size=7,
)


@dataclass(kw_only=True)
class Client:
    """An agent: its conversations as messages, its responses, and the bodies that it has sent."""

    lines: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    responses: list[tuple[list[Any], Any]] = field(default_factory=list[tuple[list[Any], Any]])
    sent: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    def messages(self, step: Step) -> list[dict[str, Any]]:
        """The messages of a chat."""
        new = [SYSTEM, user(DATED.format(step.day)), user(f"task {step.which % 2}")]
        if not self.lines or step.kind == "new":
            return new
        line = self.lines[step.which % len(self.lines)]
        match step.kind:
            case "other reply":
                return [*line[:-1], assistant("what the client says it was"), user("more")]
            case "again":
                return line[:-1]
            case "other words":
                return [*line[:-2], user("in other words")]
            case "chapter":
                return [SYSTEM, user("So far:"), line[-1], user("Go on.")]
            case _:
                return [*line, user("more")]

    def request(self, step: Step) -> tuple[str, str, Any]:  # noqa: PLR0911
        """Method, path below the session, and body."""
        items = [user(f"item {step.which % 2}")]
        before, reply = self.responses[step.which % len(self.responses)] if self.responses else ([], None)
        match step.kind:
            case "outcome":
                return "PUT", "/outcome", {"reward": {"tests": step.which / 3}, "verdict": "agent_failed"}
            case "look":
                return "GET", "" if reply is None else f"/v1/responses/{reply['id']}", None
            case "repeat" if self.sent:
                return "POST", *self.sent[-1]
            case "refused":
                return "POST", "/v1/chat/completions", {"messages": [assistant("nothing before it")]}
            case "complete":
                return "POST", "/v1/completions", {"prompt": f"prompt {step.which % 2}", "max_tokens": 16}
            case "after" if reply is not None:
                return "POST", "/v1/responses", {"input": items, "previous_response_id": reply["id"]}
            case "references" if reply is not None:
                named = [{"type": "item_reference", "id": item["id"]} for item in reply["output"]]
                return "POST", "/v1/responses", {"input": [*before, *named, *items]}
            case "echo" if reply is not None:
                return "POST", "/v1/responses", {"input": [*before, *reply["output"]]}
            case "respond" | "after" | "references" | "echo":
                return "POST", "/v1/responses", {"input": items}
            case _:
                return "POST", "/v1/chat/completions", {"messages": self.messages(step), "logprobs": True}

    def answered(self, path: str, body: Any, status: int, reply: Any) -> None:
        if status != 200:
            return
        if path == "/v1/chat/completions":
            self.lines.append([*body["messages"], reply["choices"][0]["message"]])
        elif path == "/v1/responses" and reply["output"] and "previous_response_id" not in body:
            self.responses.append((body["input"], reply))


@dataclass(kw_only=True)
class World:
    """A server that goes on for as long as nothing ends it. `folder` None: it keeps sessions in memory alone."""

    renderer: Renderer
    folder: DataFolder | None
    clock: ManualClock = field(default_factory=ManualClock)
    text: str = ""
    live: Live | None = None

    def says(self, request: GenerateRequest) -> Script:
        ids = (*self.renderer.tokenizer.encode(self.text), END)
        limit = request.params.max_tokens or len(ids)
        if limit < len(ids):
            return Script(ids=ids[:limit], finish=Finish(reason=FinishReason.LENGTH))
        return Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=END))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Live]:
        engine = ScriptedEngine(vocab_size=320, max_context_tokens=4096, model=self.says)
        async with AsyncExitStack() as stack:
            store = None
            if self.folder is not None:
                store = await SqliteStore.open(self.folder)
                stack.push_async_callback(store.aclose)
            url, manager = await stack.enter_async_context(
                running(engine, self.renderer, clock=self.clock, store=store, max_sessions=1)
            )
            client = await stack.enter_async_context(aiohttp.ClientSession())
            yield Live(url=url, engine=engine, renderer=self.renderer, manager=manager, client=client)

    async def run(self, plan: Sequence[Step], options: dict[str, Any]) -> list[Any]:
        """Everything that the client is told, and that is shown in the end."""
        told: list[Any] = []
        client, session = Client(), ""
        async with AsyncExitStack() as stack:
            live = await stack.enter_async_context(self.serving())
            session = await live.open(**options)
            for number, step in enumerate(plan):
                if self.folder is not None and step.before == RESTART:
                    await stack.aclose()
                    live = await stack.enter_async_context(self.serving())
                elif self.folder is not None and step.before == EVICT:
                    await live.call("DELETE", f"/sessions/{await live.open()}")
                    assert not live.manager.sessions.has(session)
                told.append(await self.ask(live, session, client, step, number))
            told += await shown(live, session)
        return normal(told)

    async def ask(self, live: Live, session: str, client: Client, step: Step, number: int) -> Any:
        self.clock.advance(1.0)
        self.text = f"{LONG} {number}" if step.long else f"reply {number}"
        method, path, body = client.request(step)
        repeats = step.kind == "repeat" and bool(client.sent)
        key = f"key {len(client.sent) - repeats}"
        answer = await live.call(method, f"/sessions/{session}{path}", body, idempotency_key=key)
        reply = answer.json()
        if path.startswith("/v1/") and method == "POST" and not repeats:
            client.sent.append((path, body))
            client.answered(path, body, answer.status, reply)
        return [step.kind, answer.status, reply]


async def shown(live: Live, session: str) -> list[Any]:
    """Everything that a client can see of a session in the end."""
    found: list[Any] = []
    for strand in ("", *(f"?strand={number}" for number in range(4))):
        found.append((await live.call("GET", f"/sessions/{session}{strand}")).json())
    fields = {"format": "json", "include_side": True}
    found.append((await live.call("POST", f"/sessions/{session}/samples", fields)).json())
    found.append((await live.call("GET", f"/sessions/{session}/drift")).json())
    found.append((await live.call("GET", "/sessions")).json())
    ledger = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    found.append(of_turns(ledger))
    return found


def of_turns(ledger: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The requests that made turns. Rows of others may be lost, and so may their numbers."""
    made: dict[int, dict[str, Any]] = {}
    for row in ledger:
        number = row.pop("number")
        assert number > 0
        if row["turn"] is not None:
            made.setdefault(row["turn"], row)
    return made


def normal(told: list[Any]) -> list[Any]:
    """With ids by the order in which they came."""
    numbers: dict[str, int] = {}
    text = HEX.sub(lambda found: f"id {numbers.setdefault(found[0], len(numbers))}", json.dumps(told))
    told_again: list[Any] = json.loads(text)
    return told_again


async def compared(renderer: Renderer, plan: Sequence[Step], options: dict[str, Any]) -> None:
    in_memory = await World(renderer=renderer, folder=None).run(plan, options)
    with tempfile.TemporaryDirectory() as path:
        folder = DataFolder(Path(path) / "data", address="")
        try:
            kept = await World(renderer=renderer, folder=folder).run(plan, options)
        finally:
            folder.close()
    for one, other in zip(in_memory, kept, strict=True):
        assert other == one


@settings(max_examples=20)
@given(plan=steps, history=st.sampled_from(["strands", "strands", "linear", "tree"]))
@example(plan=steps_of("new", "other reply", "go on", "other reply", "go on"), history="strands")
@example(plan=steps_of("new", "chapter", "go on", "again"), history="strands")
@example(plan=steps_of("respond", "after", "references", "look"), history="strands")
@example(plan=steps_of("respond", "echo", "after", "look"), history="strands")
@example(plan=steps_of("respond", "after", "after", "repeat"), history="tree")
@example(plan=steps_of("new", "repeat", "outcome", "complete", "complete", before=EVICT), history="strands")
@example(
    plan=[Step(kind="new", before=RESTART), Step(kind="new", day=22), Step(kind="go on", day=23, before=RESTART)],
    history="strands",
)
def test_a_session_that_was_evicted_or_restarted_goes_on_as_one_that_was_not(
    renderer: Renderer, plan: list[Step], history: str
) -> None:
    options = {"history": history, "canonical": "cx-date,cx-cwd", "group": "g", "metadata": {"n": 1}}
    asyncio.run(compared(renderer, plan, options))
