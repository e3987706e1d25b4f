"""Template arguments: the server's, a session's over them, a request's over both; the date is the session's."""

import io
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.llama import write_tiny_folder
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.day import Day
from stenograph.core.errors import StartupError
from stenograph.core.messages import Message, Role
from stenograph.core.settings import Switch
from stenograph.http.loaded_model import load_model, make_renderer, template_kwargs_of
from stenograph.http.settings import Settings
from stenograph.model.files import ModelFiles
from stenograph.model.progress import StreamProgress
from stenograph.text.renderer import Renderer

from .conftest import END, running, user

TEMPLATE = (
    "[{{ tone }}|{{ place }}]"
    "{{ messages | length if forgets }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(),
        chat_template=TEMPLATE,
        bos_token=None,
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=320,
        max_context_tokens=4096,
        architecture="llama",
    )


@pytest.fixture(scope="module")
def dated(files: ModelFiles) -> ModelFiles:
    """The same with a template that writes the date."""
    return replace(files, chat_template="[{{ strftime_now('%Y-%m-%d') }}]" + TEMPLATE)


async def prompts(renderer: Renderer, server: dict[str, object], *asked: tuple[Any, dict[str, Any]]) -> list[str]:
    """What stands before the turns in the prompts that come of (session's arguments or None, request's fields)."""
    engine = ScriptedEngine(vocab_size=320, max_context_tokens=4096, model=lambda _: Script(ids=(9, END)))
    async with (
        running(engine, renderer, chat_template_kwargs=server) as (url, _),
        aiohttp.ClientSession() as client,
    ):
        for of_session, fields in asked:
            route = url
            if of_session is not None:
                async with client.post(f"{url}/sessions", json={"chat_template_kwargs": of_session}) as response:
                    route = f"{url}/sessions/{(await response.json())['session_id']}"
            body = {"messages": [user("hi")], **fields}
            async with client.post(f"{route}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
    texts = [renderer.tokenizer.decode(request.prompt.ids) for request in engine.requests]
    return [text.partition("<|im_start|>")[0] for text in texts]


async def test_a_request_s_argument_wins_over_its_session_s_and_that_over_the_server_s(files: ModelFiles) -> None:
    renderer = make_renderer(files, "template", kwargs={"tone": "server", "place": "server"})
    by_request = {"chat_template_kwargs": {"tone": "request"}}
    seen = await prompts(
        renderer,
        {"tone": "server", "place": "server"},
        (None, {}),
        (None, by_request),
        ({}, {}),
        ({"tone": "session"}, {}),
        ({"tone": "session"}, by_request),
        ({"place": ""}, by_request),
    )
    assert seen == [
        "[server|server]",
        "[request|server]",
        "[server|server]",
        "[session|server]",
        "[request|server]",
        "[request|]",
    ]


async def test_without_any_of_the_server_s_a_session_s_and_a_request_s_are_what_there_is(files: ModelFiles) -> None:
    renderer = make_renderer(files, "template")
    seen = await prompts(renderer, {}, (None, {}), ({"tone": "session"}, {}))
    assert seen == ["[|]", "[session|]"]


def test_a_server_s_argument_that_makes_the_template_rewrite_stops_the_start(files: ModelFiles) -> None:
    with pytest.raises(
        StartupError, match=r"with chat_template_kwargs {'forgets': True}, cannot be used: .*append-only"
    ):
        make_renderer(files, "template", kwargs={"forgets": True})
    make_renderer(files, "template", kwargs={"forgets": False})


def test_an_argument_that_the_server_alone_sets_stops_the_start() -> None:
    with pytest.raises(StartupError, match=r"--chat-template-kwargs: .*'messages'"):
        template_kwargs_of(Settings(chat_template_kwargs={"messages": []}))


def test_an_argument_that_the_template_does_not_look_at_is_told(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    make_renderer(files, "template", kwargs={"tone": "a", "enable_thinking": False})
    assert [record.getMessage() for record in caplog.records if "does not use" in record.getMessage()] == [
        "the chat template does not use 'enable_thinking', which --chat-template-kwargs sets"
    ]


async def test_a_session_keeps_its_date_and_a_new_one_has_that_of_its_own_day(dated: ModelFiles) -> None:
    clock = ManualClock(wall=1_700_000_000.0)
    first = Day.of(clock.wall())
    engine = ScriptedEngine(vocab_size=320, max_context_tokens=4096, model=lambda _: Script(ids=(70, END)))
    renderer = make_renderer(dated, "template", today=Day.of(clock.wall() - 86400))
    async with running(engine, renderer, clock=clock) as (url, _), aiohttp.ClientSession() as client:
        session = f"{url}/sessions/{await opened(client, url)}"
        reply = await said(client, session, user("hi"))
        clock.advance(3 * 86400)
        assert await said(client, session, user("hi")) == reply
        await said(client, session, user("hi"), reply, user("more"))
        async with client.get(session) as response:
            view = await response.json()
        await said(client, f"{url}/sessions/{await opened(client, url)}", user("hi"))
        await said(client, url, user("hi"))
    texts = [renderer.tokenizer.decode(request.prompt.ids) for request in engine.requests]
    later = Day.of(clock.wall())
    assert later.date == first.date + timedelta(days=3)
    dates = [text[1 : text.index("]")] for text in texts]
    assert dates == [str(first.date)] * 3 + [str(later.date)] * 2
    assert texts[0] == texts[1]
    assert view["metadata"]["tito_session_mismatch"] == []


async def test_a_client_sets_no_date_but_by_the_template_s_own_arguments(files: ModelFiles) -> None:
    engine = ScriptedEngine(vocab_size=320, max_context_tokens=4096)
    async with running(engine, make_renderer(files, "template")) as (url, _), aiohttp.ClientSession() as client:
        body = {"messages": [user("hi")], "chat_template_kwargs": {"strftime_now": "2020-01-01"}}
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "/chat_template_kwargs/strftime_now"


@pytest.mark.parametrize(("switch", "num_special"), [(Switch.OFF, 3), (Switch.ON, 4)])
def test_the_settings_say_whether_a_control_token_in_text_is_one(
    tmp_path: Path, switch: Switch, num_special: int
) -> None:
    folder = write_tiny_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = Settings(
        model=str(folder), family="template", allow_special_in_text=switch, chat_template_kwargs={"tone": "a"}
    )
    renderer = load_model(settings, ManualClock(), StreamProgress(io.StringIO()), weights=False).renderer
    ids = renderer.render([Message(role=Role.USER, content="a<|im_end|>b")], [], {})
    assert sum(token_id in renderer.tokenizer.special_ids for token_id in ids) == num_special


async def opened(client: aiohttp.ClientSession, url: str) -> str:
    async with client.post(f"{url}/sessions", json={}) as response:
        return str((await response.json())["session_id"])


async def said(client: aiohttp.ClientSession, url: str, *messages: dict[str, Any]) -> dict[str, Any]:
    """The reply, as a client sends it back."""
    async with client.post(f"{url}/v1/chat/completions", json={"messages": list(messages)}) as response:
        answer = await response.json()
    assert response.status == 200, answer
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


async def test_a_template_that_writes_nothing_is_an_error_of_the_messages(files: ModelFiles) -> None:
    renderer = make_renderer(replace(files, chat_template="{{ '' }}"), "auto")
    engine = ScriptedEngine(vocab_size=320, max_context_tokens=4096)
    async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as client:
        body = {"model": "tiny", "messages": [user("hi")]}
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert "writes nothing for these messages" in (await answer.json())["error"]["message"]
