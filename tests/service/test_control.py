"""Sessions, samples, keys, limits and the end of a server, over a real socket."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import safetensors.numpy

from standins.scripted_engine import Script

from .conftest import Live, assistant, output_ids, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]


async def test_a_session_opens_lists_and_closes(live: Live) -> None:
    answer = await live.call("POST", "/sessions")
    opened = answer.json()
    assert answer.status == 200
    assert len(opened["session_id"]) == 32
    assert int(opened["session_id"], 16) >= 0
    assert opened["base_url"] == f"{live.url}/sessions/{opened['session_id']}/v1"
    ids = [opened["session_id"], await live.open(), await live.open()]
    page = (await live.call("GET", "/sessions?limit=2")).json()
    assert [summary["session_id"] for summary in page["sessions"]] == ids[:2]
    rest = (await live.call("GET", f"/sessions?limit=2&after={page['next']}")).json()
    assert ([summary["session_id"] for summary in rest["sessions"]], rest["next"]) == (ids[2:], None)
    assert (await live.call("DELETE", f"/sessions/{ids[0]}")).status == 204
    assert (await live.call("DELETE", f"/sessions/{ids[0]}")).status == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"wat": 1}, "/wat"),
        ({"history": "forest"}, "/history"),
        ({"ttl_s": 0}, "/ttl_s"),
        ({"matcher": "fuzzy"}, "/matcher"),
        ({"max_turns": 0}, "/max_turns"),
        ({"max_requests": 2**31}, "/max_requests"),
        ({"over_limit": "retry"}, "/over_limit"),
        ({"metadata": []}, "/metadata"),
    ],
)
async def test_a_bad_session_body_is_400_with_a_pointer(live: Live, body: object, param: str) -> None:
    answer = await live.call("POST", "/sessions", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_metadata_and_null_options_arrive(live: Live) -> None:
    session = await live.open(metadata={"task": 7}, max_turns=None, matcher="strict")
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert view["session_id"] == session
    assert view["metadata"]["task"] == 7
    assert view["records"] == []
    assert view["metadata"]["accumulated_token_ids"] == []


async def test_a_session_without_turns_has_no_samples_and_says_why(live: Live) -> None:
    answer = await live.call("POST", f"/sessions/{await live.open()}/samples", {"format": "json"})
    assert answer.json()["samples"] == []
    assert answer.json()["empty_reason"]


async def test_samples_come_as_safetensors_by_default_and_equal_the_json_ones(live: Live) -> None:
    session = await live.open()
    live.says("one")
    await live.chat(session, user("a"))
    live.says("two")
    await live.chat(session, user("a"), assistant("one"), user("b"))
    (as_json,) = (
        await live.call("POST", f"/sessions/{session}/samples", {"format": "json", "token_texts": True})
    ).json()["samples"]
    answer = await live.call("POST", f"/sessions/{session}/samples", {"metadata": {"k": 1}})
    assert answer.status == 200
    tensors = safetensors.numpy.load(answer.body)
    meta = json.loads(tensors.pop("_samples_meta").tobytes())
    assert set(tensors) == {"tokens.0", "loss_mask.0", "rollout_log_probs.0"}
    assert tensors["tokens.0"].tolist() == as_json["tokens"]
    assert tensors["loss_mask.0"].tolist() == as_json["loss_mask"]
    assert tensors["rollout_log_probs.0"].tolist() == as_json["rollout_log_probs"]
    assert [str(tensors[name].dtype) for name in ("tokens.0", "loss_mask.0", "rollout_log_probs.0")] == [
        "int64",
        "uint8",
        "float64",
    ]
    assert meta["samples"][0]["status"] == as_json["status"] == "completed"
    assert meta["samples"][0]["metadata"]["k"] == 1
    assert len(as_json["token_texts"]) == len(as_json["tokens"])
    assert "".join(as_json["token_texts"]).endswith("two<|im_end|>")


async def test_a_key_is_asked_for_everywhere_but_where_a_probe_knocks(serve: Serve) -> None:
    async with serve(api_key=("secret",)) as live:
        assert (await live.call("GET", "/health")).status == 200
        assert (await live.call("GET", "/ready")).status == 200
        for method, path in (("POST", "/sessions"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
                answer = await live.call(method, path, {"messages": [user("x")]}, **headers)
                assert (answer.status, answer.json()["error"]["code"]) == (401, "unauthorized")
        assert (await live.call("POST", "/sessions", None, x_api_key="secret")).status == 200
        assert (await live.call("GET", "/v1/models", authorization="Bearer secret")).status == 200


async def test_the_limits_of_the_server_and_of_a_session_hold(serve: Serve) -> None:
    async with serve(max_sessions=2, max_in_flight=1, max_body_bytes=2000) as live:
        session, other = await live.open(max_turns=1), await live.open(max_total_tokens=80)
        full = await live.call("POST", "/sessions")
        assert (full.status, full.json()["error"]["code"]) == (429, "limit_exceeded")
        assert "retry-after" in full.headers
        big = await live.chat(session, user("x" * 3000))
        assert (big.status, big.json()["error"]["code"]) == (413, "body_too_large")
        live.says("x", paused=True)
        first = asyncio.ensure_future(live.chat(session, user("a")))
        await live.engine.begun(1)
        assert (await live.chat(other, user("a"))).status == 429
        live.engine.step(3)
        assert (await first).status == 200
        spent = await live.chat(session, user("a"), assistant("x"), user("b"))
        assert (spent.status, spent.json()["error"]["code"]) == (400, "limit_exceeded")
        live.says("y")
        assert (await live.chat(other, user("a"))).status == 200
        assert (await live.chat(other, user("a"), assistant("y"), user("b"))).status == 400


async def test_a_drain_lets_running_turns_end_and_refuses_new_ones(serve: Serve) -> None:
    async with serve() as live:
        live.says("whole", paused=True)
        session = await live.open()
        call = asyncio.ensure_future(live.chat(session, user("a")))
        await live.engine.begun(1)
        live.manager.refuse_new()
        refused = await live.chat(None, user("b"))
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        assert (await live.call("POST", "/sessions")).status == 503
        live.engine.step(20)
        assert (await call).json()["choices"][0]["message"]["content"] == "whole"


async def test_a_drain_keeps_what_was_drawn_of_the_turns_that_do_not_end_in_time(serve: Serve) -> None:
    async with serve() as live:
        script = live.says("whole", paused=True)
        session = await live.open()
        call = asyncio.ensure_future(live.chat(session, user("a")))
        await live.engine.begun(1)
        live.engine.step(3)
        request_id = live.engine.requests[0].request_id
        while live.engine.drawn[request_id] != list(script.ids[:3]):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        await live.manager.drain(timeout_s=0.001)
        choice = (await call).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
        assert (output_ids(record), record["status"]) == (list(script.ids[:3]), "aborted")


async def test_a_drain_fails_the_turns_whose_engine_does_not_answer_the_abort(serve: Serve) -> None:
    async with serve(abort_grace_s=0.05) as live:
        live.engine.plan(Script(ids=(70, 71), paused=True, deaf=True))
        call = asyncio.ensure_future(live.chat(await live.open(), user("a")))
        await live.engine.begun(1)
        await live.manager.drain(timeout_s=0.001)
        answer = await call
        assert (answer.status, answer.json()["error"]["code"]) == (503, "draining")


async def test_the_front_page_is_html_for_a_browser_and_json_for_others_and_its_links_lead_somewhere(
    live: Live,
) -> None:
    page = await live.call("GET", "/", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["vary"] == "accept"
    told = (await live.call("GET", "/")).json()
    paths = re.findall(r'href="([^"]*)"', page.body.decode())
    assert paths == [link["path"] for link in told["links"]]
    for path in paths:  # none of them leads outside
        assert (await live.call("GET", path)).status == 200, path
    assert b"://" not in page.body
    assert b"<script" not in page.body


async def test_the_front_page_asks_for_no_key(serve: Serve) -> None:
    async with serve(api_key=("secret",)) as live:
        assert (await live.call("GET", "/")).json()["name"] == "stenograph"


async def test_health_ready_models_and_tokens_answer(live: Live) -> None:
    health = (await live.call("GET", "/health")).json()
    assert health["status"] == "ok"
    assert len(health["instance_id"]) == 32
    assert (await live.call("GET", "/ready")).json()["ready"] is True
    await live.engine.aclose()
    assert (await live.call("GET", "/ready")).status == 503
    assert (await live.call("GET", "/health")).status == 200
    assert (await live.call("GET", "/v1/models")).json()["data"][0]["id"] == "tiny"
    text = "naïve <|im_end|> ☃"
    tokens = (await live.call("POST", "/tokenize", {"prompt": text})).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert (await live.call("POST", "/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": text}
    assert (await live.call("POST", "/detokenize", {"tokens": [10**6]})).status == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "route_not_found"),
        ("PUT", "/sessions", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/sessions/nobody", 404, "session_not_found"),
        ("GET", "/sessions?limit=x", 400, "invalid_request"),
        ("GET", "/sessions?limit=" + "9" * 5000, 400, "invalid_request"),
        ("GET", "/sessions?limit=%D9%A3", 400, "invalid_request"),
        ("GET", "/sessions?after=nobody", 404, "session_not_found"),
    ],
)
async def test_what_is_not_there_is_said_in_the_error_shape(
    live: Live, method: str, path: str, status: int, code: str
) -> None:
    answer = await live.call(method, path)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}
