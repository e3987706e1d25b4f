"""Sampling that the trainer owns: what a session, or the server for all sessions, sets of its requests' sampling."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from standins.scripted_engine import Script
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import InvalidRequest, StartupError
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.http.rule_files import sampling_of
from stenograph.http.settings import Settings
from stenograph.session.settings import OverBudget

from .conftest import Answer, Live, assistant, user
from .test_toy_dialect import ToyDialect

Serve = Callable[..., AbstractAsyncContextManager[Live]]
RULES = {
    "default": {"top_p": 0.5, "stop": ["\n"], "max_tokens": 30, "seed": 1},
    "force": {"temperature": 0.7, "seed": 5, "logit_bias": {"7": 2}},
}
CUT = Finish(reason=FinishReason.LENGTH)
SET_BY = "not the request (`sampling` of POST /sessions, or --sampling)."


async def complete(live: Live, session: str | None, prompt: Any, **fields: Any) -> Answer:
    prefix = "" if session is None else f"/sessions/{session}"
    return await live.call("POST", f"{prefix}/v1/completions", {"prompt": prompt, **fields})


async def record(live: Live, session: str) -> Any:
    """The last one of a session."""
    return (await live.call("GET", f"/sessions/{session}")).json()["records"][-1]


def error_of(answer: Answer) -> Any:
    assert answer.status == 400, answer.body
    return answer.json()["error"]


def file_of(folder: Path, rules: Any) -> Path:
    path = folder / "sampling.json"
    path.write_text(json.dumps(rules))
    return path


@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_forced_value_wins_and_a_default_stands_where_the_request_is_silent(live: Live, is_chat: bool) -> None:
    session = await live.open(sampling=RULES)

    async def ask(**fields: Any) -> SamplingParams:
        live.says("hm")
        answer = await (live.chat(session, user("a"), **fields) if is_chat else complete(live, session, "a", **fields))
        assert answer.status == 200, answer.body
        return live.engine.requests[-1].params

    forced: dict[str, Any] = {"temperature": 0.7, "seed": 5, "logit_bias": ((7, 2.0),)}
    silent = await ask(temperature=None, stop=None)
    assert silent == SamplingParams(**forced, top_p=0.5, stop=("\n",), max_tokens=30)
    asked = await ask(temperature=0, seed=9, logit_bias={"3": 1}, top_p=1, stop=[], max_tokens=3, top_k=4, min_tokens=2)
    assert asked == SamplingParams(**forced, max_tokens=3, top_k=4, min_tokens=2)


async def test_the_record_has_what_the_client_sent_and_what_the_engine_was_given(live: Live) -> None:
    session = await live.open(sampling=RULES)
    live.says("hm")
    asked = {"temperature": 0.2, "max_completion_tokens": 9, "sampling_seed": 3}
    assert (await live.chat(session, user("a"), **asked)).status == 200
    request = (await record(live, session))["request"]
    assert {name: request[name] for name in asked} == asked
    assert not {"top_p", "stop", "logit_bias", "max_tokens", "seed"} & request.keys()
    applied = request["parameters"]["sampling_params"]
    given = json.loads(json.dumps(structs.asdict(live.engine.requests[-1].params)))
    assert applied == given
    assert (applied["temperature"], applied["max_tokens"], applied["seed"]) == (0.7, 9, 5)
    assert (applied["top_p"], applied["stop"], applied["logit_bias"]) == (0.5, ["\n"], [[7, 2.0]])


async def test_a_session_without_rules_and_a_request_without_a_session_are_under_none(live: Live) -> None:
    for session in (await live.open(), await live.open(sampling={}), await live.open(sampling={"force": None})):
        live.says("hm")
        assert (await live.chat(session, user("a"), temperature=0.2)).status == 200
        room = 4096 - len(live.engine.requests[-1].prompt.ids)
        assert live.engine.requests[-1].params == SamplingParams(temperature=0.2, max_tokens=room)


async def test_the_server_s_rules_are_all_sessions_and_a_session_s_are_laid_over_them(
    serve: Serve, tmp_path: Path
) -> None:
    rules = {"default": {"top_p": 0.5, "max_tokens": 8}, "force": {"temperature": 0.7, "top_k": 3, "min_p": None}}
    async with serve(sampling=file_of(tmp_path, rules)) as live:
        own = {"default": {"top_k": 9, "max_tokens": 6}, "force": {"temperature": 0, "top_p": None, "top_k": None}}
        for session in (None, await live.open(), await live.open(sampling=own)):
            live.says("hm")
            assert (await live.chat(session, user("a"), max_tokens=None)).status == 200
            live.says("hm")
            assert (await complete(live, session, "a", max_tokens=5)).status == 200
    stateless, of_server, of_session = (live.engine.requests[start : start + 2] for start in (0, 2, 4))
    assert all((turn.params.temperature, turn.params.top_p, turn.params.top_k) == (1.0, 1.0, 0) for turn in stateless)
    assert [turn.params for turn in of_server] == [
        SamplingParams(temperature=0.7, top_k=3, top_p=0.5, max_tokens=num) for num in (8, 5)
    ]
    assert [turn.params for turn in of_session] == [
        SamplingParams(temperature=0.0, top_k=3, top_p=0.5, max_tokens=num) for num in (6, 5)
    ]


async def test_a_forced_stop_ends_the_reply_before_it_and_the_ids_include_it(live: Live) -> None:
    session = await live.open(sampling={"force": {"stop": "b"}})
    ids = tuple(live.renderer.tokenizer.encode("ab"))
    live.engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched="b")))
    answer = await live.chat(session, user("a"), stop=["c"])
    assert live.engine.requests[-1].params.stop == ("b",)
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("a", "b")


async def test_every_dialect_s_requests_are_under_the_same_rules(serve: Serve) -> None:
    async with serve(also=(ToyDialect(),)) as live:
        session = await live.open(sampling={"default": {"max_tokens": 6}, "force": {"temperature": 0.7}})
        for length in (None, 4):
            live.says("hm")
            body = {"lines": ["a"], "length": length}
            assert (await live.call("POST", f"/sessions/{session}/toy/low/say", body)).status == 200
    applied = [(turn.params.max_tokens, turn.params.temperature) for turn in live.engine.requests]
    assert applied == [(6, 0.7), (4, 0.7)]


async def test_a_forced_seed_is_that_of_each_prompt(live: Live) -> None:
    session = await live.open(history="tree", sampling={"force": {"seed": 5}})
    for _ in range(2):
        live.says("hm")
    assert (await complete(live, session, ["a", "b"], seed=1)).status == 200
    assert [turn.params.seed for turn in live.engine.requests] == [5, 5]


async def test_a_retry_joins_its_turn_under_rules_too(live: Live) -> None:
    session = await live.open(sampling=RULES)
    live.says("hm")
    key = {"idempotency_key": "k"}
    path, body = f"/sessions/{session}/v1/chat/completions", {"messages": [user("a")], "temperature": 0.1}
    first, second = await asyncio.gather(*(live.call("POST", path, body, **key) for _ in range(2)))
    third = await live.call("POST", path, body, **key)
    assert first.status == 200
    assert first.body == second.body == third.body
    assert len(live.engine.requests) == 1
    changed = await live.call("POST", path, {**body, "temperature": 0.7}, **key)
    assert (changed.status, changed.json()["error"]["code"]) == (422, "idempotency_mismatch")


async def test_a_session_under_rules_goes_on_turn_after_turn(live: Live) -> None:
    session = await live.open(sampling={"default": {"max_tokens": 2}})
    live.engine.plan(Script(ids=tuple(live.renderer.tokenizer.encode("ab"))[:2], finish=CUT))
    first = await live.chat(session, user("a"))
    content = first.json()["choices"][0]["message"]["content"]
    live.says("c")
    second = await live.chat(session, user("a"), assistant(content), user("b"), max_tokens=7)
    assert second.status == 200
    view = (await live.call("GET", f"/sessions/{session}")).json()
    limits = [one["request"]["parameters"]["sampling_params"]["max_tokens"] for one in view["records"]]
    assert (limits, [one["status"] for one in view["records"]]) == ([2, 7], ["truncated", "completed"])


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["default", "force"])
async def test_a_min_tokens_above_the_session_s_max_tokens_is_lowered_to_it(live: Live, part: str) -> None:
    session = await live.open(sampling={part: {"max_tokens": 2}})
    live.engine.plan(Script(ids=(70, 71), finish=CUT))
    assert (await live.chat(session, user("a"), min_tokens=9)).status == 200
    params = live.engine.requests[-1].params
    assert (params.min_tokens, params.max_tokens) == (2, 2)


@pytest.mark.parametrize(("part", "asked"), [("default", {}), ("force", {}), ("force", {"max_completion_tokens": 3})])
async def test_a_session_s_max_tokens_beyond_the_context_is_not_the_client_s_fault(
    live: Live, part: str, asked: dict[str, int]
) -> None:
    session = await live.open(sampling={part: {"max_tokens": 5000}})
    error = error_of(await live.chat(session, user("a"), **asked))
    assert (error["code"], error["param"]) == ("context_length_exceeded", None)
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, you requested ")
    assert error["message"].endswith(f" The session sets max_tokens, {SET_BY}")
    error = error_of(await complete(live, session, "a"))
    assert (error["code"], error["param"]) == ("context_length_exceeded", None)


async def test_a_client_s_own_max_tokens_stays_its_own_fault(live: Live) -> None:
    session = await live.open(sampling={"default": {"max_tokens": 5}, "force": {"temperature": 1}})
    error = error_of(await live.chat(session, user("a"), max_completion_tokens=5000))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "/max_completion_tokens")
    assert "session" not in error["message"]


async def test_a_session_s_max_tokens_beyond_the_context_is_clamped_where_the_server_clamps(serve: Serve) -> None:
    async with serve(over_budget=OverBudget.CLAMP) as live:
        session = await live.open(sampling={"force": {"max_tokens": 5000}})
        live.says("hm")
        assert (await live.chat(session, user("a"), max_tokens=3)).status == 200
        request = live.engine.requests[-1]
        assert request.params.max_tokens == 4096 - len(request.prompt.ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_s_refusal_of_a_session_s_value_blames_no_field_of_the_client(live: Live, stream: bool) -> None:
    def refuse(name: str) -> None:
        error = InvalidRequest(f"No {name} here.", blame=Blame(RequestPart.SAMPLING, path=(name,)))
        live.engine.plan(Script(ids=(), error=error))

    session = await live.open(sampling={"default": {"min_p": 0.1}, "force": {"presence_penalty": 1}})
    refuse("presence_penalty")
    error = error_of(await live.chat(session, user("a"), presence_penalty=0, stream=stream))
    assert (error["param"], error["message"]) == (
        None,
        f"No presence_penalty here. The session sets presence_penalty, {SET_BY}",
    )
    refuse("min_p")
    error = error_of(await live.chat(session, user("a"), stream=stream))
    assert (error["param"], error["message"]) == (None, f"No min_p here. The session sets min_p, {SET_BY}")
    refuse("min_p")
    error = error_of(await live.chat(session, user("a"), min_p=0.1, stream=stream))
    assert (error["param"], error["message"]) == ("/min_p", "No min_p here.")


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"force": {"temperature": 101}}, "/sampling/force/temperature"),
        ({"default": {"stop": ["a", ""]}}, "/sampling/default/stop"),
        ({"force": {"min_tokens": 3}}, "/sampling/force/min_tokens"),
        ({"forced": {}}, "/sampling/forced"),
        ([], "/sampling"),
    ],
)
async def test_bad_rules_open_no_session(live: Live, sampling: Any, param: str) -> None:
    error = error_of(await live.call("POST", "/sessions", {"sampling": sampling}))
    assert (error["code"], error["param"]) == ("invalid_request", param)
    assert live.manager.sessions.num_sessions == 0


# --- the server's file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"force": {"temperature": 101}}', r"/force/temperature of the file '.*': temperature must be in \[0, 100\]"),
        (b'{"default": {"tempo": 1}}', r"/default/tempo of the file '.*': Unknown field 'tempo': sampling sets temp"),
        (b'{"top_p": 1}', r"/top_p of the file '.*': Unknown field 'top_p': sampling sets default, force\."),
        (b"[1]", r"the file '.*': Expected `object`, got `array`"),
        (b"{,}", r"the file '.*' is not JSON: JSON is malformed"),
        (b'{"force": "\xff"}', r"the file '.*' is not JSON: .*can't decode byte"),
        (b"", r"the file '.*' is not JSON: "),
    ],
)
def test_a_bad_file_stops_the_start_and_is_named_with_its_field(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "sampling.json"
    path.write_bytes(text)
    with pytest.raises(StartupError, match=f"^--sampling: {says}") as caught:
        sampling_of(Settings(sampling=path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(StartupError, match=f"--sampling: cannot read the file '{path}': {why}"):
            sampling_of(Settings(sampling=path))
    assert sampling_of(Settings()) is None
