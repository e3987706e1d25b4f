"""The console's page and data, over a real socket: read-only, with the keys of all routes, and what it says is true."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import force_setattr

from standins.shared_rows import SharedTables
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason
from stenograph.http.line_drifts import LineDrifts
from stenograph.offload.pool import CpuPool
from stenograph.session.facts import line_drift
from stenograph.text.renderer import Renderer

from .conftest import END, Live, assistant, user
from .console_kit import BAD, HOSTILE, branches, good, group_of, make_large, template_bug, two_turns
from .test_durable import folder, kept
from .workers_kit import two_workers

__all__ = ["folder", "kept"]

Serve = Callable[..., AbstractAsyncContextManager[Live]]

CONSOLE = "/console/api/sessions"

Moment = dict[str, Any]


async def shape_of(live: Live, session: str) -> dict[str, Any]:
    answer = await live.call("GET", f"{CONSOLE}/{session}")
    assert answer.status == 200, answer.body
    return answer.json()


def read_tokens(page: bytes) -> tuple[list[int], list[float], list[int]]:
    num = len(page) // 9
    assert len(page) == 9 * num
    ids, logprobs = np.frombuffer(page, "<u4", num), np.frombuffer(page, "<f4", num, 4 * num)
    return ids.tolist(), logprobs.tolist(), list(page[8 * num :])


async def test_a_line_s_tokens_are_its_sample_s(live: Live) -> None:
    session = await good(live)
    await two_turns(live, session)
    shape = await shape_of(live, session)
    (sample,) = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    page = await live.call("GET", f"{CONSOLE}/{session}/tokens?leaf={shape['main']}")
    assert page.headers["content-type"] == "application/octet-stream"
    ids, logprobs, flags = read_tokens(page.body)
    assert ids == sample["tokens"]
    num_first = len(ids) - sample["response_length"]
    assert [flag & 1 for flag in flags[num_first:]] == sample["loss_mask"]
    told = [0.0 if math.isnan(logprob) else logprob for logprob in logprobs[num_first:]]
    assert told == pytest.approx(sample["rollout_log_probs"])
    part = await live.call("GET", f"{CONSOLE}/{session}/tokens?start=80&limit=10")
    assert read_tokens(part.body)[0] == ids[80:90]
    assert (await live.call("GET", f"{CONSOLE}/{session}/tokens?start=1000")).body == b""


async def test_an_annotation_stands_in_place_of_the_log_probabilities(live: Live) -> None:
    session = await good(live)
    await two_turns(live, session)
    assert (await shape_of(live, session))["scores"] == []
    told = (await live.call("POST", f"/sessions/{session}/scores", {"name": "teacher"})).json()
    shape = await shape_of(live, session)
    assert shape["scores"] == ["teacher"]
    ids, recorded, flags = read_tokens((await live.call("GET", f"{CONSOLE}/{session}/tokens")).body)
    page = read_tokens((await live.call("GET", f"{CONSOLE}/{session}/tokens?scores=teacher")).body)
    assert (page[0], page[2]) == (ids, flags)
    assert [math.isnan(one) for one in page[1]] == [math.isnan(one) for one in recorded]
    scored = [one for one in page[1] if not math.isnan(one)]
    assert scored == pytest.approx([one for turn in told["turns"] for one in turn["log_probs"]])
    part = read_tokens((await live.call("GET", f"{CONSOLE}/{session}/tokens?scores=teacher&start=80&limit=10")).body)
    assert str(part[1]) == str(page[1][80:90])
    missing = await live.call("GET", f"{CONSOLE}/{session}/tokens?scores=other")
    assert (missing.status, missing.json()["error"]["param"]) == (400, "/scores")


async def test_a_shape_has_every_turn_in_columns(live: Live) -> None:
    session = await branches(live)
    shape, view = await shape_of(live, session), (await live.call("GET", f"/sessions/{session}")).json()
    tree = view["metadata"]["tree"]["nodes"]
    turns = shape["turns"]
    assert turns["id"] == [node["id"] for node in tree]
    assert turns["parent"] == [-1 if node["parent"] is None else node["parent"] for node in tree]
    assert turns["num_tokens"] == [node["num_tokens"] for node in tree]
    assert [turns["statuses"][status] for status in turns["status"]] == [node["status"] for node in tree]
    spans = [node["completion_span"] for node in tree]
    assert turns["num_sampled"] == [end - start for start, end in spans]
    assert (shape["num_turns"], shape["sampled_tokens"]) == (5, sum(turns["num_sampled"]))
    # A superseded sibling is no sample, and is trained by none.
    assert [(line["leaf"], line["kept"]) for line in shape["lines"]] == [(1, False), (3, True), (4, True)]
    assert shape["trained_tokens"] == sum(turns["num_trained"]) < shape["sampled_tokens"]


async def test_turns_have_their_texts_cut_and_whole(live: Live) -> None:
    session = await live.open()
    live.says("one")
    long = "x" * 3000
    assert (await live.chat(session, user(long[:2000]), temperature=0.5)).status == 200
    live.says("two", finish=Finish(reason=FinishReason.LENGTH))
    line = [user(long[:2000]), assistant("one"), user("y")]
    assert (await live.chat(session, *line)).status == 200
    page = (await live.call("GET", f"{CONSOLE}/{session}/turns?start=0&limit=1")).json()
    (turn,) = page["turns"]
    assert (page["num_turns"], page["start"]) == (2, 0)
    assert turn["messages"] == [
        {"role": "user", "content": long[:2000], "reasoning": None, "calls": [], "answers": None, "media": [], "cut": 0}
    ]
    assert turn["reply"]["content"] == "one"
    assert turn["params"]["temperature"] == 0.5
    assert turn["matched"] == END
    assert set(turn["stages_s"]) > {"render", "decode_tokens"}
    (last,) = (await live.call("GET", f"{CONSOLE}/{session}/turns?start=1")).json()["turns"]
    assert (last["status"], last["parent"], last["node"]) == ("truncated", 0, 1)


async def test_a_long_text_is_cut_unless_the_whole_is_asked_for(live: Live) -> None:
    session = await live.open(history="linear")
    make_large(live.manager.sessions.get(session), range(5, 50), num_tokens=8, num_turns=1)
    (node,) = live.manager.sessions.get(session).nodes
    force_setattr(node.turn, "messages", (Message(role=Role.USER, content="s" * 9000),) * 300)
    path = f"{CONSOLE}/{session}/turns"
    (turn,) = (await live.call("GET", path)).json()["turns"]
    assert (len(turn["messages"]), turn["left_out"]) == (200, 100)
    assert (turn["messages"][0]["cut"], turn["messages"][0]["content"]) == (9000 - 8192, "s" * 8192)
    (turn,) = (await live.call("GET", f"{path}?whole=true")).json()["turns"]
    assert (len(turn["messages"]), turn["left_out"], turn["messages"][0]["cut"]) == (300, 0, 0)


async def test_what_is_asked_wrongly_is_said_so(live: Live) -> None:
    session = await good(live)
    await two_turns(live, session)
    for path, param in (
        ("turns?limit=201", "/limit"),
        ("turns?limit=0", "/limit"),
        ("turns?start=-1", "/start"),
        ("turns?whole=yes", "/whole"),
        ("turns?leaf=9", "/leaf"),
        ("tokens?limit=65537", "/limit"),
        ("tokens?leaf=x", "/leaf"),
        ("tokens?wat=1", None),
        ("drift?most_tokens=-1", "/most_tokens"),
        ("drift?wat=1", None),
    ):
        answer = await live.call("GET", f"{CONSOLE}/{session}/{path}")
        assert (answer.status, answer.json()["error"]["param"]) == (400, param), path
    for path in ("", "/turns", "/tokens", "/drift"):
        assert (await live.call("GET", f"{CONSOLE}/nobody{path}")).status == 404
    assert (await live.call("GET", "/console/api/group")).json()["error"]["param"] == "/name"
    assert (await live.call("GET", f"/console/api/vocabulary/{'0' * 64}")).status == 404
    for method in ("POST", "PUT", "DELETE"):
        assert (await live.call(method, f"{CONSOLE}/{session}")).status == 405
    empty = await live.open()
    assert (await live.call("GET", f"{CONSOLE}/{empty}/tokens")).body == b""
    assert (await live.call("GET", f"{CONSOLE}/{empty}/turns")).json()["turns"] == []
    assert (await shape_of(live, empty))["main"] is None


async def test_the_vocabulary_is_there_by_its_hash_for_ever(live: Live) -> None:
    session = await good(live)
    ref = (await shape_of(live, session))["vocabulary"]
    answer = await live.call("GET", f"/console/api/vocabulary/{ref['hash']}")
    assert "immutable" in answer.headers["cache-control"]
    assert int.from_bytes(answer.body[:4], "little") == ref["size"] == live.renderer.tokenizer.vocab_size


async def test_a_group_s_rollouts_stand_by_where_they_part(live: Live) -> None:
    sessions = await group_of(live, "task 17", 4)
    await good(live, group="another")
    view = (await live.call("GET", "/console/api/group?name=task%2017")).json()
    assert {row["session_id"] for row in view["rollouts"]} == set(sessions)
    lines = {}
    for session in sessions:
        lines[session] = read_tokens((await live.call("GET", f"{CONSOLE}/{session}/tokens")).body)[0]
    assert view["rollouts"][0]["parts_at"] is None
    for row in view["rollouts"][1:]:
        one, other, at = lines[row["session_id"]], lines[row["like"]], row["parts_at"]
        assert one[:at] == other[:at]
        assert one[at : at + 1] != other[at : at + 1]
    assert sorted(row["outcome"]["reward"] for row in view["rollouts"]) == [0.0, 0.25, 0.5, 0.75]
    assert (await live.call("GET", "/console/api/group?name=none")).json()["rollouts"] == []


async def test_groups_and_steps_are_in_figures(live: Live) -> None:
    await group_of(live, "a", 4)  # rewards 0, 0.25, 0.5, 0.75
    for reward in (0.0, 0.0):
        session = await good(live, reward=reward, group="b", metadata={"step": 7})
        live.says("cut of", finish=Finish(reason=FinishReason.LENGTH))
        await live.chat(session, user("a"))
    live.says("long", paused=True)
    running = asyncio.create_task(live.chat(await live.open(group="b", metadata={"step": 7}), user("a")))
    await live.engine.begun(len(live.engine.requests) + 1)
    await live.open()
    found = (await live.call("GET", "/console/api/groups?passes_at=0.5")).json()
    assert (found["num_groups"], found["num_ungrouped"], found["num_left_out"]) == (2, 1, 0)
    assert [(one["group"], one["step"]) for one in found["groups"]] == [("b", "7"), ("a", None)]
    b, a = found["groups"]
    assert (a["rewards"], a["mean_reward"], a["num_alike"]) == ([0.0, 0.25, 0.5, 0.75], 0.375, 0)
    assert a["pass_at"] == {"1": 0.5, "2": pytest.approx(1 - 1 / 6), "4": 1.0}
    assert (b["rewards"], b["std_reward"], b["num_alike"], b["num_compared"]) == ([0.0, 0.0], 0.0, 1, 1)
    assert (b["num_rollouts"], b["num_busy"], b["cut_share"]) == (3, 1, pytest.approx(2 / 3))
    assert [one["step"] for one in found["steps"]] == ["7", None]
    assert found["steps"][0] == {name: b[name] for name in found["steps"][0]}
    live.engine.step(100)
    assert (await running).status == 200
    for bad in ("?passes_at=x", "?passes_at=nan", "?passes_at=inf", "?passes_at="):
        refused = await live.call("GET", f"/console/api/groups{bad}")
        assert (refused.status, refused.json()["error"]["param"]) == (400, "/passes_at")
    assert (await live.call("GET", "/console/api/groups?name=a")).status == 400


async def test_now_says_what_runs_and_in_which_stage(live: Live) -> None:
    session = await live.open()
    live.says("slowly now", paused=True)
    asking = asyncio.create_task(live.chat(session, user("a")))
    await live.engine.begun(1)
    now = (await live.call("GET", "/console/api/now")).json()
    (row,) = now["running"]
    assert (row["session"], row["stage"], row["sampled_tokens"]) == (session, "prefill", 0)
    assert (now["num_in_flight"], now["workers"], now["engines"][0]["num_running"]) == (1, 1, 1)
    live.engine.step(20)
    assert (await asking).status == 200


async def test_now_is_a_stream_of_events_that_ends_with_the_drain(live: Live) -> None:
    async with live.client.get(f"{live.url}/console/api/now", headers={"accept": "text/event-stream"}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for _ in range(2):
            event = await stream.content.readuntil(b"\n\n")
            kind, data = event.decode().strip().split("\n")
            assert kind == "event: now"
            assert json.loads(data.removeprefix("data: "))["num_sessions"] == 0
        live.manager.refuse_new()
        assert await stream.content.read() == b""


async def test_now_counts_the_tokens_of_a_turn_that_still_runs(live: Live) -> None:
    script = live.says("slowly now", paused=True)
    asking = asyncio.create_task(live.chat(None, user("a")))
    await live.engine.begun(1)
    async with watched(live) as moments:
        assert (await anext(moments))["sampled_tokens"] == 0
        live.engine.step(3)
        now = await first_of(moments, lambda now: now["running"][0]["sampled_tokens"] == 3)
        assert now["sampled_tokens"] == 3
        assert now["sampled_per_s"] > 0
        live.engine.step(20)
        assert (await asking).status == 200
        ended = await first_of(moments, lambda now: now["turns"] == 1)
        assert ended["sampled_tokens"] == len(script.ids)  # none twice


async def test_with_keys_the_page_is_for_everybody_and_its_data_is_not(serve: Serve) -> None:
    async with serve(api_key=("secret",)) as live:
        for path in ("/console", "/console/app.js", "/console/vendor/uplot.js"):
            assert (await live.call("GET", path)).status == 200
        answer = await live.call("POST", "/sessions", {}, authorization="Bearer secret")
        session = answer.json()["session_id"]
        paths = (f"{CONSOLE}/{session}", f"{CONSOLE}/{session}/turns", f"{CONSOLE}/{session}/tokens")
        others = (
            "/console/api/now",
            "/console/api/group?name=x",
            "/console/api/groups",
            f"/console/api/vocabulary/{'0' * 64}",
        )
        for path in (*paths, *others):
            assert (await live.call("GET", path)).status == 401
            assert (await live.call("GET", path, authorization="Bearer secret")).status in (200, 404)


async def test_the_page_may_load_nothing_from_elsewhere_and_is_sent_once(live: Live) -> None:
    page = await live.call("GET", "/console", accept_encoding="gzip")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["content-encoding"] == "gzip"
    assert b"<script src=" in page.body
    again = await live.call("GET", "/console", if_none_match=page.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    plain = await live.call("GET", "/console/console.css", accept_encoding="identity")
    assert "content-encoding" not in plain.headers
    for path in ("/console/index.html", "/console/data.js", "/console/../app.py", "/console/vendor", "/console/api/x"):
        assert (await live.call("GET", path)).status == 404, path
    assert (await live.call("GET", "/console/")).body == page.body  # by a redirect


async def test_what_agents_say_comes_as_json_and_nothing_else(live: Live) -> None:
    session = await live.open(metadata={"task": HOSTILE})
    live.says(HOSTILE)
    assert (await live.chat(session, user(HOSTILE))).status == 200
    answer = await live.call("GET", f"{CONSOLE}/{session}/turns")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["turns"][0]["messages"][0]["content"] == HOSTILE


PLACES = {
    "forbidden_drift": "tab=drift&leaf=1&token=",
    "cut_turn": "turn=0&colour=mask",
    "forced_tokens": "turn=0&colour=source",
    "mixed_versions": "turn=0&colour=version",
    "side_requests": "turn=0",
    "lost_client": "tab=ledger&request=3",
    "unread_call": "turn=0",
    "infra_failed": "tab=facts",
    "chapters": "turn=1",
    "other_spelling": "tab=drift&leaf=0&token=",
}


async def test_a_finding_of_each_kind_leads_to_its_place_in_the_console(live: Live) -> None:
    assert set(PLACES) == set(BAD)
    for kind, make in BAD.items():
        await leads_there(live, kind, await make(live))


async def leads_there(live: Live, kind: str, session: str) -> None:
    found = {one["kind"]: one for one in (await live.call("GET", f"/sessions/{session}/why")).json()["findings"]}
    assert all(one["link"].startswith(f"/console#/session/{session}?") for one in found.values())
    place = found[kind]["link"].split("?")[1]
    assert place.startswith(PLACES[kind])


async def test_a_session_that_only_the_store_has_is_shown_and_stays_asleep(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        session = await good(live, group="g")
        await two_turns(live, session)
        shape, page = await shape_of(live, session), await live.call("GET", f"{CONSOLE}/{session}/tokens")
        await live.open()
        assert not live.manager.sessions.has(session)
        assert await shape_of(live, session) == shape
        assert (await live.call("GET", f"{CONSOLE}/{session}/tokens")).body == page.body
        (row,) = (await live.call("GET", "/console/api/group?name=g")).json()["rollouts"]
        assert row["session_id"] == session
        (group,) = (await live.call("GET", "/console/api/groups")).json()["groups"]
        assert (group["rewards"], group["num_rollouts"], group["num_known"], group["cut_share"]) == ([1.0], 1, 0, None)
        assert group["mean_tokens"] == row["num_tokens"]
        assert not live.manager.sessions.has(session), "whoever looks wakes nothing"


async def test_pages_of_a_session_in_the_store_are_one_read_until_it_changes(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        session = await good(live)
        await two_turns(live, session)
        await live.open()
        storage = live.manager.sessions.storage
        assert storage is not None
        num_read, paths = storage.num_read, ("", "/turns", "/tokens", "/tokens?start=80", "/tokens?limit=9")
        pages = await asyncio.gather(*(live.call("GET", f"{CONSOLE}/{session}{path}") for path in paths))
        assert [page.status for page in pages] == [200] * 5
        assert storage.num_read == num_read + 1
        live.says("three")
        line = [user("What is 12 * 34?"), assistant("Twelve times thirty-four is 408."), user("And one more?")]
        assert (await live.chat(session, *line, assistant("408 and one is 409."), user("And?"))).status == 200
        other = await live.open()
        assert (await shape_of(live, session))["num_turns"] == 3, "it went on, and is in the store alone again"
        assert (await live.call("DELETE", f"/sessions/{session}")).status == 204
        for path in paths:
            assert (await live.call("GET", f"{CONSOLE}/{session}{path}")).status == 404
        assert live.manager.sessions.has(other)


async def test_a_list_s_drift_is_known_where_it_is_found_quickly(live: Live) -> None:
    session, empty, tree = await template_bug(live), await live.open(), await branches(live)

    async def drift(session: str, query: str = "") -> dict[str, Any]:
        return (await live.call("GET", f"{CONSOLE}/{session}/drift{query}")).json()

    unknown = await drift(session, "?most_tokens=50")
    assert (unknown["known"], unknown["lines"], unknown["forbidden"]) == (False, 1, 0)
    found = await drift(session)
    assert (found["known"], found["num_turns"], found["lines"], found["unrenderable"]) == (True, 2, 1, 0)
    (line,) = (await live.call("GET", f"/sessions/{session}/drift")).json()["lines"]
    assert found["forbidden"] == sum(line["counts"].values()) - line["counts"]["assistant_text"] > 0
    assert found["tolerated"] == line["counts"]["assistant_text"]
    assert await drift(session, "?most_tokens=0") == found, "what somebody has compared is known"
    assert (await drift(empty))["known"]
    lines = (await live.call("GET", f"/sessions/{tree}/drift")).json()["lines"]
    assert ((await drift(tree, "?most_tokens=0"))["known"], len(lines)) == (True, 3)


async def test_a_line_s_drift_is_compared_once_also_for_those_who_ask_together(live: Live) -> None:
    session = await template_bug(live)
    (_, leaf) = live.manager.sessions.get(session).nodes
    pool = CpuPool(2)
    drifts = LineDrifts(pool, live.renderer)
    assert drifts.known(session, leaf) is None
    reports = await asyncio.gather(*(drifts.of(session, leaf) for _ in range(3)))
    assert (drifts.num_compared, reports[0].is_forbidden) == (1, True)
    assert drifts.known(session, leaf) == reports[1] == line_drift(leaf, live.renderer)
    pool.close()


async def test_a_rollout_in_a_shared_database_is_in_its_group_once(tmp_path: Path, renderer: Renderer) -> None:
    tables = SharedTables(time.monotonic)
    async with two_workers(tmp_path, renderer, tables=tables) as workers:
        sessions = [await live.open(group="g") for live in workers.lives]
        for live in workers.lives:
            rows = (await live.call("GET", "/console/api/group?name=g")).json()["rollouts"]
            assert sorted(row["session_id"] for row in rows) == sorted(sessions)


async def test_workers_show_each_others_sessions_and_one_moment(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer) as workers:
        session = await workers.open_at(1)
        workers.lives[1].says("one")
        assert (await workers.lives[1].chat(session, user("a"))).status == 200
        asked = workers.lives[0]
        assert (await shape_of(asked, session))["num_turns"] == 1
        ids, _, _ = read_tokens((await asked.call("GET", f"{CONSOLE}/{session}/tokens")).body)
        assert len(ids) == (await shape_of(asked, session))["turns"]["num_tokens"][0]
        now = (await asked.call("GET", "/console/api/now")).json()
        assert (now["workers"], now["workers_away"], now["num_sessions"], now["turns"]) == (2, 0, 1, 1)
        assert now["engines"][0]["engine"] == "scripted"


@asynccontextmanager
async def watched(live: Live) -> AsyncIterator[AsyncIterator[Moment]]:
    """The moments of a stream."""

    async def moments() -> AsyncIterator[Moment]:
        while event := await stream.content.readuntil(b"\n\n"):
            kind, data = event.decode().strip().split("\n")
            assert kind == "event: now"
            yield json.loads(data.removeprefix("data: "))

    async with live.client.get(f"{live.url}/console/api/now", headers={"accept": "text/event-stream"}) as stream:
        assert (stream.status, stream.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        yield moments()


async def first_of(moments: AsyncIterator[Moment], holds: Callable[[Moment], bool]) -> Moment:
    async for now in moments:
        if holds(now):
            return now
    raise AssertionError("the stream has ended")


async def test_one_stream_has_the_moments_of_all_workers_and_says_who_is_away(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with two_workers(tmp_path, renderer) as workers:
        async with watched(workers.lives[0]) as moments, watched(workers.lives[0]) as others:
            first = await anext(moments)
            assert (first["workers"], first["workers_away"], first["num_sessions"]) == (2, 0, 0)
            await workers.open_at(1)
            for one in (moments, others):
                await first_of(one, lambda now: now["num_sessions"] == 1)
            assert len(workers.servers[1].server_state.tasks) == 1, "a worker sends one stream, however many watch"
            workers.cut(1)
            away = await first_of(moments, lambda now: now["workers_away"] == 1)
            assert (away["workers"], away["num_sessions"]) == (1, 0), "what it does is missing"
            back = await first_of(moments, lambda now: now["workers_away"] == 0)
            assert (back["workers"], back["num_sessions"]) == (2, 1)
        await workers.at_rest()  # nobody watches any more


async def test_a_stream_of_several_workers_ends_with_its_own_worker_s_drain(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer) as workers, watched(workers.lives[0]) as moments:
        await anext(moments)
        workers.lives[0].manager.refuse_new()
        assert [now async for now in moments] == []


async def test_a_group_is_that_of_all_workers_and_their_tokens_are_compared(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer) as workers:
        sessions = [await workers.open_at(at % 2, group="g") for at in range(5)]
        for at, session in enumerate(sessions):
            workers.lives[0].says("yes" if at < 3 else "no, not at all")
            assert (await workers.lives[0].chat(session, user("a"))).status == 200
        counted = [(await live.call("GET", "/console/api/groups")).json() for live in workers.lives]
        assert counted[0] == counted[1]
        assert [(one["group"], one["num_rollouts"]) for one in counted[0]["groups"]] == [("g", 5)]
        views = [(await live.call("GET", "/console/api/group?name=g")).json() for live in workers.lives]
        assert views[0] == views[1]
        rows = views[0]["rollouts"]
        assert {row["session_id"] for row in rows} == set(sessions)
        for row in rows[1:]:
            lines = [
                (await workers.lives[0].call("GET", f"{CONSOLE}/{one}/tokens")).body
                for one in (row["session_id"], row["like"])
            ]
            (one, _, _), (other, _, _) = map(read_tokens, lines)
            assert one[: row["parts_at"]] == other[: row["parts_at"]]
            assert (
                one[row["parts_at"] : row["parts_at"] + 1] != other[row["parts_at"] : row["parts_at"] + 1]
                or one == other
            )
        assert sum(row["parts_at"] == row["num_tokens"] for row in rows[1:]) == 3, (
            "those that say the same part nowhere"
        )
