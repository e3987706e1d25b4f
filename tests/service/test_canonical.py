"""Rules that drop and pin, in sessions of a real server: what the model sees, what goes on, and what is recorded."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from stenograph.core.errors import StartupError

from .conftest import Live, assistant, user
from .messages_kit import checked, post

Serve = Callable[..., AbstractAsyncContextManager[Live]]

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.707; cc_entrypoint=sdk-cli;"


def parts(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def prompt_text(live: Live, index: int) -> str:
    return live.renderer.tokenizer.decode(list(live.engine.requests[index].prompt.ids))


async def told(live: Live, session: str) -> Any:
    return (await live.call("GET", f"/sessions/{session}")).json()


async def chat(live: Live, session: str | None, *messages: dict[str, Any], **fields: Any) -> None:
    live.says("ok")
    answer = await live.chat(session, *messages, **fields)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
@pytest.mark.parametrize("respells", [False, True], ids=["known", "respelled"])
async def test_a_billing_line_is_in_no_prompt_and_in_each_record(live: Live, history: str, respells: bool) -> None:
    session = await live.open(history=history)
    system = parts("system", BILLING, "You are an agent.")
    await chat(live, session, system, user("a"))
    first = {**user("a"), **({"name": None} if respells else {})}
    await chat(live, session, system, first, assistant("ok"), user("b"))
    one, other = live.engine.requests
    assert prompt_text(live, 0).startswith("<|im_start|>system\nYou are an agent.<|im_end|>\n<|im_start|>user\na")
    assert list(other.prompt.ids)[: len(one.prompt.ids)] == list(one.prompt.ids)
    view = await told(live, session)
    dropped = {"rule": "cc-billing", "where": "/messages/0/content/0", "from": BILLING, "to": ""}
    assert [record["request"]["rewrites"] for record in view["records"]] == [[dropped], [dropped]]
    assert view["records"][0]["request"]["messages"][0]["content"] == "You are an agent."
    assert view["metadata"]["rewrites"] == {"cc-billing": 2}
    assert view["metadata"]["tito_session_mismatch"] == []
    rows = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    assert [row["rewrites"] for row in rows] == [["cc-billing"], ["cc-billing"]]


async def test_another_billing_line_is_the_same_opening_unless_rules_are_off(live: Live) -> None:
    for options, num_strands in (({}, 1), ({"canonical": "default"}, 1), ({"canonical": "off"}, 2)):
        session = await live.open(**options)
        await chat(live, session, parts("system", BILLING, "Be brief."), user("a"))
        more = (user("a"), assistant("ok"), user("b"))
        await chat(live, session, parts("system", BILLING.replace("707", "f9d"), "Be brief."), *more)
        assert len((await told(live, session))["metadata"]["strands"]) == num_strands
    assert BILLING in prompt_text(live, -2)


async def test_a_chat_without_a_session_is_under_the_servers_rules(live: Live, serve: Serve) -> None:
    async with serve(canonical="off") as off:
        for one, has_line in ((live, False), (off, True)):
            await chat(one, None, parts("system", BILLING, "Be brief."), user("a"))
            assert (BILLING in prompt_text(one, 0)) is has_line


CODEX = "<environment_context>\n  <cwd>/{}</cwd>\n  <current_date>2026-11-{}</current_date>\n</environment_context>"


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
async def test_a_pinned_opening_goes_on_as_it_was_stored(live: Live, history: str) -> None:
    session = await live.open(history=history, canonical="cx-date,cx-cwd")
    system = {"role": "system", "content": "Be brief."}
    await chat(live, session, system, user(CODEX.format("a", 21)))
    line = [user(CODEX.format("a", 22)), assistant("ok"), user("b")]
    await chat(live, session, system, *line)
    line += [assistant("ok"), user("c")]
    await chat(live, session, system, *line)
    ids = [list(request.prompt.ids) for request in live.engine.requests]
    assert ids[1][: len(ids[0])] == ids[0]
    assert ids[2][: len(ids[1])] == ids[1]
    view = await told(live, session)
    assert [len(record["request"].get("rewrites", [])) for record in view["records"]] == [0, 1, 1]
    assert view["records"][2]["request"]["rewrites"] == [
        {
            "rule": "cx-date",
            "where": "/messages/1/content",
            "from": "<current_date>2026-11-22</current_date>",
            "to": "<current_date>2026-11-21</current_date>",
        }
    ]
    assert view["metadata"]["discarded"]["turns"] == 0
    assert view["metadata"]["tito_session_mismatch"] == []


async def test_without_its_name_a_pin_changes_nothing(live: Live) -> None:
    session = await live.open()
    await chat(live, session, user(CODEX.format("a", 21)))
    await chat(live, session, user(CODEX.format("a", 22)), assistant("ok"), user("b"))
    assert len((await told(live, session))["metadata"]["strands"]) == 2


async def test_a_spelling_that_a_strand_has_is_left_to_it(live: Live) -> None:
    session = await live.open(canonical="cx-date")
    script = live.says("first", paused=True)
    live.says("second", paused=True)
    one = asyncio.ensure_future(live.chat(session, user(CODEX.format("a", 21))))
    await live.engine.begun(1)
    other = asyncio.ensure_future(live.chat(session, user(CODEX.format("a", 22))))
    await live.engine.begun(2)
    live.engine.step_turn(live.engine.requests[0].request_id, len(script.ids) + 1)
    assert (await one).status == 200
    busy = await live.chat(session, user(CODEX.format("a", 22)))
    assert busy.status == 409, "it belongs to the strand that runs, not to the one that is stored"
    live.engine.step_turn(live.engine.requests[1].request_id, 100)
    assert (await other).status == 200
    await chat(live, session, user(CODEX.format("a", 22)), assistant("second"), user("on"))
    assert [node.depth for node in live.manager.sessions.get(session).nodes] == [1, 1, 2]


async def test_an_operators_own_rules_hold_where_they_are_named(serve: Serve, tmp_path: Path) -> None:
    rules = tmp_path / "side.toml"
    rules.write_text(
        '[[drop]]\nname = "ours"\nclient = "ours"\nblock = "secret"\nnum_blocks = 2\n'
        '[[pin]]\nname = "run"\nclient = "ours"\nplace = "system"\nmatch = "run [0-9]+"\ndefault = true\n'
    )
    async with serve(side_rules=rules, canonical="ours") as live:
        session = await live.open()
        await chat(live, session, parts("system", "secret 1", "It is run 1."), user("a"))
        await chat(live, session, parts("system", "secret 2", "It is run 2."), user("a"), assistant("ok"), user("b"))
        assert "secret" not in prompt_text(live, 1)
        assert (await told(live, session))["metadata"]["rewrites"] == {"ours": 2, "run": 1}


async def test_a_choice_of_a_rule_that_there_is_not_is_refused(live: Live, serve: Serve) -> None:
    answer = await live.call("POST", "/sessions", {"canonical": "cc_date"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/canonical")
    assert "Did you mean 'cc-date'?" in answer.json()["error"]["message"]
    with pytest.raises(StartupError, match="--canonical: there is no rule 'hat'"):
        async with serve(canonical="hat"):
            raise AssertionError


@pytest.mark.parametrize("canonical", ["default", "off"])
async def test_claude_codes_billing_line_is_dropped_from_messages_and_from_their_count(
    live: Live, canonical: str
) -> None:
    session = await live.open(canonical=canonical)
    blocks = [{"type": "text", "text": text} for text in (BILLING, "You are an agent.", "Be brief.")]
    live.says("ok")
    messages = [user("a")]
    counted = await post(live, session, *messages, system=blocks, path="/v1/messages/count_tokens", max_tokens=None)
    checked(await post(live, session, *messages, system=blocks))
    other = [{"type": "text", "text": BILLING.replace("707", "363")}, *blocks[1:]]
    live.says("ok")
    messages += [assistant("ok"), user("b")]
    checked(await post(live, session, *messages, system=other if canonical == "default" else blocks))
    assert counted.json() == {"input_tokens": len(live.engine.requests[0].prompt.ids)}
    view = await told(live, session)
    assert len(view["metadata"]["strands"]) == 1
    text = "" if canonical == "default" else f"{BILLING}\n\n"
    assert prompt_text(live, 1).startswith(f"<|im_start|>system\n{text}You are an agent.\n\nBe brief.<|im_end|>")
    rewrites = [record["request"].get("rewrites") for record in view["records"]]
    if canonical == "off":
        assert rewrites == [None, None]
    else:
        assert [[(one["rule"], one["where"], one["from"]) for one in some] for some in rewrites] == [
            [("cc-billing", "/system/0", BILLING)],
            [("cc-billing", "/system/0", other[0]["text"])],
        ]
