"""A late system message where the template has no frame for it: shown, recorded, counted, and never in the way."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.families import TEMPLATE
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer

from .conftest import END, Live, assistant, running, user
from .messages_kit import checked, post

MOVING = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that says all system messages first."""


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


@pytest.fixture(scope="module")
def moving() -> Renderer:
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(),
        chat_template=MOVING,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=320,
        max_context_tokens=4096,
        architecture="llama",
    )
    return make_renderer(files, TEMPLATE.name)


@pytest.fixture
async def live(moving: Renderer) -> AsyncIterator[Live]:
    engine = ScriptedEngine(vocab_size=moving.tokenizer.vocab_size, max_context_tokens=4096)
    async with running(engine, moving) as (url, manager), aiohttp.ClientSession() as client:
        yield Live(url=url, engine=engine, renderer=moving, manager=manager, client=client)


def rewrite(index: int, text: str) -> dict[str, str]:
    after = f"<system-reminder>\n{text}\n</system-reminder>"
    return {"rule": "late-system", "where": f"/messages/{index}/content", "from": text, "to": after}


@pytest.mark.parametrize("respells", [False, True], ids=["known", "respelled"])
async def test_a_session_goes_on_over_late_system_messages_and_each_turn_records_its_own(
    live: Live, respells: bool
) -> None:
    session = await live.open()
    messages = [system("Be brief."), user("1+2?"), system("Agents: none.")]
    turns = [[assistant("3"), system("Tasks are unused."), user("1+3?")], [assistant("4"), user("1+4?")]]
    for text, more in zip(("3", "4", "5"), ([], *turns), strict=True):
        messages += more
        if respells and more:
            messages[1] = {**messages[1], "content": [{"type": "text", "text": "1+2?"}], "name": None}
        live.says(text)
        answer = await live.chat(session, *messages)
        assert answer.status == 200, answer.body
    ids = [list(request.prompt.ids) for request in live.engine.requests]
    assert live.renderer.tokenizer.decode(ids[2]) == (
        "Be brief.<|im_start|>user\n1+2?\n\n<system-reminder>\nAgents: none.\n</system-reminder><|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n<system-reminder>\nTasks are unused.\n</system-reminder>\n\n1+3?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n1+4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[2][: len(ids[1])] == ids[1]
    told = (await live.call("GET", f"/sessions/{session}")).json()
    assert [record["request"].get("rewrites") for record in told["records"]] == [
        [rewrite(2, "Agents: none.")],
        [rewrite(4, "Tasks are unused.")],
        None,
    ]
    assert told["metadata"]["rewrites"] == {"late-system": 2}
    assert told["metadata"]["tito_session_mismatch"] == []
    ledger = (await live.call("GET", f"/sessions/{session}/ledger")).json()
    assert [row["rewrites"] for row in ledger["requests"]] == [["late-system"], ["late-system"], []]
    scraped = (await live.call("GET", "/metrics")).body.decode()
    assert 'stenograph_rewrites_total{rule="late-system"} 2' in scraped


async def test_an_error_points_at_the_clients_own_message(live: Live) -> None:
    session = await live.open()
    live.says("3")
    first = [user("1+2?"), system("a"), system("b")]
    assert (await live.chat(session, *first)).status == 200
    tool = {"role": "tool", "content": "x", "tool_call_id": "c"}
    answer = await live.chat(session, *first, assistant("3"), system("c"), user("on"), tool)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/messages/6/role")
    answer = await live.chat(session, *first, assistant("3"))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/messages/3")


async def test_a_chat_without_a_session_is_shown_in_the_same_way(live: Live) -> None:
    live.says("3")
    assert (await live.chat(None, user("1+2?"), assistant("2"), system("No."), user("And?"))).status == 200
    text = live.renderer.tokenizer.decode(list(live.engine.requests[0].prompt.ids))
    assert "<|im_start|>user\n<system-reminder>\nNo.\n</system-reminder>\n\nAnd?<|im_end|>" in text


async def test_a_late_system_message_of_messages_is_pointed_at_in_its_clients_body(live: Live) -> None:
    session = await live.open()
    result = {"type": "tool_result", "tool_use_id": "c", "content": "none"}
    messages: list[dict[str, Any]] = [user("1+2?"), {"role": "system", "content": "Agents: none."}]
    live.says("3")
    checked(await post(live, session, *messages, system="Be brief."))
    messages += [assistant("3"), user("and?"), {"role": "system", "content": [{"type": "text", "text": "Soon."}]}]
    live.says("4")
    checked(await post(live, session, *messages, system="Be brief."))
    told = (await live.call("GET", f"/sessions/{session}")).json()
    assert [[one["where"] for one in record["request"]["rewrites"]] for record in told["records"]] == [
        ["/messages/1/content"],
        ["/messages/4/content"],
    ]
    messages += [assistant("4"), {"role": "user", "content": [result]}]
    refused = await post(live, session, *messages, system="Be brief.")
    assert refused.json()["error"]["param"] == "/messages/6/content/0/type"
