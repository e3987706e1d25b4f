"""Google's own package against the server: its types take every reply and event, and it goes on with its history."""

import json
from typing import Any

import pydantic
import pytest
from google import genai
from google.genai import errors, types

from standins.scripted_engine import Script
from stenograph.core.errors import UpstreamUnreachable

from .conftest import Live, output_ids
from .test_gemini import CALL, LOOK, THOUGHT, ask, said, stream

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

RUN = (f"{THOUGHT}I look.{CALL}", f"{CALL}{CALL}", "A note.", "Bye.")
"""Replies of a run with one call, two parallel ones, a text, and a second user turn."""


def client_of(live: Live, session: str) -> genai.Client:
    options = types.HttpOptions(base_url=f"{live.url}/sessions/{session}")
    return genai.Client(api_key="none", http_options=options)


def look(at: str) -> dict[str, Any]:
    """Look somewhere."""
    return {"found": at}


@pytest.mark.parametrize("config", [{}, {"responseLogprobs": True, "logprobs": 1}])
async def test_every_reply_and_event_passes_its_types(live: Live, config: dict[str, Any]) -> None:
    for text in ("fine", "", THOUGHT, *RUN):
        fields = {"tools": [LOOK], "generationConfig": {**config, "thinkingConfig": {"includeThoughts": True}}}
        live.says(text)
        whole = await ask(live, None, said("a"), **fields)
        types.GenerateContentResponse.model_validate_json(whole.body)
        live.says(text)
        for event in await stream(live, None, said("a"), **fields):
            types.GenerateContentResponse.model_validate(event)
    counted = await ask(live, None, said("a"), method="countTokens")
    types.CountTokensResponse.model_validate_json(counted.body)
    with pytest.raises(pydantic.ValidationError):  # the types are strict
        types.GenerateContentResponse.model_validate({"id": "x"})


@pytest.mark.parametrize("streams", [False, True])
async def test_its_chat_runs_functions_and_goes_on_exactly(live: Live, streams: bool) -> None:
    session = await live.open()
    scripts = [live.says(text) for text in RUN]
    config = types.GenerateContentConfig(tools=[look], system_instruction="Be brief.", temperature=1.0, top_k=3)
    async with client_of(live, session).aio as client:
        chat = client.chats.create(model="gemini-3-pro", config=config)
        heard = []
        for message in ("What is here?", "Thanks."):
            if streams:
                events = await chat.send_message_stream(message)
                heard.append("".join([event.text or "" async for event in events]))
            else:
                heard.append((await chat.send_message(message)).text or "")
    assert [text.removeprefix("I look.") for text in heard] == ["A note.", "Bye."]
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert [output_ids(record) for record in view["records"]] == [list(script.ids) for script in scripts]
    assert len(view["metadata"]["strands"]) == 1
    (sample,) = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert sum(sample["loss_mask"]) == sum(len(script.ids) for script in scripts)


async def test_it_counts_tokens_and_gets_a_schema_s_object(live: Live) -> None:
    class Verdict(pydantic.BaseModel):
        good: bool

    session = await live.open()
    live.says('{"good": true}')
    config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Verdict)
    async with client_of(live, session).aio as client:
        counted = await client.models.count_tokens(model="m", contents="Is it?")
        reply = await client.models.generate_content(model="m", contents="Is it?", config=config)
    assert reply.parsed == Verdict(good=True)
    assert reply.usage_metadata is not None
    assert counted.total_tokens == reply.usage_metadata.prompt_token_count


async def test_it_sees_what_went_wrong(live: Live) -> None:
    session = await live.open()
    ids = tuple(live.renderer.tokenizer.encode("good day"))
    async with client_of(live, session).aio as client:
        with pytest.raises(errors.ClientError, match="exceeds the maximum number of tokens allowed") as caught:
            await client.models.generate_content(model="m", contents="x" * 5000)
        assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
        live.engine.plan(Script(ids=ids, error=UpstreamUnreachable("It broke.")))
        events = await client.models.generate_content_stream(model="m", contents="a")
        with pytest.raises(errors.APIError, match=r"It broke\."):
            [event async for event in events]


@pytest.fixture(autouse=True)
def _no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI"):
        monkeypatch.delenv(name, raising=False)


async def test_it_asks_v1_not_v1beta(live: Live) -> None:
    session = await live.open()
    live.says("fine")
    async with client_of(live, session).aio as client:
        await client.models.generate_content(model="gemini-3-pro", contents="a")
    ledger = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    assert [row["path"] for row in ledger] == ["/v1/models/gemini-3-pro:generateContent"]
    assert "google-genai-sdk" in json.dumps(ledger)
