"""What came before is looked up in the session's history, not in the client's copy of it."""

from typing import Any

import pytest

from .conftest import Live, assistant, user

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


async def call_id_of(live: Live, session: str) -> str:
    """Have the model call a tool; the call's id."""
    live.says(CALL)
    answer = await live.chat(session, user("1+2?"), tools=[ADD])
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    return str(call["id"])


@pytest.mark.parametrize("history", ["linear", "tree"])
async def test_a_tools_result_follows_a_call_that_a_role_content_client_left_out(live: Live, history: str) -> None:
    session = await live.open(matcher="role_content", history=history)
    result = {"role": "tool", "tool_call_id": await call_id_of(live, session), "content": "3"}
    live.says("3")
    answer = await live.chat(session, user("1+2?"), assistant(""), result, tools=[ADD])
    assert answer.status == 200, answer.body
    before, after = (len(request.prompt.ids) for request in live.engine.requests)
    assert after > before
    assert live.engine.requests[1].prompt.num_kept == before + len(
        live.engine.drawn[live.engine.requests[0].request_id]
    )


async def test_a_result_that_answers_no_stored_call_is_refused_where_it_stands_in_the_request(live: Live) -> None:
    session = await live.open()
    live.says("no call")
    await live.chat(session, user("hi"))
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    answer = await live.chat(session, user("hi"), assistant("no call"), user("more"), result)
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unrenderable_message", "/messages/3/role")
