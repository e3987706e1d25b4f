"""Two workers beside a server of one process: whatever is asked of both, in any order, they answer alike.

The model of the workers is the server that the session machine holds to its contract. Every request goes to one of
the workers at random; ids and times are taken out of the answers, the rest is the same. Turns are whole: what strikes
one in the middle is test_worker_machine.py's.
"""

import asyncio
import json
import re
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from safetensors.numpy import load

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.base import GenerateRequest
from stenograph.http.processes import Processes
from stenograph.http.settings import Settings
from stenograph.store.folder import DataFolder
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, assistant, running, user
from .test_bulk import frames
from .workers_kit import Workers, two_workers

T = TypeVar("T")

THROUGH = st.sampled_from([0, 1])
KINDS = st.sampled_from(["strands", "strands", "linear", "tree"])
GROUPS = st.sampled_from([None, "g", "h"])
WAYS = st.sampled_from(["on", "on", "on", "on", "again", "another reply", "cut", "other", "odd"])
DIALECTS = st.sampled_from(["chat", "chat", "chat", "messages", "completions"])
TOOK = ("stages", "stage_seconds", "timing")
"""Fields of what took how long."""
ID = re.compile(r"[0-9a-f]{32}")


def model(renderer: Renderer) -> Any:
    """Says something that the request's seed decides."""

    def answer(request: GenerateRequest) -> Script:
        seed = request.params.seed or 0
        ids = tuple(renderer.tokenizer.encode(("A", "AB", "a b")[seed % 3]))
        match seed % 8:
            case 5:
                return Script(ids=ids, finish=Finish(reason=FinishReason.LENGTH))
            case 6:
                return Script(ids=(*ids, renderer.tokenizer.vocab_size))
            case _:
                return Script(ids=(*ids, END), finish=Finish(reason=FinishReason.STOP, matched=END))

    return answer


@dataclass(eq=False)
class Pairs:
    """Both servers on a loop that the rules run."""

    loop: asyncio.AbstractEventLoop
    one: Live
    workers: Workers
    num_opened: int = 0


class AlikeMachine(RuleBasedStateMachine):
    """A client of both servers."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self.pairs = pairs
        self.lines: dict[int, list[dict[str, Any]]] = {}
        self.bodies: dict[int, list[dict[str, Any]]] = {}
        self.ids: list[tuple[str, str]] = []
        """Sessions', of the one server and of the other."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.pairs.loop.run_until_complete(work)

    def asked(
        self, through: int, method: str, path: str, body: Any = None, *, session: int | None = None, **headers: str
    ) -> tuple[Answer, Answer]:
        """The answers of both; `{0}` in the path is the session's id, and so is what a body's `sessions` number."""

        def of(side: int) -> tuple[str, Any]:
            at = path if session is None else path.replace("{0}", self.ids[session][side])
            if isinstance(body, dict) and "sessions" in body:
                return at, {**body, "sessions": [self.ids[number][side] for number in body["sessions"]]}
            return at, body

        async def both() -> tuple[Answer, Answer]:
            (at, sent), (other_at, other_sent) = of(0), of(1)
            return await asyncio.gather(
                self.pairs.one.call(method, at, sent, **headers),
                self.pairs.workers.lives[through].call(method, other_at, other_sent, **headers),
            )

        return self.run(both())

    def alike(self, through: int, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """What both say, which is the same."""
        one, other = self.asked(through, method, path, body, **more)
        assert (one.status, one.headers.get("content-type")) == (other.status, other.headers.get("content-type"))
        if not one.body:
            assert not other.body
            return None
        said = self.cleaned(one.json())
        assert self.cleaned(other.json()) == said
        return said

    def cleaned(self, value: Any) -> Any:
        """Without times, and with a session's number for its id."""
        if isinstance(value, dict):
            return {self.cleaned(key): self.cleaned(one) for key, one in value.items() if key not in TOOK}
        if isinstance(value, list):
            return [self.cleaned(one) for one in value]
        if isinstance(value, int | float) and value > 10**9:
            return "a time"
        return ID.sub(self.number, value) if isinstance(value, str) else value

    def number(self, found: re.Match[str]) -> str:
        numbers = {session: number for number, pair in enumerate(self.ids) for session in pair}
        return f"session {numbers[found[0]]}" if found[0] in numbers else "an id"

    @property
    def numbers(self) -> st.SearchStrategy[int]:
        return st.sampled_from(sorted(self.lines))

    @initialize(opened=st.lists(st.tuples(THROUGH, KINDS, GROUPS, st.none(), st.booleans()), min_size=3, max_size=4))
    def begin(self, opened: list[tuple[int, str, str | None, None, bool]]) -> None:
        for number, options in enumerate(opened):
            self.open(*options[:4], is_keyed=options[4])
            self.turn(number, options[0], "on", "chat", 0)
            self.turn(number, 1 - options[0], "on", "chat", 1)

    @precondition(lambda self: len(self.lines) < 4)
    @rule(through=THROUGH, kind=KINDS, group=GROUPS, max_turns=st.sampled_from([None, None, 2]), is_keyed=st.booleans())
    def open_one(self, through: int, kind: str, group: str | None, max_turns: int | None, is_keyed: bool) -> None:
        self.open(through, kind, group, max_turns, is_keyed=is_keyed)

    def open(self, through: int, kind: str, group: str | None, max_turns: int | None, *, is_keyed: bool) -> None:
        number = len(self.ids)
        body = {"history": kind, "group": group, "max_turns": max_turns, "metadata": {"at": number % 3}}
        self.pairs.num_opened += 1
        headers = {"idempotency_key": f"opening {self.pairs.num_opened}"} if is_keyed else {}
        one, other = self.asked(through, "POST", "/sessions", body, **headers)
        self.ids.append((one.json()["session_id"], other.json()["session_id"]))
        self.lines[number], self.bodies[number] = [], []

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), turns=st.lists(st.tuples(THROUGH, WAYS, DIALECTS, st.integers(0, 7)), min_size=2, max_size=6))
    def talk(self, data: st.DataObject, turns: list[tuple[int, str, str, int]]) -> None:
        number = data.draw(self.numbers)
        for turn in turns:
            self.turn(number, *turn)

    def turn(self, number: int, through: int, way: str, dialect: str, seed: int) -> None:
        line = self.lines[number]
        messages = {
            "on": [*line, user("go on")],
            "again": line[:-1] or [user("a")],
            "another reply": [*line[:-1], assistant("mine"), user("go on")] if line else [user("a")],
            "cut": [*line[:-3], user("b")],
            "other": [user("another beginning")],
            "odd": [*line, {"role": "tool", "content": "answers no call", "tool_call_id": "1"}],
        }[way]
        body: dict[str, Any] = {"messages": messages, "seed": seed, "max_tokens": 20}
        path = "/sessions/{0}/v1/chat/completions"
        if dialect == "messages":
            path, body = "/sessions/{0}/v1/messages", {"messages": messages, "max_tokens": 20, "model": "m"}
        elif dialect == "completions":
            path, body = "/sessions/{0}/v1/completions", {"prompt": "once upon", "seed": seed, "max_tokens": 20}
        said = self.alike(through, "POST", path, body, session=number)
        if dialect == "chat" and "choices" in said:
            self.bodies[number].append(body)
            self.lines[number] = [*messages, said["choices"][0]["message"]]

    @precondition(lambda self: any(self.bodies.values()))
    @rule(data=st.data(), through=THROUGH)
    def ask_again(self, data: st.DataObject, through: int) -> None:
        number = data.draw(st.sampled_from([number for number, bodies in self.bodies.items() if bodies]))
        body = data.draw(st.sampled_from(self.bodies[number][-2:]))
        path = "/sessions/{0}/v1/chat/completions"
        self.alike(through, "POST", path, body, session=number, x_stainless_retry_count="1")

    @precondition(lambda self: self.lines)
    @rule(
        data=st.data(),
        through=THROUGH,
        route=st.sampled_from(["", "?records=delta", "/ledger", "/drift", "/why", "/outcome", "/nothing", "?strand=1"]),
    )
    def look(self, data: st.DataObject, through: int, route: str) -> None:
        self.alike(through, "GET", "/sessions/{0}" + route, session=data.draw(self.numbers))

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), through=THROUGH, verdict=st.sampled_from(["ok", "infra_failed", "nonsense"]))
    def judge(self, data: st.DataObject, through: int, verdict: str) -> None:
        body = {"reward": 1.0, "verdict": verdict}
        self.alike(through, "PUT", "/sessions/{0}/outcome", body, session=data.draw(self.numbers))

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), through=THROUGH)
    def samples(self, data: st.DataObject, through: int) -> None:
        self.alike(through, "POST", "/sessions/{0}/samples", {"format": "json"}, session=data.draw(self.numbers))

    @rule(data=st.data(), through=THROUGH, deletes=st.booleans(), by_id=st.booleans())
    def samples_of_many(self, data: st.DataObject, through: int, deletes: bool, by_id: bool) -> None:
        body: dict[str, Any] = {"group": data.draw(st.sampled_from(["g", "h"])), "delete": deletes}
        if by_id and self.ids:
            some = st.lists(st.sampled_from(range(len(self.ids))), max_size=6, unique=True)
            body = {"sessions": data.draw(some), "delete": deletes}
        answers = self.asked(through, "POST", "/samples", body)
        one, other = ([self.opened(frame) for frame in frames(answer.body)] for answer in answers)
        assert one == other
        if deletes:
            self.forget_gone()

    def opened(self, frame: tuple[dict[str, Any], bytes]) -> Any:
        """A frame, its tensors as numbers."""
        head, payload = frame
        if not payload:
            return self.cleaned(head)
        tensors = {name: array.tolist() for name, array in load(payload).items()}
        told = json.loads(bytes(tensors.pop("_samples_meta")))
        return self.cleaned([head, told, tensors])

    def forget_gone(self) -> None:
        """Take sessions that are gone at the one server out of the model."""
        there = {one["session_id"] for one in self.asked(0, "GET", "/sessions?limit=1000")[0].json()["sessions"]}
        for number in [number for number in self.lines if self.ids[number][0] not in there]:
            del self.lines[number], self.bodies[number]

    @rule(
        through=THROUGH,
        query=st.sampled_from(["", "group=g", "group=h&state=open", "metadata.at=1", "state=ended", "x=1"]),
    )
    def list_them(self, through: int, query: str) -> None:
        one, other = self.asked(through, "GET", f"/sessions?limit=1000&{query}")
        assert one.status == other.status
        lists = [self.cleaned(answer.json()).get("sessions", []) for answer in (one, other)]
        assert sorted(lists[0], key=str) == sorted(lists[1], key=str)  # the workers' are worker by worker

    @rule(through=THROUGH, query=st.sampled_from(["", "?group=g", "?by=cause", "?by=step&group=h", "?what=1"]))
    def accounts(self, through: int, query: str) -> None:
        one, other = (answer.json() for answer in self.asked(through, "GET", f"/accounts{query}"))
        for told in (one, other):
            told.get("rows", []).sort(key=str)
        assert one == other

    @rule(through=THROUGH, group=st.sampled_from(["g", "h", "none"]))
    def compare(self, through: int, group: str) -> None:
        self.alike(through, "GET", f"/console/api/group?name={group}")

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), through=THROUGH, by_group=st.booleans())
    def delete(self, data: st.DataObject, through: int, by_group: bool) -> None:
        if by_group:
            self.alike(through, "DELETE", data.draw(st.sampled_from(["/sessions", "/sessions?group=h"])))
            self.forget_gone()
            return
        number = data.draw(self.numbers)
        for _ in range(2):
            self.alike(through, "DELETE", "/sessions/{0}", session=number)
        del self.lines[number], self.bodies[number]

    @precondition(lambda self: len(self.lines) > 2)
    @rule(through=THROUGH, version=st.sampled_from([None, "1", "run"]))
    def pause_and_continue(self, through: int, version: str | None) -> None:
        self.alike(through, "POST", "/pause_generation", {})
        self.alike(1 - through, "GET", "/model_info")
        assert self.alike(through, "GET", "/ready")["paused"]
        if version is not None:
            self.alike(1 - through, "POST", "/update_weight_version", {"new_version": version})
        self.alike(through, "POST", "/update_weights_from_disk", {"model_path": "there"})
        self.alike(1 - through, "POST", "/continue_generation", {})
        assert not self.alike(through, "GET", "/model_info")["paused"]

    def teardown(self) -> None:
        for number in self.lines:
            self.alike(number % 2, "DELETE", "/sessions/{0}", session=number)


@contextmanager
def served(folder: Path, renderer: Renderer, *, has_store: bool) -> Iterator[Pairs]:
    async def begin(stack: AsyncExitStack, loop: asyncio.AbstractEventLoop) -> Pairs:
        says, made, options = model(renderer), Settings(), dict[str, Any]()
        store = None
        if has_store:
            made = Settings(data_dir=folder / "one")
            data = DataFolder(folder / "one", address="here")
            stack.callback(data.close)
            opening = Processes().opened_store(made, data, address="", on_failed=lambda _: None)
            store = await stack.enter_async_context(opening)
            options = {"data_dir": folder / "two"}
        engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096, model=says)
        url, manager = await stack.enter_async_context(running(engine, renderer, store=store, data_dir=made.data_dir))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        one = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        workers = await stack.enter_async_context(two_workers(folder, renderer, model=says, **options))
        return Pairs(loop, one, workers)

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner.run(begin(stack, runner.get_loop()))
        finally:
            runner.run(stack.aclose())


@pytest.mark.timeout(200)  # many requests, on a machine that may do other work too
@pytest.mark.parametrize("has_store", [False, True])
def test_two_workers_answer_as_one_process_does(has_store: bool, renderer: Renderer, tmp_path: Path) -> None:
    with served(tmp_path, renderer, has_store=has_store) as pairs:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: AlikeMachine(pairs),
            settings=settings(
                max_examples=5, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
