"""While one request is slow, the others are served: tokenization stands in a worker, long answers are made in pieces.

Nothing here is timed. A tokenizer stands in its thread until the test lets it go, and of long answers it is counted in
which passes of the loop their pieces were made.
"""

import asyncio
import json
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.cli.parts import PARTS
from stenograph.core.chat import CompletionRequest
from stenograph.core.clock import SystemClock
from stenograph.core.ids_json import PIECE_IDS, encode_ids, prompt_json
from stenograph.core.kinds import HistoryKind
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, token_ids
from stenograph.engine.base import Capabilities
from stenograph.families import family_for
from stenograph.http.app import make_app
from stenograph.http.mounts import App
from stenograph.http.settings import Settings
from stenograph.model.files import ModelFiles
from stenograph.model.tokenizer import Span, Tokenizer
from stenograph.offload.pool import INLINE_BELOW_BYTES, CpuPool, LoopShare
from stenograph.session.completion import completions
from stenograph.session.prompt_builder import PromptBuilder
from stenograph.session.services import TurnServices
from stenograph.text.renderer import Renderer
from stenograph.text.template.template import ChatTemplate
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.strand import Leases

from .conftest import END, Live, assistant, running, user

HELD = "the text at which the tokenizer stands"
LONG = "the user asks " * (INLINE_BELOW_BYTES // 10)
"""Long enough for a worker."""


class Gate:
    """Where threads stand until they are let go. `entered` and `left` count them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.entered = self.left = 0
        self._is_open = True

    def close(self) -> None:
        self._is_open = False

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            self.entered += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open)

    def leave(self) -> None:
        with self._changed:
            self.left += 1
            self._changed.notify_all()

    async def reached(self, *, entered: int = 0, left: int = 0) -> None:
        """Wait until so many threads have come here, and so many are past their work."""

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self.entered >= entered and self.left >= left)

        await asyncio.to_thread(wait)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Closed while inside; open at the end, however it comes."""
        self.close()
        try:
            yield
        finally:
            self.open()


class StandingTokenizer(Tokenizer):
    """A real tokenizer that stands at its gate where a text has HELD in it."""

    def __init__(self, tokenizer_json: str, gate: Gate) -> None:
        super().__init__(tokenizer_json)
        self._gate = gate

    def encode_spans(self, spans: Sequence[Span]) -> "array[int]":
        if not any(HELD in span.text for span in spans):
            return super().encode_spans(spans)
        self._gate.pass_through()
        try:
            return super().encode_spans(spans)
        finally:
            self._gate.leave()


def standing_renderer(gate: Gate) -> Renderer:
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(),
        chat_template=None,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=320,
        max_context_tokens=10**7,
        architecture="llama",
    )
    family = family_for(files, "smollm2")
    assert family.template is not None
    template = ChatTemplate(family.template, bos_token="<|im_start|>", eos_token="<|im_end|>")
    return Renderer(StandingTokenizer(files.tokenizer_json, gate), template, family)


class Speaker(ScriptedEngine):
    """Says "yes" to whatever is asked."""

    def _script_for(self, request: object) -> Script:
        return Script(ids=(10, END), finish=Finish(reason=FinishReason.STOP, matched=END))


@asynccontextmanager
async def standing(gate: Gate, num_workers: int = 2) -> AsyncIterator[Live]:
    """A server with so many workers, whose tokenizer has a gate."""
    renderer = standing_renderer(gate)
    engine = Speaker(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=10**7)
    async with (
        running(engine, renderer, pool=CpuPool(num_workers)) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        try:
            yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        finally:
            gate.open()


async def test_a_tokenizer_that_stands_in_a_worker_holds_up_nobody_else() -> None:
    gate = Gate()
    async with standing(gate) as live:
        slow, other = await live.open(), await live.open()
        with gate.closed():
            chat = asyncio.ensure_future(live.chat(slow, user(HELD + LONG)))
            await gate.reached(entered=1)
            assert (await live.call("GET", "/health")).status == 200
            assert (await live.call("GET", "/metrics")).status == 200
            assert (await live.call("POST", "/sessions")).status == 200
            assert (await live.chat(other, user(LONG))).status == 200
            assert (await live.chat(await live.open(), user("short"))).status == 200
            assert (await live.call("POST", "/tokenize", {"prompt": LONG})).status == 200
            assert (await live.call("GET", f"/sessions/{other}")).status == 200
            assert not chat.done()
        assert (await chat).status == 200


async def test_when_all_workers_stand_what_is_small_is_served_and_the_rest_waits() -> None:
    gate = Gate()
    async with standing(gate, num_workers=2) as live:
        with gate.closed():
            slow = [asyncio.ensure_future(live.chat(await live.open(), user(HELD + LONG))) for _ in range(2)]
            await gate.reached(entered=2)
            waiting = asyncio.ensure_future(live.chat(await live.open(), user(LONG)))
            assert (await live.call("GET", "/health")).status == 200
            assert (await live.chat(await live.open(), user("short"))).status == 200
            assert (await live.call("POST", "/tokenize", {"prompt": "short"})).status == 200
            assert not waiting.done()
        assert [(await chat).status for chat in (*slow, waiting)] == [200, 200, 200]


async def test_a_hang_up_in_the_middle_of_tokenization_leaves_the_session_as_it_was() -> None:
    gate = Gate()
    async with standing(gate) as live:
        session = await live.open()
        said = [user("a"), assistant((await live.chat(session, user("a"))).json()["choices"][0]["message"]["content"])]
        before = (await live.call("GET", f"/sessions/{session}")).json()
        with gate.closed():
            chat = asyncio.ensure_future(live.chat(session, *said, user(HELD + LONG)))
            await gate.reached(entered=1)
            (turn,) = live.manager.sessions.get(session).running
            chat.cancel()
            await asyncio.wait({turn.task})
            assert (await live.call("GET", f"/sessions/{session}")).json() == before
            # The worker stands yet, and the session goes on.
            assert (await live.chat(session, *said, user(LONG))).status == 200
            assert gate.left == 0
            after = (await live.call("GET", f"/sessions/{session}")).json()
        await gate.reached(left=1)
        assert (await live.call("GET", f"/sessions/{session}")).json() == after
        assert len(after["records"]) == 2
        assert after["records"][0] == before["records"][0]
        assert after["records"][1]["request"]["messages"][-1]["content"] == LONG
        assert len(live.engine.requests) == 2  # what was left was never generated
        assert live.manager.num_in_flight == 0


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("GET", "/drift", None),
        ("POST", "/samples", {"format": "json"}),
        ("POST", "/samples", {}),
    ],
)
async def test_a_session_whose_line_is_being_rendered_anew_holds_up_nobody(method: str, path: str, body: Any) -> None:
    gate = Gate()
    async with standing(gate) as live:
        session, other = await live.open(), await live.open()
        assert (await live.chat(session, user(HELD + LONG))).status == 200
        with gate.closed():
            look = asyncio.ensure_future(live.call(method, f"/sessions/{session}{path}", body))
            await gate.reached(entered=2)
            assert (await live.call("GET", "/health")).status == 200
            assert (await live.chat(other, user(LONG))).status == 200
            assert (await live.call("DELETE", f"/sessions/{session}")).status == 204
            assert not look.done()
        assert (await look).status == 200  # of the session as it was when it was asked for


class AsgiCall:
    """A request that is made to the application itself: what it sent, and in which pass of the loop."""

    def __init__(self, app: App, method: str, path: str, body: Any = None) -> None:
        self._app = app
        raw_path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": raw_path,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._body = b"" if body is None else json.dumps(body).encode()
        self._was_read = False
        self._passes = 0
        self.status = 0
        self.pieces: list[tuple[int, bytes]] = []

    async def run(self) -> "AsgiCall":
        self._counter = asyncio.get_running_loop().call_soon(self._count)
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._counter.cancel()
        return self

    def _count(self) -> None:
        self._passes += 1
        self._counter = asyncio.get_running_loop().call_soon(self._count)

    async def _receive(self) -> Any:
        if self._was_read:
            await asyncio.Event().wait()
        self._was_read = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.pieces.append((self._passes, bytes(message["body"])))

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


MOST_BYTES = 2**19
"""Of a piece. One that is copied may have more bytes than one that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Huge:
    """An app with a session of 300k tokens in three turns, each of which asked for `text`."""

    app: App
    session: str
    text: str

    def call(self, method: str, path: str, body: Any = None) -> AsgiCall:
        return AsgiCall(self.app, method, path, body)


@pytest.fixture
async def huge() -> AsyncIterator[Huge]:
    renderer = standing_renderer(Gate())
    engine = Speaker(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=10**7)
    pool = CpuPool(2)
    app, manager = make_app(
        Settings(),
        engine=engine,
        renderer=renderer,
        pool=pool,
        model="tiny",
        clock=SystemClock(),
        moe_shape=(2, 2),
        parts=PARTS,
    )
    session = manager.sessions.create(SessionOptions(history=HistoryKind.TREE))
    filled = Huge(app=app, session=session.id, text="the user asks 12 things\n" * 10_000)
    said: list[Any] = []
    for _ in range(3):
        said.append(user(filled.text))
        chat = filled.call("POST", f"/sessions/{session.id}/v1/chat/completions", {"messages": said})
        said.append(assistant(json.loads((await chat.run()).body)["choices"][0]["message"]["content"]))
    assert session.strands.num_tokens > 300_000
    yield filled
    pool.close()


async def check_pieces(call: AsgiCall, *, at_least: int) -> None:
    """Run it, and see that its pieces are short, and each was made in another pass of the loop."""
    await call.run()
    assert call.status == 200
    passes = [number for number, _ in call.pieces]
    assert len(passes) >= at_least
    assert len(passes) == len(set(passes)), "two pieces were made in one pass"
    assert max(len(piece) for _, piece in call.pieces) < MOST_BYTES


@pytest.mark.parametrize(
    ("method", "path", "body", "at_least"),
    [
        ("GET", "", None, 40),
        ("GET", "?records=delta", None, 40),
        ("POST", "/samples", {"format": "json"}, 80),
        ("POST", "/samples", {"format": "json", "token_texts": True}, 120),
        ("POST", "/samples", {"format": "safetensors"}, 15),
        ("POST", "/samples", {"format": "arrow"}, 15),
    ],
)
async def test_a_huge_session_is_written_in_pieces_between_which_the_loop_goes_on(
    huge: Huge, method: str, path: str, body: Any, at_least: int
) -> None:
    await check_pieces(huge.call(method, f"/sessions/{huge.session}{path}", body), at_least=at_least)


async def test_health_is_answered_between_the_pieces_of_a_huge_answer(
    huge: Huge,
) -> None:
    large = huge.call("POST", f"/sessions/{huge.session}/samples", {"format": "json"})
    running_call = asyncio.ensure_future(large.run())
    num_between = 0
    while not running_call.done():
        num_before = len(large.pieces)
        assert (await huge.call("GET", "/health").run()).status == 200
        await asyncio.sleep(0)  # the answer itself takes no pass of the loop
        num_between += 0 < num_before < len(large.pieces)
    await running_call
    assert num_between >= 5
    assert json.loads(large.body)["samples"]


async def test_what_tokenize_and_detokenize_answer_to_a_long_text_comes_in_pieces(
    huge: Huge,
) -> None:
    tokens = huge.call("POST", "/tokenize", {"prompt": huge.text * 2})
    await check_pieces(tokens, at_least=10)
    ids = json.loads(tokens.body)["tokens"]
    back = huge.call("POST", "/detokenize", {"tokens": ids})
    await check_pieces(back, at_least=5)
    assert json.loads(back.body) == {"prompt": huge.text * 2}


@pytest.mark.parametrize("route", ["chat", "completion", "completions"])
async def test_the_prompts_ids_in_a_stream_come_in_pieces_between_which_the_loop_goes_on(
    huge: Huge, route: str
) -> None:
    asked: dict[str, Any] = {"stream": True, "return_token_ids": True}
    ids = [10 + number % 200 for number in range(8000)]
    match route:
        case "chat":
            call = huge.call("POST", "/v1/chat/completions", {"messages": [user(huge.text * 3)], **asked})
        case "completion":
            call = huge.call("POST", "/v1/completions", {"prompt": ids * 20, **asked})
        case _:  # each of them is written at once
            call = huge.call("POST", "/v1/completions", {"prompt": [ids] * 20, **asked})
    await call.run()
    assert call.status == 200
    passes = [number for number, piece in call.pieces if len(piece) > 4000]
    assert len(passes) >= 10
    assert len(passes) == len(set(passes)), "two pieces were made in one pass"
    assert max(len(piece) for _, piece in call.pieces) < MOST_BYTES // 4
    events = [json.loads(line[6:]) for line in call.body.decode().split("\n\n")[:-2]]
    if route == "chat":
        assert len(events[0]["prompt_token_ids"]) > 80_000
    else:
        told = [choice.get("prompt_token_ids", []) for event in events for choice in event["choices"]]
        assert [id_ for some in told for id_ in some] == ids * 20
    assert call.body.endswith(b"data: [DONE]\n\n")


async def test_a_long_list_of_sessions_comes_in_pieces(huge: Huge) -> None:
    for _ in range(300):
        await huge.call("POST", "/sessions", {"metadata": {"note": "x" * 2000}}).run()
    listed = huge.call("GET", "/sessions?limit=1000")
    await check_pieces(listed, at_least=10)
    assert len(json.loads(listed.body)["sessions"]) >= 300


async def test_many_huge_answers_at_once_make_one_piece_in_a_pass_together(
    huge: Huge,
) -> None:
    calls = [huge.call("GET", f"/sessions/{huge.session}?records=delta") for _ in range(8)]
    made_in: list[int] = []
    passes = 0

    def count() -> None:
        nonlocal passes, counter
        passes += 1
        counter = asyncio.get_running_loop().call_soon(count)

    counter = asyncio.get_running_loop().call_soon(count)
    for one in calls:
        one.pieces = _Noting(lambda: made_in.append(passes))
    await asyncio.gather(*(one.run() for one in calls))
    counter.cancel()
    assert len({one.body for one in calls}) == 1
    assert len(made_in) > 8 * 40
    # What is made before the answer begins is made at once: three pieces each.
    assert len(made_in) - len(set(made_in)) <= 8 * 3


async def test_the_ids_of_many_long_prompts_are_written_a_piece_in_a_pass_together() -> None:
    renderer, pool, share = standing_renderer(Gate()), CpuPool(1), LoopShare()
    ids = token_ids([5]) * (6 * PIECE_IDS)
    capabilities = Capabilities(
        engine="any",
        model="tiny",
        vocab_size=320,
        max_context_tokens=None,
        grammars=frozenset(),
        streams=True,
        takes_json=True,
    )
    services = TurnServices(
        engine=ScriptedEngine(vocab_size=320),
        renderer=renderer,
        pool=pool,
        clock=SystemClock(),
        timeout_s=None,
        share=share,
    )
    opened: list[PromptBuilder] = []
    for _ in range(5):
        opened += completions(
            CompletionRequest(prompts=(ids,)), leases=Leases(None), services=services, capabilities=capabilities
        )
    attached = [await one.position() for one in opened]
    passes = 0

    def count() -> None:
        nonlocal passes, counter
        passes += 1
        counter = asyncio.get_running_loop().call_soon(count)

    counter = asyncio.get_running_loop().call_soon(count)
    prompts = await asyncio.gather(*(one.render(at) for one, at in zip(opened, attached, strict=True)))
    counter.cancel()
    pool.close()
    assert {b"".join(prompt_json(prompt)) for prompt in prompts} == {encode_ids(ids)}
    assert passes >= 5 * 6


class _Noting(list[tuple[int, bytes]]):
    """A list that tells when something is added."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def append(self, item: tuple[int, bytes]) -> None:
        self._note()
        super().append(item)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).flatmap(
    lambda text: st.integers(1, 120).map(lambda times: text * times)
)


@given(st.lists(st.tuples(TEXTS, st.integers(0, 200)), min_size=1, max_size=24))
@settings(max_examples=30)
def test_cut_and_whole_encodings_on_all_workers_give_the_ids_that_one_thread_gives(
    renderer: Renderer, asked: list[tuple[str, int]]
) -> None:
    tokenizer = renderer.tokenizer
    expected = [_last(tokenizer.encode(text), num_last) for text, num_last in asked]

    async def on_workers() -> list[list[int]]:
        pool = CpuPool(8)
        try:
            work = [lambda text=text, num=num: _last(tokenizer.encode(text), num) for text, num in asked]  # type: ignore[misc]
            return await asyncio.gather(*(pool.run(one, num_bytes=INLINE_BELOW_BYTES) for one in work * 2))
        finally:
            pool.close()

    assert asyncio.run(on_workers()) == expected * 2


def _last(ids: "array[int]", num: int) -> list[int]:
    """Cut as prompts are cut: the ids, of which the last `num` are taken; 0 is all."""
    return ids[-num:].tolist()


async def test_requests_of_all_kinds_at_once_get_the_ids_that_each_gets_alone() -> None:
    texts = [f"{'the user asks ' * (120 * (number % 5) + 1)}naïve ☃ {number}" * 4 for number in range(20)]

    async with standing(Gate(), num_workers=8) as live:
        tokenizer = live.renderer.tokenizer
        alone = [tokenizer.encode(text).tolist() for text in texts]

        async def tokens(number: int) -> None:
            answer = await live.call("POST", "/tokenize", {"prompt": texts[number]})
            assert answer.json()["tokens"] == alone[number]

        async def chat(number: int) -> None:
            answer = await live.chat(None, user(texts[number]), return_token_ids=True)
            message = Message(role=Role.USER, content=texts[number])
            assert answer.json()["prompt_token_ids"] == live.renderer.render([message], (), {}).tolist()

        async def completion(number: int, **cut: Any) -> list[int]:
            asked = {"prompt": texts[number], "max_tokens": 4, "return_token_ids": True, **cut}
            answer = await live.call("POST", "/v1/completions", asked)
            assert answer.status == 200, answer.body
            ids: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
            return ids

        async def completions(number: int) -> None:
            assert await completion(number, truncate_prompt_tokens=number + 1) == alone[number][-number - 1 :]
            assert await completion(number) == alone[number]
            right = await completion(number, truncate_prompt_tokens=number + 1, truncation_side="right")
            assert right == alone[number][: number + 1]

        async with asyncio.TaskGroup() as tasks:
            for number in range(len(texts)):
                for kind in (tokens, completions, chat, completions):
                    tasks.create_task(kind(number))


async def test_a_body_without_messages_has_at_most_a_mebibyte(huge: Huge) -> None:
    metadata = {"metadata": {"a": [1] * 2**19}}
    for path in ("/sessions", f"/sessions/{huge.session}/samples", f"/sessions/{huge.session}/abort", "/abort_request"):
        answer = await huge.call("POST", path, metadata).run()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (413, "body_too_large")
    large = await huge.call("POST", "/sessions", {"metadata": {"a": [1] * 2**17}}).run()
    assert (large.status, json.loads(large.body)["error"]["param"]) == (400, "/metadata")
