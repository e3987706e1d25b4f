"""A session's media are found by their hash, by nobody without the session, and as long as it is there: also after a
restart, and as its samples name them."""

import asyncio
import gc
import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from stenograph.client import BadPayload, Client, ServerRefused
from stenograph.session import kept_media
from stenograph.session.kept_media import keep_media
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer
from tests.store_laws import medium

from .conftest import Live, assistant, user
from .memory_store import MemoryStore
from .test_custody import check
from .test_durable import folder
from .test_images import image, part, rig_of, samples, seeing, seen, sees, text

__all__ = ["check", "folder", "seeing"]  # fixtures

pytestmark = pytest.mark.timeout(600)
Serve = Callable[..., AbstractAsyncContextManager[Live]]

PICTURE, OTHER = medium(b"\x89PNG a picture", "image/jpeg"), medium(b"another")


async def kept(live: Live, item: Any = PICTURE, **options: Any) -> str:
    """A session with a medium, as a turn keeps it before its commit."""
    session = await live.open(**options)
    await keep_media(live.manager.sessions.get(session), live.manager.sessions.storage, [item])
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


async def test_after_a_restart_a_session_has_its_images_and_goes_on_with_them(
    seeing: Renderer, folder: DataFolder, tmp_path: Path, check: Any
) -> None:
    sha256 = hashlib.sha256(image(1)).hexdigest()
    store = await SqliteStore.open(folder)
    async with rig_of(seeing, store=store) as rig:
        session = await rig.session()
        assert (await seen(rig, session)).status == 200
        before = await samples(rig, session)
    await store.aclose()
    store = await SqliteStore.open(folder)
    async with rig_of(seeing, store=store) as rig:
        answer = await rig.call("GET", f"/sessions/{session}/media/{sha256}")
        assert (answer.status, answer.body) == (200, image(1))
        assert await samples(rig, session) == before
        (drift,) = (await rig.call("GET", f"/sessions/{session}/drift")).json()["lines"]
        assert drift["mismatches"] == []
        rig.says("more")
        answer = await rig.chat(session, sees(text("a"), part(1)), assistant("seen"), sees(part(2)))
        assert answer.status == 200, answer.body
        (sample,) = await samples(rig, session)
        assert sample["tokens"][: len(before[0]["tokens"])] == before[0]["tokens"]
        assert len(sample["media"]) == 2
        content = (await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})).body
    await store.aclose()
    shutil.copytree(folder.path, tmp_path / "copy")
    code, lines = await asyncio.to_thread(check, tmp_path / "copy", content)
    assert code == 0, lines
    store = await SqliteStore.open(folder)
    async with rig_of(seeing, store=store, scale_out=False) as rig:
        chat = [sees(text("a"), part(1)), assistant("seen"), sees(part(2)), assistant("more"), user("and?")]
        answer = await rig.chat(session, *chat)
        assert answer.status == 400, answer.body
        assert "vllm" in answer.json()["error"]["message"]
    await store.aclose()


Row = dict[str, Any]
WRONG_ROWS: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "another hash": (lambda rows: [{**rows[0], "sha256": "0" * 64}, rows[1]], "media row 0 is image 0000"),
    "another place": (lambda rows: [rows[0], {**rows[1], "start": rows[1]["start"] + 1}], "media row 1 is image"),
    "another length": (lambda rows: [{**rows[0], "length": rows[0]["length"] - 1}, rows[1]], "media row 0 is image"),
    "another kind": (lambda rows: [{**rows[0], "kind": "audio"}, rows[1]], "media row 0 is audio"),
    "another order": (lambda rows: rows[::-1], "media row 0 is image"),
    "one less": (lambda rows: rows[:1], "media row 1 is absent"),
    "none": (lambda _: [], "media row 0 is absent"),
    "one more": (lambda rows: [*rows, rows[1]], "the store has absent"),
}


async def test_each_change_of_a_sample_s_media_is_found(
    seeing: Renderer, folder: DataFolder, tmp_path: Path, check: Any
) -> None:
    pa = pytest.importorskip("pyarrow")
    store = await SqliteStore.open(folder)
    async with rig_of(seeing, store=store) as rig:
        session = await rig.session()
        rig.says("seen", "more")
        chat = [sees(text("a"), part(1)), assistant("seen"), sees(text("bb"), part(2))]
        assert (await rig.chat(session, *chat[:1])).status == 200
        assert (await rig.chat(session, *chat)).status == 200
        contents = {
            kind: (await rig.call("POST", f"/sessions/{session}/samples", {"format": kind})).body
            for kind in ("json", "safetensors", "arrow")
        }
    await store.aclose()
    folder.close()
    for kind, content in contents.items():
        code, lines = await asyncio.to_thread(check, folder.path, content)
        assert code == 0, (kind, lines)
    for change, said in WRONG_ROWS.values():
        changed = json.loads(contents["json"])
        (sample,) = changed["samples"]
        sample["media"] = change(sample["media"])
        code, lines = await asyncio.to_thread(check, folder.path, json.dumps(changed).encode())
        assert (code, said in lines[0]) == (1, True), lines
    table = pa.ipc.open_stream(contents["arrow"]).read_all()
    at = table.schema.get_field_index("media")
    changed = table.set_column(at, "media", pa.array([None], table.schema.field("media").type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, changed.schema) as writer:
        writer.write_table(changed)
    code, lines = await asyncio.to_thread(check, folder.path, sink.getvalue().to_pybytes())
    assert (code, "media row 0 is absent" in lines[0]) == (1, True), lines
