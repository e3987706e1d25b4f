"""A session's media are found by their hash, by nobody without the session, and as long as it is there."""

import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from stenograph.client import BadPayload, Client, ServerRefused
from stenograph.session import kept_media
from stenograph.session.kept_media import keep_media
from tests.store_laws import medium

from .conftest import Live
from .memory_store import MemoryStore

pytestmark = pytest.mark.timeout(60)
Serve = Callable[..., AbstractAsyncContextManager[Live]]

PICTURE, OTHER = medium(b"\x89PNG a picture", "image/jpeg"), medium(b"another")


async def kept(live: Live, item: Any = PICTURE, **options: Any) -> str:
    """A session with a medium, as a turn keeps it before its commit."""
    session = await live.open(**options)
    storage = live.manager.sessions.storage
    await keep_media(live.manager.sessions.get(session), None if storage is None else storage.store, [item])
    return session


@pytest.mark.parametrize("has_store", [False, True])
async def test_a_client_gets_a_session_s_media_by_hash(serve: Serve, has_store: bool) -> None:
    async with serve(store=MemoryStore() if has_store else None) as live:
        session, other = await kept(live), await kept(live, OTHER)
        path = f"/media/{PICTURE.ref.sha256}"
        answer = await live.call("GET", f"/sessions/{session}{path}")
        assert (answer.status, answer.body) == (200, b"\x89PNG a picture")
        assert answer.headers["content-type"] == "image/jpeg"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in answer.headers["content-security-policy"]
        for absent in (f"/sessions/{other}{path}", f"/sessions/{'0' * 32}{path}", f"/sessions/{session}/media/x"):
            assert (await live.call("GET", absent)).status == 404
        await live.call("DELETE", f"/sessions/{session}")
        assert (await live.call("GET", f"/sessions/{session}{path}")).status == 404


async def test_with_keys_a_session_s_token_opens_its_own_media_alone(serve: Serve) -> None:
    async with serve(api_key=("k",)) as live:
        tokens: list[tuple[str, str]] = []
        for _ in range(2):
            opened = (await live.call("POST", "/sessions", {}, authorization="Bearer k")).json()
            await keep_media(live.manager.sessions.get(opened["session_id"]), None, [PICTURE])
            tokens.append((opened["session_id"], opened["token"]))
        (session, token), (_, others) = tokens
        path = f"/sessions/{session}/media/{PICTURE.ref.sha256}"
        statuses = [
            (await live.call("GET", path, authorization=f"Bearer {key}")).status
            for key in (token, "k", others, "wrong")
        ]
        assert statuses == [200, 200, 403, 401]
        assert (await live.call("GET", path)).status == 401


async def test_the_client_has_the_bytes_of_a_hash(serve: Serve) -> None:
    async with serve() as live, Client(live.url) as client, client.session() as session:
        await keep_media(live.manager.sessions.get(session.id), None, [PICTURE])
        assert await session.media(PICTURE.ref.sha256) == b"\x89PNG a picture"
        with pytest.raises(ServerRefused):
            await session.media(OTHER.ref.sha256)
        held = live.manager.sessions.get(session.id).media
        held[OTHER.ref.sha256] = held[PICTURE.ref.sha256]
        with pytest.raises(BadPayload, match="another hash"):
            await session.media(OTHER.ref.sha256)


async def test_in_memory_a_content_is_shared_and_goes_with_its_last_session(serve: Serve) -> None:
    async with serve() as live:
        sessions = [await kept(live) for _ in range(3)]
        held = [live.manager.sessions.get(session).media[PICTURE.ref.sha256] for session in sessions]
        assert len(set(map(id, held))) == 1
        del held
        for session in sessions:
            assert PICTURE.ref.sha256 in kept_media._HELD
            await live.call("DELETE", f"/sessions/{session}")
        gc.collect()
        assert PICTURE.ref.sha256 not in kept_media._HELD
