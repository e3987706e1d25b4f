"""Forks of forks at random places: what is said of each continuation is computed again from its sample alone.

The model is a real mixture of experts with random weights. Servers of four kinds have the sessions: one in memory, one
with files, two workers, one with PostgreSQL; but for the first they stop and start in between, and have room for a part
of the sessions.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from standins.planned_server import AskedRequest, ReplyScript
from standins.postgres_server import PostgresServer
from standins.shared_rows import MemoryRows, SharedTables
from standins.teacher_forcing import log_softmax
from standins.tiny.llama import LAYERS
from standins.tiny.mixture import TOP_K
from stenograph.client.samples import DecodedSample, decoded
from stenograph.cluster.postgres.schema import prepare
from stenograph.cluster.postgres.server import PostgresRows
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.core.clock import SystemClock
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files
from stenograph.store.files import open_files
from stenograph.store.folder import DataFolder
from stenograph.store.settings import Durability
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark

from .conftest import END, output_ids, running, user
from .test_durable import folder
from .test_images import effective_of, image, part, rig_of, samples, seeing, sees, text
from .test_routed_turns import wide
from .test_shared_store import TIMEOUT_S, new_database, postgres
from .test_vllm_sessions import Rig
from .workers_kit import places, serving

__all__ = ["folder", "postgres", "seeing"]  # fixtures

NUM_FORKS = int(os.environ.get("RANDOM_FORKS", "60"))
"""In all worlds; more by hand: RANDOM_FORKS=10000."""
MARK = ModelMark(name="tiny", digest=b"tiny")
KV_TOKENS, MAX_SESSIONS, MAX_TURNS, NUM_CLIENTS = 1280, 12, 6, 4
NUM_FIRST = 4
"""First sessions; all but one ask for supports."""
NUM_KEPT = 6
"""Sessions of each first one that a server finds when it starts; the others are deleted, the forks of them are not."""
PARAMS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.8}, {"top_k": 6, "min_p": 0.02}, {"top_logprobs": 2})
TOLERANCE_NATS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A turn: its request, and what was sampled."""

    messages: Sequence[dict[str, Any]]
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    text: str
    is_whole: bool
    has_support: bool
    """Whether its session asked for supports, and its request rules ids out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A session, whose turns are one line: their ids are their places."""

    session: str
    first: int
    """The number of the first session before it."""
    turns: Sequence[Known] = ()


@dataclass(slots=True, kw_only=True)
class Told:
    """The sums of a world."""

    num_forks: int = 0
    num_tokens: int = 0
    num_inherited: int = 0
    num_supports: int = 0
    num_cached: int = 0
    largest: float = 0.0


@dataclass(slots=True, kw_only=True)
class Forks:
    """Clients of one world, and all that they know of its sessions."""

    chance: random.Random
    scorer: NumpyForward
    lines: list[Line] = field(default_factory=list[Line])
    told: Told = field(default_factory=Told)
    http: aiohttp.ClientSession = field(init=False)
    urls: Sequence[str] = ()

    async def call(self, method: str, path: str, body: Any = None) -> bytes:
        async with self.http.request(method, self.chance.choice(self.urls) + path, json=body) as response:
            answer = await response.read()
            assert response.status in (200, 204), answer
            return answer

    async def post(self, path: str, body: Any) -> Any:
        return await (await self.http.post(self.chance.choice(self.urls) + path, json=body)).json()

    async def view(self, session: str) -> Any:
        async with self.http.get(f"{self.chance.choice(self.urls)}/sessions/{session}") as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def begin(self) -> None:
        """The first sessions."""
        for number in range(NUM_FIRST):
            options = {"history": self.chance.choice(("strands", "linear", "tree")), "support": number > 0}
            session = (await self.post("/sessions", options))["session_id"]
            line = Line(session=session, first=number)
            for turn in range(3):
                line = await self.asked(line, [*told_by(line, 3), user(f"session {number} question {turn}")], kept=())
            self.lines.append(line)

    async def asked(self, line: Line, messages: list[dict[str, Any]], *, kept: Sequence[int]) -> Line:
        """Send a request, whose reply begins with these tokens."""
        chance = self.chance
        params = chance.choice(PARAMS)
        body = {
            "messages": messages, "seed": chance.randrange(2**31), "temperature": chance.choice((0.6, 1.0, 1.7)),
            "max_tokens": len(kept) + chance.randint(1, 12), "stream": chance.random() < 0.3, "logprobs": True,
            **params,
        }  # fmt: skip
        answer = await self.call("POST", f"/sessions/{line.session}/v1/chat/completions", body)
        assert b'"error"' not in answer, answer[-500:]  # a stream has its status before it fails
        found = await self.view(line.session)
        record = found["records"][-1]
        assert len(found["records"]) == len(line.turns) + 1
        ids, prompt_ids = output_ids(record), record["request"]["input_ids"]
        assert ids[: len(kept)] == list(kept)
        before = [] if not line.turns else [*line.turns[-1].prompt_ids, *line.turns[-1].ids]
        assert prompt_ids[: len(before)] == before
        choice = record["response"]["choices"][0]
        turn = Known(
            messages=messages,
            prompt_ids=prompt_ids,
            ids=ids,
            text=choice["message"]["content"] or "",
            is_whole=choice["finish_reason"] != "length",
            has_support=line.first > 0 and not params.keys().isdisjoint(("top_p", "top_k")),
        )
        self.told.num_cached += choice["meta_info"]["cached_tokens"]
        return replace(line, turns=(*line.turns, turn))

    async def fork(self) -> None:
        """A fork at a random place, its continuation, and what is said of it."""
        first = self.chance.randrange(NUM_FIRST)
        parent = self.chance.choice([line for line in self.lines if line.first == first])
        at = self.chance.randrange(len(parent.turns))
        turn = parent.turns[at]
        is_behind = self.chance.random() < 0.2 and at + 1 < MAX_TURNS
        token = None if is_behind else self.chance.randrange(len(turn.ids) + (not turn.is_whole))
        place = {"turn": at, "token": token, "n": self.chance.choice((1, 1, 2))}
        opened = await self.post(f"/sessions/{parent.session}/fork", place)
        before = parent.turns[: at + is_behind]
        for one in opened["forks"]:
            line = replace(parent, session=one["session_id"], turns=before)
            if token is None:
                asked, kept = [*told_by(line, at + 1), user(f"on {self.chance.random():.3f}")], ()
            else:
                asked, kept = list(turn.messages), turn.ids[:token]
            made = await self.asked(line, asked, kept=kept)
            assert token is None or list(made.turns[-1].prompt_ids) == list(turn.prompt_ids)
            await self.check(made, kept)
            if self.chance.random() < 0.3 and len(made.turns) < MAX_TURNS:
                asked = [*told_by(made, len(made.turns)), user("and then?")]
                made = await self.asked(made, asked, kept=())
            self.lines.append(made)
            self.told.num_forks += 1
            self.told.num_inherited += len(kept) + sum(len(turn.ids) for turn in before)

    async def check(self, line: Line, kept: Sequence[int]) -> None:
        """Compute the sample's numbers again: those of the tokens that this session sampled, and of no other."""
        payload = await self.call("POST", f"/sessions/{line.session}/samples", {"include_side": True})
        (sample,) = decoded(payload)
        last, first = line.turns[-1], sample.prompt_length
        assert sample.tokens.tolist() == [*last.prompt_ids, *last.ids]
        start = len(last.prompt_ids) + len(kept)
        trained = np.flatnonzero(sample.loss_mask) + first
        assert trained.tolist() == list(range(start, len(sample.tokens)))
        for number, row in enumerate(sample.turns[:-1]):
            assert row["inherited"] == len(line.turns[number].ids)
        assert [row.get("support") is not None for row in sample.turns] == [turn.has_support for turn in line.turns]
        apart = self.apart(sample, start)
        assert apart <= TOLERANCE_NATS, (line.session, apart)
        self.told.largest = max(self.told.largest, apart)
        self.told.num_tokens += len(trained)

    def apart(self, sample: DecodedSample, start: int) -> float:
        """How far the log-probabilities from `start` on are from those of the model under the sample's own routes."""
        ids, first, row = sample.tokens, sample.prompt_length, sample.turns[-1]
        assert sample.routed_experts is not None
        assert sample.raw_log_probs is not None
        routes = np.concatenate([sample.routed_experts, np.full((1, LAYERS, TOP_K), -1)]).astype(np.intc)
        spans = (RowSpan(0, len(ids)),)
        whole = Segment(ids=ids.astype(np.intc), start=0, spans=spans, logits_for=LogitsFor.ALL, routes=routes)
        logits = self.scorer.forward([whole])[start - 1 : -1].astype(np.float64)
        own, places = ids[start:], np.arange(len(ids) - start)
        tempered = np.stack([log_softmax(one / row["temperature"]) for one in logits])  # type: ignore[operator]
        raw = np.stack([log_softmax(one) for one in logits])[places, own]
        again = tempered[places, own]
        found = [np.abs(again - sample.log_probs[start - first :]), np.abs(raw - sample.raw_log_probs[start - first :])]
        support, sampling = sample.support(), sample.sampling_log_probs
        if support is not None and "support" in row:
            assert sampling is not None
            for place, number in enumerate(range(start - first, len(support))):
                open_ids = support[number]
                total = 0.0 if open_ids is None else np.logaddexp.reduce(tempered[place, open_ids])
                found.append(np.abs(again[place : place + 1] - total - sampling[number]))
                self.told.num_supports += open_ids is not None
        return max(float(one.max()) for one in found)

    async def era(self, num: int) -> None:
        """So many forks, by several clients."""
        left = iter(range(num))

        async def work() -> None:
            for _ in left:
                await self.fork()

        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(work())
        self.chance.shuffle(self.lines)
        kept = [line for first in range(NUM_FIRST) for line in [a for a in self.lines if a.first == first][:NUM_KEPT]]
        for line in [line for line in self.lines if line not in kept]:
            await self.call("DELETE", f"/sessions/{line.session}")
        self.lines = kept


def told_by(line: Line, num: int) -> list[dict[str, Any]]:
    """The conversation down to the end of its first turns."""
    if not line.turns:
        return []
    last = line.turns[:num][-1]
    return [*last.messages, {"role": "assistant", "content": last.text}]


Started = Callable[[], AbstractAsyncContextManager[Sequence[str]]]
"""Starts a world's server, or starts it again; its addresses."""
SETTINGS: dict[str, Any] = {"max_sessions": MAX_SESSIONS}


@asynccontextmanager
async def in_memory(engine: EmbeddedEngine, renderer: Renderer) -> AsyncIterator[Sequence[str]]:
    async with running(engine, renderer, moe_shape=(LAYERS, TOP_K)) as (url, _):
        yield [url]


@asynccontextmanager
async def with_files(engine: EmbeddedEngine, renderer: Renderer, folder: Path) -> AsyncIterator[Sequence[str]]:
    with closing(DataFolder(folder, address="")) as held:
        store = await open_files(held, [0], durability=Durability.COMMIT, on_failed=print)
        async with (
            aclosing(store),
            running(engine, renderer, moe_shape=(LAYERS, TOP_K), store=store, mark=MARK, **SETTINGS) as (url, _),
        ):
            yield [url]


@asynccontextmanager
async def two_workers(engine: EmbeddedEngine, renderer: Renderer, folder: Path) -> AsyncIterator[Sequence[str]]:
    shape = (LAYERS, TOP_K)
    async with AsyncExitStack() as stack:
        data = stack.enter_context(closing(DataFolder(folder, address="")))
        urls: list[str] = []
        for place in places(folder, 2):
            stack.callback(place.listener.close)
            worker = serving(place, engine, renderer, folder=data, data_dir=folder, moe_shape=shape, **SETTINGS)
            url, _, server = await stack.enter_async_context(worker)
            urls.append(url)
            stack.callback(setattr, server, "should_exit", True)
        yield urls


@asynccontextmanager
async def with_database(engine: EmbeddedEngine, renderer: Renderer, rows: Callable[[], Any]) -> AsyncIterator[Any]:
    store = await PostgresStore.open(rows(), SystemClock(), url="http://a", lease_s=3600.0)
    async with (
        aclosing(store),
        running(engine, renderer, moe_shape=(LAYERS, TOP_K), store=store, mark=MARK, **SETTINGS) as (url, _),
    ):
        yield [url]


WORLDS = ("memory", "files", "workers", "database")


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Ways to a database: PostgreSQL's, where it is installed."""
    try:
        server: PostgresServer = request.getfixturevalue("postgres")
    except pytest.skip.Exception:
        tables = SharedTables(time.monotonic)
        return lambda: MemoryRows(tables)
    url = await new_database(server)
    await prepare(url, timeout_s=TIMEOUT_S)
    return lambda: PostgresRows(url, timeout_s=TIMEOUT_S)


@pytest.mark.timeout(60 + NUM_FORKS)
@pytest.mark.parametrize("world", WORLDS)
async def test_random_forks_continue_as_their_samples_say(
    tmp_path: Path, database: Callable[[], Any], world: str
) -> None:
    model, data = wide(tmp_path / "mixture", 0), tmp_path / "data"
    engine = EmbeddedEngine(model, EmbeddedOptions(max_batch=8, kv_tokens=KV_TOKENS, reports_routes=True))
    await engine.start()
    renderer = make_renderer(load_model_files(model), "auto")
    starts: dict[str, Started] = {
        "memory": partial(in_memory, engine, renderer),
        "files": partial(with_files, engine, renderer, data),
        "workers": partial(two_workers, engine, renderer, data),
        "database": partial(with_database, engine, renderer, database),
    }
    num = NUM_FORKS // len(WORLDS)
    num_eras = 1 if world == "memory" else max(3, num // 50)
    scorer = NumpyForward(*load_weights(model), num_kv_tokens=2048)
    forks = Forks(chance=random.Random(world), scorer=scorer)
    try:
        for number in range(num_eras):
            async with starts[world]() as forks.urls, aiohttp.ClientSession() as forks.http:
                if not number:
                    await forks.begin()
                await forks.era(num * (number + 1) // num_eras - num * number // num_eras)
    finally:
        await engine.aclose()
    told = forks.told
    sys.stdout.write(f"\n{world}: {told}\n")
    assert told.num_forks >= num
    assert min(told.num_tokens, told.num_cached) > num
    assert told.num_supports


async def test_random_forks_with_images_have_their_effective_ids_and_their_bytes(
    seeing: Renderer, folder: DataFolder
) -> None:
    """Over restarts, out of a store, with the sessions before them deleted."""
    chance = random.Random(7)

    def answers(_: AskedRequest) -> ReplyScript:
        return ReplyScript(ids=(*chance.choices(range(97, 123), k=chance.randint(1, 9)), END))

    lines: list[Seen] = []
    for era in range(3):
        store = await SqliteStore.open(folder)
        async with aclosing(store), rig_of(seeing, store=store, settings=SETTINGS, answers=answers) as rig:
            if not era:
                lines = [await seen(rig, Seen(session=await rig.session()), [sees(part(1), part(2))], kept=())]
            for _ in range(max(10, NUM_FORKS // 30)):
                lines.append(await fork_seen(rig, chance, chance.choice(lines)))
            chance.shuffle(lines)
            for line in lines[12:]:
                await rig.call("DELETE", f"/sessions/{line.session}")
            del lines[12:]
    assert max(len(line.turns) for line in lines) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A session with images, by its turns: messages, the prompt's effective ids, and what was sampled."""

    session: str
    turns: Sequence[tuple[Sequence[Any], Sequence[int], Sequence[int]]] = ()


async def fork_seen(rig: Rig, chance: random.Random, line: Seen) -> Seen:
    """A fork at a random place, and its continuation: the cut reply's rest, or one more image."""
    at = chance.randrange(len(line.turns))
    messages, prompt_ids, ids = line.turns[at]
    is_behind = chance.random() < 0.4 and at < 4
    token = None if is_behind else chance.randrange(len(ids))
    answer = await rig.call("POST", f"/sessions/{line.session}/fork", {"turn": at, "token": token})
    assert answer.status == 200, answer.body
    fork = Seen(session=answer.json()["forks"][0]["session_id"], turns=line.turns[: at + is_behind])
    if token is None:
        said = {"role": "assistant", "content": seeing_text(rig, ids)}
        return await seen(rig, fork, [*messages, said, sees(text("and "), part(chance.randrange(3, 40)))], kept=())
    made = await seen(rig, fork, list(messages), kept=ids[:token])
    assert made.turns[-1][1] == prompt_ids
    return made


def seeing_text(rig: Rig, ids: Sequence[int]) -> str:
    return rig.renderer.tokenizer.decode([id_ for id_ in ids if id_ != END])


async def seen(rig: Rig, line: Seen, messages: list[Any], *, kept: Sequence[int]) -> Seen:
    """Ask, and hold sample and images to what the engine got."""
    answer = await rig.chat(line.session, *messages)
    assert answer.status == 200, answer.body
    asked = rig.vllm.requests[-1].json
    (sample,) = await samples(rig, line.session)
    order = [next(number for number in range(1, 40) if part(number) == one) for one in parts_of(messages)]
    prompt_ids = effective_of(rig, asked["token_ids"], order)
    ids = sample["tokens"][len(prompt_ids) - len(kept) :]
    assert sample["tokens"][: len(prompt_ids)] == prompt_ids
    assert list(kept) == prompt_ids[len(prompt_ids) - len(kept) :]
    assert [one["sha256"] for one in sample["media"]] == [one["uuid"] for one in asked["content_parts"]]
    assert sum(sample["loss_mask"]) == len(ids) - len(kept)
    for number, media in zip(order, sample["media"], strict=True):
        assert (await rig.call("GET", f"/sessions/{line.session}/media/{media['sha256']}")).body == image(number)
    turn = (messages, prompt_ids[: len(prompt_ids) - len(kept)], ids)
    return Seen(session=line.session, turns=(*line.turns, turn))


def parts_of(messages: Sequence[Any]) -> list[Any]:
    return [
        one for message in messages if message["role"] == "user" for one in message["content"] if "image_url" in one
    ]
