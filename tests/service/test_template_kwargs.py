"""Template arguments: the server's, a session's over them, a request's over both; the date is the session's."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stenograph.core.errors import StartupError
from stenograph.core.settings import Settings
from stenograph.http.app import make_renderer, template_kwargs_of
from stenograph.render.model_files import ModelFiles
from stenograph.render.renderer import Renderer
from stenograph.testing.scripted_engine import Script, ScriptedEngine
from stenograph.testing.tiny import tiny_tokenizer_json

from .conftest import END, running, user

TEMPLATE = (
    "{% if strftime_now is defined %}[{{ strftime_now('%Y-%m-%d') }}]{% endif %}[{{ tone }}|{{ place }}]"
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
    with pytest.raises(StartupError, match=r"chat_template_kwargs: .*'messages'"):
        template_kwargs_of(Settings(chat_template_kwargs={"messages": []}))


def test_an_argument_that_the_template_does_not_look_at_is_told(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    make_renderer(files, "template", kwargs={"tone": "a", "enable_thinking": False})
    assert [record.getMessage() for record in caplog.records if "does not look at" in record.getMessage()] == [
        "the chat template does not look at 'enable_thinking', which chat_template_kwargs sets"
    ]
