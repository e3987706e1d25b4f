"""A client goes on after a reply that its token limit cut off: it is closed with tokens that nobody sampled."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from stenograph.core.kinds import AfterLength
from stenograph.core.types import Finish, FinishReason

from .conftest import END, Live, assistant, output_ids, user

LENGTH = Finish(reason=FinishReason.LENGTH)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Serve = Callable[..., AbstractAsyncContextManager[Live]]


async def go_on(live: Live, session: str, text: str, **fields: Any) -> tuple[int, str]:
    """Have a reply cut off, and ask on after it: the second answer's status and its error's code."""
    live.says(text, finish=LENGTH)
    answer = await live.chat(session, user("hi"), **fields)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    live.says("whole")
    again = await live.chat(session, user("hi"), choice["message"], user("go on"), **fields)
    return again.status, "" if again.status == 200 else again.json()["error"]["code"]


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize("text", ["cut in mid-sen", "cut", " \n", "é"])
async def test_a_cut_reply_is_closed_and_what_nobody_sampled_is_masked(live: Live, history: str, text: str) -> None:
    session = await live.open(history=history)
    assert await go_on(live, session, text) == (200, "")
    view = (await live.call("GET", f"/sessions/{session}")).json()
    first, second = view["records"]
    assert (first["status"], second["status"]) == ("truncated", "completed")
    prompt, sampled, then = first["request"]["input_ids"], output_ids(first), second["request"]["input_ids"]
    assert then[: len(prompt) + len(sampled)] == prompt + sampled  # append-only
    closing = then[len(prompt) + len(sampled) :]
    assert closing[0] == END
    assert view["metadata"]["tito_session_mismatch"] == []
    made = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()
    (sample,) = made["samples"]
    assert (sample["tokens"], sample["status"]) == (then + output_ids(second), "completed")
    assert sample["metadata"]["truncated_turns"] == 1
    mask = [1] * len(sampled) + [0] * len(closing) + [1] * len(output_ids(second))
    assert sample["loss_mask"] == mask
    assert all(bool(logprob) <= bool(one) for logprob, one in zip(sample["rollout_log_probs"], mask, strict=True))


@pytest.mark.parametrize("cut_first", [1, 2, 3])
async def test_a_session_goes_on_after_one_cut_reply_after_another(live: Live, cut_first: int) -> None:
    session = await live.open()
    messages = [user("hi")]
    for number in range(4):
        live.says(f"reply {number}", finish=LENGTH if number < cut_first else None)
        answer = await live.chat(session, *messages)
        assert answer.status == 200, answer.body
        messages += [answer.json()["choices"][0]["message"], user("go on")]
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert [record["status"] for record in view["records"]] == ["truncated"] * cut_first + ["completed"] * (
        4 - cut_first
    )
    assert view["metadata"]["tito_session_mismatch"] == []
    assert view["metadata"]["accumulated_token_ids"].count(END) == 9  # the system message, and four of each other


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize(
    ("text", "where"),
    [("<think>\nlet me", "reasoning"), ('<tool_call>\n{"name": "add", "argu', "tool call"), ("<think>", "reasoning")],
)
async def test_what_was_cut_inside_reasoning_or_a_call_is_refused_and_can_be_generated_again(
    live: Live, history: str, text: str, where: str
) -> None:
    session = await live.open(history=history)
    live.says(text, finish=LENGTH)
    answer = await live.chat(session, user("hi"), tools=[ADD])
    message = answer.json()["choices"][0]["message"]
    again = await live.chat(session, user("hi"), message, user("go on"), tools=[ADD])
    error = again.json()["error"]
    assert (again.status, error["code"], error["param"]) == (409, "truncated_generation", "/messages/1")
    assert where in error["message"]
    assert len(live.engine.requests) == 1
    live.says("whole")
    assert (await live.chat(session, user("hi"), tools=[ADD])).status == 200


async def test_what_looks_like_a_call_is_text_to_a_request_without_tools(live: Live) -> None:
    assert await go_on(live, await live.open(), '<tool_call>\n{"name": "add", "argu') == (200, "")
    done = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert await go_on(live, await live.open(), done, tools=[ADD]) == (200, "")
    assert await go_on(live, await live.open(), "<think>\nhm\n</think>\n\nSo", tools=[ADD]) == (200, "")


async def test_a_session_says_itself_whether_it_goes_on_and_else_the_server(live: Live, serve: Serve) -> None:
    refused = (409, "truncated_generation")
    assert await go_on(live, await live.open(after_length="refuse"), "cut") == refused
    answer = await live.call("POST", "/sessions", {"after_length": "sometimes"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/after_length")
    async with serve(after_length=AfterLength.REFUSE) as other:
        assert await go_on(other, await other.open(after_length="close"), "cut") == (200, "")
        assert await go_on(other, await other.open(), "cut") == refused


async def test_a_completion_goes_on_after_a_cut_turn_by_its_ids(live: Live) -> None:
    session = await live.open()
    live.says("cut", finish=LENGTH)
    await live.chat(session, user("hi"))
    line = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["accumulated_token_ids"]
    live.says("whole")
    answer = await live.call("POST", f"/sessions/{session}/v1/completions", {"prompt": [*line, END]})
    assert answer.status == 200, answer.body
    assert live.engine.requests[1].prompt.num_kept == len(line)


async def test_a_client_that_changed_the_cut_text_replaces_the_turn_instead(live: Live) -> None:
    session = await live.open()
    live.says("cut", finish=LENGTH)
    await live.chat(session, user("hi"))
    live.says("whole")
    assert (await live.chat(session, user("hi"), assistant("other"), user("go on"))).status == 200
    assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1
