"""The client against a real server: sessions that are deleted however they end, errors by code, keys, addresses."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, get_args, get_type_hints

import anthropic
import numpy as np
import openai
import pytest
from google import genai

from stenograph import client as room
from stenograph.client import (
    Client,
    ServerUnreachable,
    SessionGone,
    SyncClient,
    SyncRolloutSession,
    TryLater,
    WrongKey,
    WrongRequest,
)
from stenograph.client.samples import SampleOptions
from stenograph.client.session import RolloutEnd, SessionFields
from stenograph.core.outcome import RolloutVerdict
from stenograph.dialects.sessions import CreateSession, SamplesRequest

from .conftest import Live, user

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Serve = Callable[..., AbstractAsyncContextManager[Live]]


async def sessions(live: Live, **headers: str) -> list[dict[str, Any]]:
    """The server's sessions."""
    listed: list[dict[str, Any]] = (await live.call("GET", "/sessions", **headers)).json()["sessions"]
    return listed


async def test_the_calls_of_a_rollout_give_its_samples_as_arrays_and_leave_no_session(live: Live) -> None:
    live.says("one")
    async with Client(live.url) as client:
        async with client.session(group="task-17", max_turns=8, metadata={"a": 1}) as session:
            assert (await live.chat(session.id, user("hi"))).status == 200
            assert list(await session.samples(max_seq_len=1)) == []
            await session.outcome({"tests": 0.5}, detail="well")
            made = await session.samples(max_seq_len=4096)
            plain = (await live.call("POST", f"/sessions/{session.id}/samples", {"format": "json"})).json()
            assert (await session.view())["session_id"] == session.id
            assert (await session.drift())["session_id"] == session.id
            assert [row["status"] for row in await session.ledger()] == [200]
            assert await session.abort() == 0
        assert await sessions(live) == []
        await session.delete()  # once more
    (sample,) = made
    (same,) = plain["samples"]
    assert sample.tokens.tolist() == same["tokens"]
    assert sample.tokens.dtype == np.int64
    assert sample.loss_mask.tolist() == same["loss_mask"]
    assert sample.log_probs.tolist() == same["rollout_log_probs"]
    assert (sample.status, sample.response, sample.outcome) == ("completed", same["response"], "ok")
    assert (sample.reward, sample.metadata["group"], sample.metadata["a"]) == ({"tests": 0.5}, "task-17", 1)
    assert list(sample.turns) == same["turns"]
    assert made.session_metadata == plain["session_metadata"]


async def test_samples_that_are_none_say_why(live: Live) -> None:
    async with Client(live.url) as client, client.session() as session:
        made = await session.samples()
    assert (len(made), made.empty_reason) == (0, "no_records")


@pytest.mark.parametrize("kind", ["error", "cancel"])
async def test_a_session_is_deleted_on_an_error_and_on_a_cancel(live: Live, kind: str) -> None:
    live.says("never", paused=True)
    async with Client(live.url) as client:

        async def rollout() -> None:
            async with client.session() as session, asyncio.TaskGroup() as tasks:
                tasks.create_task(live.chat(session.id, user("hi")))
                await live.engine.begun(1)
                if kind == "error":
                    raise ValueError("the agent broke")
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(0)

        with pytest.raises((ExceptionGroup, asyncio.CancelledError)):
            await asyncio.create_task(rollout())
        await live.engine.idle()
        assert await sessions(live) == []


async def test_a_session_that_was_being_opened_when_its_task_was_cancelled_is_deleted(live: Live) -> None:
    async with Client(live.url) as client:

        async def rollout() -> None:
            async with client.session():
                raise AssertionError("is cancelled before")

        for passes in range(40):
            task = asyncio.create_task(rollout())
            for _ in range(passes):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, AssertionError):
                await task
    assert await sessions(live) == []


async def test_an_error_has_the_class_of_its_code_and_says_what_to_do(live: Live, serve: Serve) -> None:
    async with Client(live.url, retry_s=0.1) as client:
        with pytest.raises(WrongRequest, match="invalid_request \\(/max_turns\\)") as wrong:
            async with client.session(max_turns=0):
                pass
        assert (wrong.value.code, wrong.value.status, wrong.value.param) == ("invalid_request", 400, "/max_turns")
        async with client.session() as session:
            await session.delete()
            with pytest.raises(SessionGone, match="Open a new session"):
                await session.outcome(1.0)
    async with serve(max_sessions=1) as small, Client(small.url, retry_s=0.1) as client, client.session():
        with pytest.raises(TryLater, match=r"limit_exceeded.*concurrency"):
            async with client.session():
                pass
    with pytest.raises(ValueError, match="is no address"):
        Client("127.0.0.1:8080")
    with pytest.raises(RuntimeError, match="async with"):
        async with Client(live.url).session():
            pass


async def test_a_server_that_does_not_answer_is_named(unused_tcp_port: int) -> None:
    async with Client(f"http://127.0.0.1:{unused_tcp_port}", retry_s=0.2) as client:
        with pytest.raises(ServerUnreachable, match=rf"{unused_tcp_port}.*does not answer: Connection refused$"):
            async with client.session():
                pass


@pytest.mark.parametrize("key", [None, "secret"])
async def test_unmodified_sdks_work_with_a_session_s_address_and_key(serve: Serve, key: str | None) -> None:
    async with serve(**({} if key is None else {"api_key": (key,)})) as live:
        if key is not None:
            async with Client(live.url) as stranger:
                with pytest.raises(WrongKey, match="api_key"):
                    async with stranger.session():
                        pass
        async with Client(live.url, api_key=key) as client, client.session() as session:
            assert session.api_key != key, "an agent gets no trainer's key"
            for text in ("one", "two", "three"):
                live.says(text)
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as chat:
                said = await chat.chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}])
            async with anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key) as messages:
                told = await messages.messages.create(
                    model="any", max_tokens=99, messages=[{"role": "user", "content": "b"}]
                )
            options = genai.types.HttpOptions(base_url=session.root_url)
            async with genai.Client(api_key=session.api_key, http_options=options).aio as gemini:
                heard = await gemini.models.generate_content(model="any", contents="c")
            made = await session.samples()
        assert said.choices[0].message.content == "one"
        assert [block.text for block in told.content if block.type == "text"] == ["two"]
        assert heard.text == "three"
        assert [sample.num_trained for sample in made] == [4, 4, 5]


@pytest.mark.parametrize("key", [None, "secret"])
async def test_a_session_s_key_names_it_at_the_server_s_own_address(serve: Serve, key: str | None) -> None:
    async with (
        serve(**({} if key is None else {"api_key": (key,)})) as live,
        Client(live.url, api_key=key) as client,
        client.session() as session,
    ):
        live.says("one")
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=session.api_key) as chat:
            await chat.chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}])
        assert len(await session.samples()) == 1


async def test_several_addresses_share_the_sessions_and_one_that_is_down_gets_none(
    serve: Serve, unused_tcp_port: int
) -> None:
    async with serve() as one, serve() as other:
        urls = [f"http://127.0.0.1:{unused_tcp_port}", one.url, f"{other.url}/v1/"]
        async with Client(*urls) as client, contextlib.AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(client.session()) for _ in range(6)]
            assert len(await sessions(one)) == len(await sessions(other)) == 3
            for session in opened:
                await session.outcome(1.0)
        assert await sessions(one) == await sessions(other) == []


@asynccontextmanager
async def cutting(url: str, num_cuts: int) -> AsyncIterator[str]:
    """A proxy to a server that hangs up on its client once the first `num_cuts` requests have been answered."""
    host, port = url.removeprefix("http://").split(":")
    cuts = iter(range(num_cuts))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        try:
            while data := await reader.read(65536):
                far_writer.write(data)
                answer = await far_reader.read(65536)
                if next(cuts, None) is not None:
                    return
                writer.write(answer)
        finally:
            far_writer.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_connection_that_breaks_after_the_session_was_made_makes_no_second_one(live: Live) -> None:
    async with cutting(live.url, 2) as url, Client(url) as client:
        async with client.session() as session:
            assert [one["session_id"] for one in await sessions(live)] == [session.id]
        assert await sessions(live) == []


async def test_the_blocking_client_does_the_same(live: Live) -> None:
    live.says("one")
    loop, late = asyncio.get_running_loop(), threading.Event()

    def trainer() -> tuple[Any, Any, Any]:
        with SyncClient(live.url) as client:
            with client.session(group="g") as session:
                chat = live.chat(session.id, user("hi"))
                assert asyncio.run_coroutine_threadsafe(chat, loop).result().status == 200
                session.outcome(0.5, detail="fine")
                made = session.samples()
                facts = (session.view()["session_id"], session.drift()["session_id"], session.abort())
                assert (*facts, len(session.ledger())) == (session.id, session.id, 0, 1)
            with pytest.raises(ValueError, match="the agent broke"), client.session():
                raise ValueError("the agent broke")

            def agent(task: int, session: SyncRolloutSession) -> float:
                if task == 2:
                    raise ValueError("two")
                if task == 3:
                    late.wait()
                chat = live.chat(session.id, user("hi"))
                assert asyncio.run_coroutine_threadsafe(chat, loop).result().status == 200
                return float(task)

            live.says("a")
            live.says("b")
            batch = client.rollouts(agent, [0, 1, 2, 3], timeout_s=2.0, progress=room.silent)

            async def of_the_other_client(task: int, session: Any) -> float:
                return 1.0

            with pytest.raises(TypeError, match=r"the agent is an `async def`: use Client"):
                client.rollouts(of_the_other_client, [0], progress=room.silent)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="agent must be callable, got 'agent'"):
                client.rollouts("agent", [0], progress=room.silent)  # type: ignore[arg-type]

            async def ended(_: object) -> None: ...

            with pytest.raises(TypeError, match="`ended` is an `async def`"):
                client.rollouts(agent, [0], progress=room.silent, ended=ended)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="with SyncClient"):
            client.rollouts(agent, [0])
        return made, batch.groups, batch.others

    made, groups, others = await asyncio.to_thread(trainer)
    late.set()
    assert (made[0].reward, made[0].num_trained) == (0.5, 4)
    assert [(group.task, group.rollouts[0].reward) for group in groups] == [(0, 0.0), (1, 1.0)]
    assert [type(group.others[0].error) for group in others] == [ValueError, TimeoutError]
    assert await sessions(live) == []


def test_the_client_has_the_server_s_own_fields() -> None:
    assert set(get_type_hints(SessionFields)) == set(CreateSession.__struct_fields__)
    assert set(get_type_hints(SampleOptions)) == set(SamplesRequest.__struct_fields__) - {
        "format",
        "token_texts",
        "sampling_mask",
    }
    assert set(get_args(RolloutEnd)) == set(RolloutVerdict)


def test_a_session_says_where_it_is() -> None:
    assert "http://h:1" in repr(Client("http://h:1", "https://h:2"))
    assert "http://h:1" in repr(SyncClient("http://h:1"))


@asynccontextmanager
async def answering(content: bytes) -> AsyncIterator[str]:
    """The address of a server with one answer to everything."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r")[0] or 0))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content) + content)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_answer_of_another_kind_of_server_is_named() -> None:
    async with answering(b"hello") as url, Client(url) as client:
        with pytest.raises(room.BadPayload, match="is it a Stenograph server"):
            async with client.session():
                pass


async def test_a_client_forks_a_session_and_its_end_deletes_the_forks(live: Live) -> None:
    async with Client(live.url) as client:
        async with client.session() as session:
            script = live.says("a few words of it")
            assert (await live.chat(session.id, user("hi"))).status == 200
            forks = await session.fork(turn=0, token=2, n=3, group="branch")
            assert len({session.id, *(fork.id for fork in forks)}) == 4
            rest = live.says(" and others")
            async with openai.AsyncOpenAI(base_url=forks[0].base_url, api_key=forks[0].api_key) as chat:
                await chat.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
            (sample,) = await forks[0].samples()
            assert sample.tokens[-len(sample.loss_mask) :].tolist() == [*script.ids[:2], *rest.ids]
            assert sample.metadata["forked_from"] == {"session": session.id, "turn": 0, "token": 2}
            (other,) = await forks[0].fork(turn=0)
            assert len(await sessions(live)) == 5
            await forks[1].delete()
            with pytest.raises(WrongRequest, match="no turn 9"):
                await session.fork(turn=9)
            assert (await other.view())["session_id"] == other.id
        assert await sessions(live) == []


async def test_forks_of_a_cancelled_call_are_deleted(live: Live) -> None:
    async with Client(live.url) as client, client.session() as session:
        live.says("words")
        assert (await live.chat(session.id, user("hi"))).status == 200
        call = asyncio.create_task(session.fork(turn=0, n=8))
        asyncio.get_running_loop().call_soon(call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call
    assert await sessions(live) == []


async def test_the_blocking_client_forks_too(live: Live) -> None:
    live.says("words")

    def work() -> None:
        with SyncClient(live.url) as client, client.session() as session:
            with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as chat:
                chat.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
            (fork,) = session.fork(turn=0)
            assert isinstance(fork, SyncRolloutSession)
            assert fork.view()["records"] == session.view()["records"]

    await asyncio.to_thread(work)
    assert await sessions(live) == []
