"""Where a session is found: its addresses, the headers and keys that name it, and what a key is not shown to."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import aiohttp
import pytest

from standins.scripted_engine import ScriptedEngine
from stenograph.core.types import Chunk
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.transport import HttpReply
from stenograph.http.mounts import TRUSTED_PROXIES
from stenograph.http.proxy_route import query_without_key
from stenograph.text.renderer import Renderer

from .conftest import Live, running, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]


class KeepingEngine(ScriptedEngine):
    """An engine that is a server, and keeps what it is asked to forward."""

    def __init__(self) -> None:
        super().__init__(vocab_size=320, max_context_tokens=4096)
        self.forwarded: list[tuple[str, Mapping[str, str]]] = []

    @property
    def forwards(self) -> bool:
        return True

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> HttpReply:
        self.forwarded.append((target, dict(headers)))
        return HttpReply(status=200, content_type="application/json", headers=(), body=b"{}")

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("nothing is sampled here")


async def test_a_session_has_an_address_with_v1_and_one_without(live: Live) -> None:
    opened = (await live.call("POST", "/sessions")).json()
    assert opened["root_url"] == f"{live.url}/sessions/{opened['session_id']}"
    assert opened["base_url"] == opened["root_url"] + "/v1"


async def test_v1_twice_is_v1_once(live: Live) -> None:
    session = await live.open()
    for prefix in ("", f"/sessions/{session}"):
        live.says("fine")
        chat = await live.call("POST", f"{prefix}/v1/v1/chat/completions", {"messages": [user("a")]})
        models = await live.call("GET", f"{prefix}/v1/v1/models")
        assert (chat.status, models.status) == (200, 200)
        assert models.json()["data"][0]["id"] == "tiny"
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert [record["path"] for record in view["records"]] == ["/v1/chat/completions"]
    ledger = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    assert [row["path"] for row in ledger] == ["/v1/chat/completions"]
    for path in ("/v1/v1/v1/models", "/v1/v1", f"/sessions/{session}/v1/v1/embeddings"):
        assert (await live.call("GET", path)).status in (403, 404)


async def test_a_session_s_address_and_its_hello_answer_head_without_a_body(live: Live) -> None:
    session = await live.open()
    for path in (f"/sessions/{session}", f"/sessions/{session}/api/hello"):
        answer = await live.call("HEAD", path)
        assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "0")
    for path in ("/sessions/none", "/sessions/none/api/hello"):
        assert (await live.call("HEAD", path)).status == 404
    assert (await live.call("GET", f"/sessions/{session}/api/hello")).status == 403


def carried(key: str) -> list[tuple[dict[str, str], str]]:
    """Each way in which a request may carry a key: its headers, and its query."""
    return [
        ({"authorization": f"Bearer {key}"}, ""),
        ({"x_api_key": key}, ""),
        ({"x_goog_api_key": key}, ""),
        ({}, f"?key={key}"),
        ({"x_api_key": "dummy"}, f"?alt=sse&key={key}"),
    ]


@pytest.mark.parametrize("way", range(5))
async def test_without_keys_a_credential_names_the_session(live: Live, way: int) -> None:
    session = await live.open()
    headers, query = carried(session)[way]
    live.says("fine")
    answer = await live.call("POST", f"/v1/chat/completions{query}", {"messages": [user("a")]}, **headers)
    assert answer.status == 200
    assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1


@pytest.mark.parametrize("way", range(5))
async def test_with_keys_a_credential_only_authenticates(serve: Serve, way: int) -> None:
    async with serve(api_key=("secret",)) as live:
        opened = await live.call("POST", "/sessions", None, x_goog_api_key="secret")
        session = opened.json()["session_id"]
        headers, query = carried("secret")[way]
        live.says("fine")
        live.says("fine")
        body = {"messages": [user("a")]}
        stateless = await live.call("POST", f"/v1/chat/completions{query}", body, **headers)
        named = await live.call("POST", f"/v1/chat/completions{query}", body, x_session_id=session, **headers)
        assert (stateless.status, named.status) == (200, 200)
        view = await live.call("GET", f"/sessions/{session}", authorization="Bearer secret")
        assert len(view.json()["records"]) == 1
        for wrong, wrong_query in carried(session):
            refused = await live.call("POST", f"/v1/chat/completions{wrong_query}", body, **wrong)
            assert (refused.status, refused.json()["error"]["code"]) == (401, "unauthorized")
        assert (await live.call("HEAD", f"/sessions/{session}")).status == 401


async def test_a_header_that_names_no_session_is_404_whatever_the_key_names(live: Live) -> None:
    session = await live.open()
    answer = await live.call(
        "POST", f"/v1/chat/completions?key={session}", {"messages": [user("a")]}, x_session_id="ses_other"
    )
    assert (answer.status, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_no_key_goes_on_to_the_engine(renderer: Renderer) -> None:
    engine = KeepingEngine()
    async with running(engine, renderer, api_key=("secret",)) as (url, _), aiohttp.ClientSession() as client:
        headers = {"x-goog-api-key": "secret", "authorization": "Bearer secret", "accept": "text/plain"}
        query = "?a=%20b&key=secret&k%65y=secret&keys=c"
        async with client.get(f"{url}/v1/embeddings{query}", headers=headers) as answer:
            assert answer.status == 200
    ((target, passed),) = engine.forwarded
    assert urlsplit(target).query.replace("+", "%20") == "a=%20b&keys=c"
    assert passed["accept"] == "text/plain"
    assert "secret" not in f"{target} {passed}"


def test_a_query_without_a_key_stays_as_it_came() -> None:
    assert query_without_key(b"a=1&&b=%E4&key") == "a=1&&b=%E4"
    assert query_without_key(b"") == ""


async def test_a_key_in_the_query_is_not_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve(api_key=("secret-key",)) as live:
        for path in ("/v1/chat/completions", "/sessions/none/v1/chat/completions", "/nothing", "/v1/nothing"):
            await live.call("POST", f"{path}?key=secret-key", {"messages": []})
            await live.call("POST", f"{path}?key=secret-key", b"{")
    assert "secret-key" not in caplog.text


@pytest.mark.parametrize(
    ("trusted", "scheme"), [(None, "https"), ("127.0.0.1", "https"), ("*", "https"), ("10.0.0.1", "http")]
)
async def test_a_proxy_that_is_trusted_says_how_clients_reach_the_server(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    trusted: str | None,
    scheme: str,
) -> None:
    if trusted is None:
        monkeypatch.delenv(TRUSTED_PROXIES, raising=False)
    else:
        monkeypatch.setenv(TRUSTED_PROXIES, trusted)
    async with serve() as live:
        opened = (await live.call("POST", "/sessions", {}, x_forwarded_proto="https")).json()
    assert opened["root_url"].startswith(f"{scheme}://127.0.0.1")
