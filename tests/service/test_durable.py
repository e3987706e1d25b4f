"""Sessions that survive: a server ends, another begins on the same store, and nothing else has changed."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from standins.clock import ManualClock
from stenograph.core.errors import StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.database import FileConnection
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.trajectory.commits import ModelMark

from .conftest import Answer, Live, assistant, user
from .memory_store import MemoryStore

pytestmark = pytest.mark.timeout(600)

Serve = Callable[..., AbstractAsyncContextManager[Live]]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    folder = DataFolder(tmp_path / "data", address="")
    yield folder
    folder.close()


@pytest.fixture
def kept(serve: Serve, folder: DataFolder) -> Serve:
    """A server on the folder; begun again, it is another process as far as sessions are concerned."""

    @asynccontextmanager
    async def started(**options: Any) -> AsyncIterator[Live]:
        store = await SqliteStore.open(folder, connect=options.pop("connect", FileConnection))
        try:
            async with serve(store=store, **options) as live:
                yield live
        finally:
            await store.aclose()

    return started


async def records_of(live: Live, session: str) -> Any:
    return (await live.call("GET", f"/sessions/{session}")).json()


async def shown(live: Live, session: str) -> dict[str, Any]:
    """Everything that a client can see of a session, but for what is said when its rows are written already."""
    found: dict[str, Any] = {}
    for strand in (None, 0, 1, 2):
        answer = await live.call("GET", f"/sessions/{session}" + ("" if strand is None else f"?strand={strand}"))
        if answer.status == 200:
            found[f"records {strand}"] = answer.json()
    samples = await live.call("POST", f"/sessions/{session}/samples", {"include_side": True})
    found["samples"] = samples.body
    found["drift"] = (await live.call("GET", f"/sessions/{session}/drift")).json()
    found["list"] = (await live.call("GET", "/sessions")).json()
    return found


async def conversation(live: Live, session: str, *, turns: Sequence[str], first: str = "hello") -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(turns):
        live.says(text)
        messages.append(user(first if number == 0 else f"question {number}"))
        answer = await live.chat(session, *messages, seed=number)
        assert answer.status == 200, answer.body
        messages.append(assistant(text))
    return messages


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
async def test_after_a_restart_records_samples_and_drift_are_the_same_and_the_session_goes_on(
    kept: Serve, history: str
) -> None:
    async with kept() as live:
        session = await live.open(
            history=history,
            metadata={"task": 17, "nested": {"a": [1, 2.5, None]}},
            max_turns=10,
            sampling={"default": {"temperature": 0.5}, "force": {"top_k": 40}},
        )
        messages = await conversation(live, session, turns=["one", "two"])
        live.says("two again")
        assert (await live.chat(session, *messages[:-1], seed=9)).status == 200  # replaces a turn, or branches
        messages[-1] = assistant("two again")
        if history == "strands":
            live.says("of another opening")
            other = await live.chat(session, user("summarize"), tools=[TOOL], tool_choice="none")
            assert other.status == 200
        before = await shown(live, session)
    async with kept() as live:
        assert await shown(live, session) == before
        live.says("three")
        answer = await live.chat(session, *messages, user("and on"))
        assert answer.status == 200
        records = (await live.call("GET", f"/sessions/{session}")).json()["records"]
        before_ids = before["records None"]["metadata"]["accumulated_token_ids"]
        if history != "strands":
            assert records[-1]["request"]["input_ids"][: len(before_ids)] == before_ids
        assert records[-1]["request"]["parameters"]["sampling_params"]["top_k"] == 40
        after = await shown(live, session)
    async with kept() as live:
        assert await shown(live, session) == after


async def test_what_a_client_asks_again_after_a_restart_is_written_anew_and_made_once(kept: Serve) -> None:
    body = {"messages": [user("hello")], "seed": 3}
    async with kept() as live:
        session, keyed = await live.open(), await live.open()
        live.says("one")
        first = await live.call("POST", f"/sessions/{session}/v1/chat/completions", body)
        live.says("one")
        by_key = await live.call("POST", f"/sessions/{keyed}/v1/chat/completions", body, idempotency_key="k")
    async with kept() as live:  # whether the replies were delivered, nobody knows any more
        again = await live.call("POST", f"/sessions/{session}/v1/chat/completions", body, x_stainless_retry_count="1")
        assert again.json() == first.json()
        streamed = await live.call("POST", f"/sessions/{keyed}/v1/chat/completions", body, idempotency_key="k")
        assert streamed.json() == by_key.json()
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        assert again.headers["x-stenograph-remaining-tokens"] == first.headers["x-stenograph-remaining-tokens"]
        other = {**body, "seed": 4}
        mismatch = await live.call("POST", f"/sessions/{keyed}/v1/chat/completions", other, idempotency_key="k")
        assert (mismatch.status, mismatch.json()["error"]["code"]) == (422, "idempotency_mismatch")
        assert live.engine.requests == []
        for id_ in (session, keyed):
            assert len((await live.call("GET", f"/sessions/{id_}")).json()["records"]) == 1
        live.says("another")  # no retry: an agent that wants another reply
        assert (await live.call("POST", f"/sessions/{session}/v1/chat/completions", body)).status == 200
        assert len(live.engine.requests) == 1


async def test_concurrent_siblings_of_a_tree_are_each_answered_again_after_a_restart(kept: Serve) -> None:
    bodies = [{"messages": [user("hello")], "seed": number} for number in range(6)]

    def all_of(live: Live, session: str) -> "asyncio.Future[list[Answer]]":
        path = f"/sessions/{session}/v1/chat/completions"
        return asyncio.gather(
            *(live.call("POST", path, body, idempotency_key=f"k{n}") for n, body in enumerate(bodies))
        )

    async with kept() as live:
        session = await live.open(history="tree")
        for _ in bodies:
            script = live.says("reply", paused=True)
        asked = all_of(live, session)
        await live.engine.begun(len(bodies))
        live.engine.step((len(script.ids) + 1) * len(bodies))
        before = [answer.json() for answer in await asked]
        assert len({reply["id"] for reply in before}) == 6
        told = await shown(live, session)
    async with kept() as live:
        assert [answer.json() for answer in await all_of(live, session)] == before
        assert await shown(live, session) == told


async def test_a_completion_with_several_prompts_is_one_row_and_answered_again_whole(
    kept: Serve, folder: DataFolder
) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 8}
    async with kept() as live:
        session = await live.open()
        live.says("a")
        live.says("b")
        path = f"/sessions/{session}/v1/completions"
        first = await live.call("POST", path, body, idempotency_key="k")
        assert first.status == 200
        before = await shown(live, session)
    raw = sqlite3.connect(folder.file())
    assert raw.execute("SELECT count(*) FROM rows").fetchone() == (1,)
    raw.close()
    async with kept() as live:
        assert await shown(live, session) == before
        assert (await live.call("POST", path, body, idempotency_key="k")).json() == first.json()


async def test_the_ledger_keeps_the_requests_that_made_turns_by_their_numbers(kept: Serve) -> None:
    async with kept() as live:
        session = await live.open()
        await conversation(live, session, turns=["one"])
        refused = await live.call("POST", f"/sessions/{session}/v1/chat/completions", b"no json")
        assert refused.status == 400
        await conversation(live, session, turns=["another"], first="of its own")
        before = (await live.call("GET", f"/sessions/{session}/ledger")).json()
    async with kept() as live:
        after = (await live.call("GET", f"/sessions/{session}/ledger")).json()
        assert after["num_requests"] == before["num_requests"] == 3
        made = [row for row in before["requests"] if row["turn"] is not None]
        for row in [*made, *after["requests"]]:
            row.pop("ended")
        assert after["requests"] == made


async def test_a_session_with_another_model_is_read_but_takes_no_turn(kept: Serve) -> None:
    async with kept(mark=ModelMark(name="tiny", digest=b"one")) as live:
        session = await live.open()
        messages = await conversation(live, session, turns=["one"])
        before = await shown(live, session)
    async with kept(mark=ModelMark(name="other", digest=b"two")) as live:
        assert await shown(live, session) == before
        answer = await live.chat(session, *messages, user("more"))
        assert (answer.status, answer.json()["error"]["code"]) == (409, "model_mismatch")
        assert "'tiny'" in answer.json()["error"]["message"]
        assert live.engine.requests == []
        new = await live.open()
        await conversation(live, new, turns=["fine"])


async def test_a_damaged_session_is_500_and_no_other_is(kept: Serve, folder: DataFolder) -> None:
    async with kept() as live:
        damaged, whole = await live.open(), await live.open()
        for session in (damaged, whole):
            messages = await conversation(live, session, turns=["one", "two"])
    raw = sqlite3.connect(folder.file(), isolation_level=None)
    raw.execute("UPDATE rows SET body = CAST(replace(body, 'hello', 'hullo') AS BLOB) WHERE session = 1")
    raw.close()
    async with kept() as live:
        for answer in (
            await live.chat(damaged, *messages, user("more")),
            await live.call("GET", f"/sessions/{damaged}"),
            await live.call("POST", f"/sessions/{damaged}/samples", {}),
        ):
            assert (answer.status, answer.json()["error"]["code"]) == (500, "session_damaged")
            assert "in row 1" in answer.json()["error"]["message"]
        live.says("three")
        assert (await live.chat(whole, *messages, user("more"))).status == 200
        assert (await live.call("DELETE", f"/sessions/{damaged}")).status == 204
        assert (await live.call("GET", f"/sessions/{damaged}")).status == 404
        metrics = (await live.call("GET", "/metrics")).body.decode()
        assert "stenograph_store_sessions_damaged_total 3.0" in metrics


async def test_a_deleted_session_is_gone_from_the_disk_before_that_is_said(kept: Serve) -> None:
    async with kept() as live:
        live_one, asleep = await live.open(), await live.open()
        await conversation(live, live_one, turns=["one"])
        assert (await live.call("DELETE", f"/sessions/{live_one}")).status == 204
        assert (await live.call("GET", f"/sessions/{live_one}")).status == 404
    async with kept() as live:
        assert (await live.call("GET", f"/sessions/{live_one}")).status == 404
        assert (await live.call("DELETE", f"/sessions/{asleep}")).status == 204
        assert (await live.call("DELETE", f"/sessions/{asleep}")).status == 404
        assert (await live.call("GET", "/sessions")).json()["sessions"] == []


async def test_a_session_that_was_idle_for_too_long_is_gone_and_its_rows_are(kept: Serve) -> None:
    clock = ManualClock()
    async with kept(clock=clock) as live:
        short, touched, long = await live.open(ttl_s=100), await live.open(ttl_s=100), await live.open()
        for session in (short, touched, long):
            await conversation(live, session, turns=["one"])
    clock.advance(99)
    async with kept(clock=clock) as live:
        assert (await live.call("GET", f"/sessions/{short}")).status == 200
        clock.advance(1)
        assert (await live.call("GET", f"/sessions/{touched}")).status == 404
        await live.manager.sessions.expire_kept()
        listed = (await live.call("GET", "/sessions")).json()["sessions"]
        assert [one["session_id"] for one in listed] == [long]


async def test_sessions_leave_memory_beyond_max_held_tokens_and_come_back_when_touched(kept: Serve) -> None:
    async with kept(max_held_tokens=300, max_sessions=5) as live:
        sessions = [await live.open(metadata={"n": n}) for n in range(12)]
        told: dict[str, Any] = {}
        for session in sessions:
            await conversation(live, session, turns=["one", "two"], first="hello there, this is a longer question")
            told[session] = await records_of(live, session)
        assert live.manager.sessions.num_sessions <= 5
        assert live.manager.sessions.num_held_tokens < 600
        asleep = [session for session in sessions if not live.manager.sessions.has(session)]
        assert len(asleep) >= 7
        listed = (await live.call("GET", "/sessions?limit=7")).json()
        rest = (await live.call("GET", f"/sessions?after={listed['next']}")).json()
        every = [*listed["sessions"], *rest["sessions"]]
        assert [one["session_id"] for one in every] == sessions
        assert {one["num_turns"] for one in every} == {2}
        for session in asleep:  # to look at one wakes it not
            assert await records_of(live, session) == told[session]
            assert (await live.call("POST", f"/sessions/{session}/samples", {})).status == 200
            assert (await live.call("GET", f"/sessions/{session}/drift")).status == 200
            assert not live.manager.sessions.has(session)
        messages = told[asleep[0]]["records"][-1]["request"]["messages"]
        live.says("three")
        answer = await live.chat(asleep[0], *messages, assistant("two"), user("more"))
        assert answer.status == 200
        assert live.manager.sessions.has(asleep[0])
        assert len((await live.call("GET", f"/sessions/{asleep[0]}")).json()["records"]) == 3
        live.says("of its own")
        bearer = await live.call(
            "POST",
            "/v1/chat/completions",
            {"messages": [user("another opening")]},
            authorization=f"Bearer {asleep[1]}",
        )
        assert bearer.status == 200
        assert len((await live.call("GET", f"/sessions/{asleep[1]}")).json()["metadata"]["strands"]) == 2


async def test_a_session_that_a_request_names_is_not_evicted_while_that_is_read(kept: Serve) -> None:
    async with kept(max_held_tokens=10) as live:
        session = await live.open()
        script = live.says("paused", paused=True)
        running = asyncio.ensure_future(live.chat(session, user("hello")))
        await live.engine.begun(1)
        others = [await live.open() for _ in range(3)]
        for other in others:
            live.says("x")
            await live.chat(other, user("more than ten tokens are in this"))
        assert live.manager.sessions.has(session)
        live.engine.step(len(script.ids) + 1)
        assert (await running).status == 200


class Failing(FileConnection):
    """A connection whose inserts of turns fail with a code while a test wants it."""

    made: "Failing"
    code: int | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        Failing.made = self

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        if self.code is not None and sql.startswith("INSERT INTO rows"):
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = self.code
            raise error
        return super().run(sql, parameters)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_disk_is_503_for_the_turn_its_session_is_as_it_was_and_goes_on(kept: Serve, stream: bool) -> None:
    async with kept(connect=Failing) as live:
        session = await live.open()
        messages = await conversation(live, session, turns=["one"])
        before = await shown(live, session)
        Failing.made.code = sqlite3.SQLITE_FULL
        live.says("lost")
        answer = await live.chat(session, *messages, user("more"), stream=stream)
        if stream:
            events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
            assert events[-1]["error"]["code"] == "storage_unavailable"
            assert b"[DONE]" not in answer.body
        else:
            assert (answer.status, answer.json()["error"]["code"]) == (503, "storage_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        assert await shown(live, session) == before
        assert (await live.call("GET", "/ready")).status == 200
        assert (await live.call("GET", "/sessions")).status == 200  # read behind all that was to be written
        Failing.made.code = None
        live.says("two")
        assert (await live.chat(session, *messages, user("more"))).status == 200
        metrics = (await live.call("GET", "/metrics")).body.decode()
        # The turn, and the account's entry of its lost tokens.
        assert 'stenograph_store_failures_total{reason="full"} 2.0' in metrics
        assert 'stenograph_turn_failures_total{code="storage_unavailable"} 1.0' in metrics
        after = await shown(live, session)
    async with kept() as live:
        assert await shown(live, session) == after


async def test_after_a_store_failed_for_good_no_turn_is_acknowledged_and_the_server_is_not_ready(kept: Serve) -> None:
    async with kept(connect=Failing) as live:
        session, other = await live.open(), await live.open()
        messages = await conversation(live, session, turns=["one"])
        before = await shown(live, session)
        Failing.made.code = sqlite3.SQLITE_IOERR
        live.says("lost")
        assert (await live.chat(session, *messages, user("more"))).status == 503
        Failing.made.code = None
        live.says("lost, too")
        assert (await live.chat(other, user("hello"))).status == 503
        assert (await live.call("POST", "/sessions", {})).status == 503
        assert (await live.call("GET", "/ready")).status == 503
        assert (await live.call("GET", "/health")).status == 200
        metrics = (await live.call("GET", "/metrics")).body.decode()
        assert "stenograph_store_usable 0.0" in metrics
    async with kept() as live:
        assert await shown(live, session) == before


async def test_sessions_of_a_memory_store_are_woken_and_refused_alike(serve: Serve) -> None:
    store = MemoryStore()
    async with serve(store=store, max_held_tokens=10) as live:
        first, second = await live.open(), await live.open()
        messages = await conversation(live, first, turns=["one"])
        await conversation(live, second, turns=["one"])
        live.says("two")
        assert (await live.chat(first, *messages, user("more"))).status == 200
        store.refuse = StorageUnavailable("full", is_full=True)
        live.says("three")
        assert (await live.chat(second, user("other"))).status == 503
        assert (await live.call("POST", "/sessions", {})).status == 503
        store.refuse = None
        live.says("three")
        assert (await live.chat(second, user("other"))).status == 200


async def test_sessions_leave_memory_in_the_order_of_their_last_chats_and_no_more_than_are_in_the_way(
    kept: Serve,
) -> None:
    async with kept(max_sessions=4) as live:
        sessions = [await live.open() for _ in range(4)]
        for session in (*sessions, sessions[0]):
            live.says("one")
            assert (await live.chat(session, user("hello"), seed=1)).status == 200
        for number in range(1, 4):
            await live.open()
            in_memory = [live.manager.sessions.has(session) for session in sessions]
            assert in_memory == [True, *(index > number for index in range(1, 4))]
        live.says("two")
        assert (await live.chat(sessions[1], user("hello"), seed=2)).status == 200  # comes back, and the oldest goes
        assert [live.manager.sessions.has(session) for session in sessions] == [False, True, False, False]


async def test_a_session_that_another_process_took_is_not_evicted_again(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        session = await live.open()
        live.manager.let_go_of(SessionId(session), StorageUnavailable("moved", is_full=False, retry_after_s=1.0))
        for _ in range(2):
            other = await live.open()
            assert live.manager.sessions.has(SessionId(other))
