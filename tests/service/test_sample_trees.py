"""Samples as one tree over HTTP: of a session, of a group and of a session with its forks; history once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any

import pytest

from stenograph.client import Client, SyncClient
from stenograph.client.errors import BadPayload, ServerRefused
from stenograph.client.samples import DecodedSample, decoded
from stenograph.export.tree import TreeJoin
from stenograph.http.bulk_routes import _joined
from stenograph.offload.pool import CpuPool
from tests.pure.trainers.test_trees import facts

from .conftest import Live, assistant, user
from .test_claims import claim
from .test_client import Serve, answering
from .test_forks import TALK, forked, talked


async def flat(live: Live, sessions: list[str]) -> list[DecodedSample]:
    """The samples of sessions, one after the other."""
    payloads = [(await live.call("POST", f"/sessions/{one}/samples", {})).body for one in sessions]
    return [sample for payload in payloads for sample in decoded(payload)]


def told(sample: DecodedSample) -> dict[str, Any]:
    return {**facts(sample), "response": ""}


async def with_forks(live: Live) -> list[str]:
    """A session of three turns, and three forks within its second, each with a rest of its own."""
    session, _ = await talked(live, group="g", metadata={"a": 1})
    forks = await forked(live, session, turn=1, token=2, n=3)
    for number, fork in enumerate(forks):
        live.says(f" rest {number}")
        assert (await live.chat(fork, *TALK[:3])).status == 200
    return [session, *forks]


async def test_a_session_with_its_forks_is_a_tree_whose_paths_are_the_flat_samples(live: Live) -> None:
    sessions = await with_forks(live)
    async with Client(live.url) as client:
        (tree,) = await client.trees(group="g")
        (by_ids,) = await client.trees(sessions=sessions)
        wanted = await flat(live, sessions)
    assert (
        [told(one) for one in tree.samples()]
        == [told(one) for one in by_ids.samples()]
        == [told(one) for one in wanted]
    )
    beginnings = {tuple(one.tokens[: end + 1]) for one in wanted for end in range(len(one.tokens))}
    assert len(tree.tokens) == len(beginnings) < tree.num_flat / 2
    assert len(tree.nodes) == len(sessions)


async def test_a_tree_answer_does_not_repeat_what_sessions_share(live: Live) -> None:
    session = await live.open(group="g")
    live.says("first")
    assert (await live.chat(session, user("word " * 500))).status == 200
    await forked(live, session, turn=0, n=8)
    as_tree = await live.call("POST", "/samples", {"group": "g", "format": "tree"})
    as_flat = await live.call("POST", "/samples", {"group": "g"})
    one = await live.call("POST", f"/sessions/{session}/samples", {"format": "tree"})
    assert as_tree.status == as_flat.status == one.status == 200
    assert len(as_tree.body) < len(as_flat.body) / 8
    assert (len(as_tree.body) - len(one.body)) / 8 < len(one.body) / 4, "each fork adds less than the history's ids"


async def test_one_session_as_a_tree_has_the_branches_of_its_history(live: Live) -> None:
    session = await live.open(history="tree")
    live.says("one")
    await live.chat(session, user("a"))
    for text in ("b", "c"):
        live.says(f"to {text}")
        branch = [user("a"), assistant("one"), user(text)]
        await live.chat(session, *branch)
        live.says("on")
        await live.chat(session, *branch, assistant(f"to {text}"), user("on"))
    with SyncClient(live.url) as client:
        claimed = await asyncio.to_thread(client.trees, sessions=[session])
    async with Client(live.url) as client:
        wanted = await flat(live, [session])
    assert [told(one) for one in claimed[0].samples()] == [told(one) for one in wanted]
    assert len(wanted) == 2
    assert len(claimed[0].tokens) < claimed[0].num_flat


async def test_a_session_without_samples_is_no_path_and_one_that_fails_is_an_error(live: Live) -> None:
    empty = await live.open()
    async with Client(live.url) as client:
        assert await client.trees(sessions=[empty]) == []
        with pytest.raises(BadPayload, match="has no samples"):
            await client.trees(sessions=["0" * 32])
        with pytest.raises(ServerRefused):
            await client.trees(group="g", max_seq_len=0)


async def test_sessions_of_several_servers_are_a_tree_each(serve: Serve) -> None:
    async with serve() as one, serve() as other:
        sessions = [(await talked(live))[0] for live in (one, other)]
        wanted = [await flat(live, [session]) for live, session in zip((one, other), sessions, strict=True)]
        async with Client(one.url, other.url) as client:
            trees = await client.trees(sessions=sessions)
            with pytest.raises(BadPayload, match=f"session {'0' * 32} has no samples: no server has it"):
                await client.trees(sessions=[*sessions, "0" * 32])
            with pytest.raises(ValueError, match="a group or sessions"):
                await client.trees(group="g", sessions=sessions)
        assert [[told(sample) for sample in tree.samples()] for tree in trees] == [[*map(told, one)] for one in wanted]


async def test_a_fork_without_tokens_of_its_own_is_in_no_claim(live: Live) -> None:
    session, _ = await talked(live, group="g")
    fresh, continued = await forked(live, session, turn=1, token=2, n=2)
    live.says(" rest")
    assert (await live.chat(continued, *TALK[:3])).status == 200
    for one in (session, fresh, continued):
        assert (await live.call("PUT", f"/sessions/{one}/outcome", {"reward": 1.0})).status == 200
    assert (await claim(live))["sessions"] == [session, continued]


async def test_tokens_of_a_tree_are_trained_once_it_has_left(live: Live) -> None:
    (session, *_) = await with_forks(live)
    answer = (await live.call("POST", "/samples", {"sessions": [session], "format": "tree"})).body
    end = answer.index(b'{"done":') - 8
    has_ended = False

    async def part() -> AsyncGenerator[bytes | memoryview, None]:
        nonlocal has_ended
        for start in range(0, end, 7):
            yield answer[start : min(start + 7, end)]
        has_ended = True  # where its tokens are noted

    with closing(CpuPool(1)) as pool:
        pieces = _joined(part(), TreeJoin(), pool)
        assert bytes(await anext(pieces)) == answer[:end]
        assert not has_ended
        assert [piece async for piece in pieces] == []
    assert has_ended


async def test_a_session_of_a_group_that_is_deleted_meanwhile_is_in_no_tree(live: Live) -> None:
    sessions = await with_forks(live)
    wanted = await flat(live, sessions[1:])
    await live.call("DELETE", f"/sessions/{sessions[0]}")
    answer = (await live.call("POST", "/samples", {"sessions": sessions, "format": "tree"})).body
    async with answering(answer) as url, Client(url) as client:  # as one who is asked for the group gets it
        (tree,) = await client.trees(group="g")
        assert [told(one) for one in tree.samples()] == [*map(told, wanted)]
        with pytest.raises(BadPayload, match=f"session {sessions[0]} has no samples: no server has it"):
            await client.trees(sessions=sessions)
