"""Other people's web pages: which of their requests are refused, and what pages that are allowed get."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import pytest

from .conftest import Live, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]

UI = "https://ui.example:8443"


async def test_a_name_that_another_site_made_ours_is_refused_on_every_route(live: Live) -> None:
    for method, path in (("POST", "/abort_request"), ("GET", "/health"), ("GET", "/no-route"), ("POST", "/sessions")):
        answer = await live.call(method, path, host="evil.example:8080")
        assert (answer.status, answer.json()["error"]["code"]) == (403, "forbidden")
        assert "--allow-host" in answer.json()["error"]["message"]
    page = (await live.call("GET", "/metrics")).body.decode()
    assert 'stenograph_errors_total{code="forbidden"} 4.0' in page


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost.:1", 200),
        ("app.localhost:8080", 200),
        ("127.3.2.1:8080", 200),
        ("[::1]:8080", 200),
        ("box.local", 200),
        ("Box.Local:80", 200),
        ("0.0.0.0", 403),
        ("192.168.0.1", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("evillocalhost", 403),
        ("", 403),
    ],
)
async def test_on_a_loopback_address_the_host_is_this_machine_or_allowed(serve: Serve, host: str, status: int) -> None:
    async with serve(allow_host=("box.local",)) as live:
        assert (await live.call("GET", "/health", host=host)).status == status


async def test_two_hosts_are_both_asked(live: Live) -> None:
    address = urlsplit(live.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: evil.example\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).split()[1] == b"403"
    writer.close()


async def test_a_server_on_another_address_is_asked_for_under_any_name_unless_names_are_given(serve: Serve) -> None:
    async with serve(host="0.0.0.0") as live:
        assert (await live.call("GET", "/health", host="stenograph.default.svc")).status == 200
        assert (await live.call("GET", "/health", host="a", origin="http://b")).status == 403
    async with serve(host="0.0.0.0", allow_host=("ours",)) as live:
        assert (await live.call("GET", "/health", host="ours:80")).status == 200
        assert (await live.call("GET", "/health", host="theirs")).status == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", ""])
async def test_a_page_of_another_site_is_refused_and_told_nothing(serve: Serve, origin: str) -> None:
    async with serve(allow_origin=(UI,)) as live:
        for method, path in (("POST", "/abort_request"), ("OPTIONS", "/sessions"), ("GET", "/sessions")):
            answer = await live.call(method, path, origin=origin, access_control_request_method="POST")
            assert answer.status == 403
            assert "access-control-allow-origin" not in answer.headers
        assert (await live.call("GET", "/sessions")).json()["sessions"] == []


async def test_a_page_of_the_server_itself_needs_no_leave(live: Live) -> None:
    for origin in (live.url, live.url.replace("http:", "https:")):
        answer = await live.call("POST", "/sessions", {}, origin=origin)
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_an_allowed_page_has_its_preflight_without_a_key_and_reads_answers_errors_and_streams(
    serve: Serve,
) -> None:
    async with serve(allow_origin=(UI,), api_key=("key",)) as live:
        preflight = await live.call(
            "OPTIONS",
            "/v1/chat/completions",
            origin=UI,
            access_control_request_method="POST",
            access_control_request_headers="authorization,content-type,x-session-id",
            access_control_request_private_network="true",
        )
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == UI
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-session-id"
        assert preflight.headers["access-control-allow-private-network"] == "true"
        live.says("a")
        live.says("b")
        answers = [
            await live.call("POST", "/sessions", {}, origin=UI),  # 401
            await live.call("GET", "/no-route", origin=UI, authorization="Bearer key"),
            *[
                await live.call(
                    "POST",
                    "/v1/chat/completions",
                    {"messages": [user("hi")], "stream": stream},
                    origin=UI,
                    authorization="Bearer key",
                )
                for stream in (False, True)
            ],
        ]
        assert [answer.status for answer in answers] == [401, 404, 200, 200]
        assert answers[-1].body.endswith(b"data: [DONE]\n\n")
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == UI
            assert answer.headers["vary"] == "Origin"
            assert "server-timing" in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in answer.headers


CHAT = {"messages": [user("hi")]}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hi"}),
    ("/sessions", {}),
    ("/abort_request", {"abort_all": True}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "json", ""]
)
async def test_a_body_of_another_type_is_refused_with_what_to_do(
    live: Live, path: str, body: dict[str, object], content_type: str
) -> None:
    answer = await live.call("POST", path, body, content_type=content_type)
    assert (answer.status, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "-H 'content-type: application/json'" in answer.json()["error"]["message"]
    assert live.engine.requests == []


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]
)
async def test_json_has_several_names(live: Live, content_type: str) -> None:
    live.says("a")
    assert (await live.call("POST", "/v1/chat/completions", CHAT, content_type=content_type)).status == 200


async def raw(live: Live, *lines: str, body: bytes) -> int:
    """The status of a request with these headers and no others."""
    address = urlsplit(live.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = "\r\n".join([*lines, f"host: {address.netloc}", f"content-length: {len(body)}", "connection: close", "", ""])
    writer.write(head.encode() + body)
    status = int((await reader.read()).split()[1])
    writer.close()
    return status


async def test_a_body_that_says_nothing_of_its_type_is_taken_but_not_from_a_page(live: Live) -> None:
    live.says("a")
    body, post = json.dumps(CHAT).encode(), "POST /v1/chat/completions HTTP/1.1"
    assert await raw(live, post, body=body) == 200
    assert await raw(live, post, f"origin: {live.url}", body=body) == 415


async def test_an_empty_body_needs_no_type(live: Live) -> None:
    session = await live.open()
    for path in ("/sessions", f"/sessions/{session}/abort"):
        assert await raw(live, f"POST {path} HTTP/1.1", body=b"") == 200
        assert await raw(live, f"POST {path} HTTP/1.1", "content-type: text/plain", body=b"") == 200
