"""Hostile images at the server's door: nothing is decoded there, and no client names a hash."""

import base64
import hashlib
import struct
import subprocess
import sys
import zlib
from typing import Any

import pytest

from standins.vllm_server import VLLMServer
from stenograph.text.renderer import Renderer

from .images_kit import NUM_IDS, seeing_renderer
from .test_images import part, rig_of, sees
from .test_vllm_sessions import Rig

LIBRARIES = ("PIL", "torchvision", "cv2", "imageio", "torch", "transformers")


@pytest.fixture(scope="module")
def seeing() -> Renderer:
    return seeing_renderer()


def bomb() -> bytes:
    """A PNG of less than 4 KB that says 30,000 × 30,000 pixels, 2.5 GiB in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(20 * 90_001), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def shown(content: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return sees({"type": "image_url", "image_url": {"url": url}})


async def asked(rig: Rig, message: dict[str, Any]) -> tuple[int, VLLMServer]:
    rig.says("seen")
    answer = await rig.chat(await rig.session(), message)
    return answer.status, rig.vllm


async def test_a_decompression_bomb_is_passed_on_as_it_came(seeing: Renderer) -> None:
    content = bomb()
    assert len(content) < 4096
    async with rig_of(seeing, vocab_size=NUM_IDS) as rig:
        status, vllm = await asked(rig, shown(content))
        assert status == 200
        (sent,) = vllm.requests[-1].json["content_parts"]
        assert base64.b64decode(sent["url"].partition(",")[2]) == content
        assert sent["uuid"] == hashlib.sha256(content).hexdigest(), "the hash is the server's own"


async def test_what_is_no_picture_at_all_is_the_engine_s_to_refuse(seeing: Renderer) -> None:
    async with rig_of(seeing, vocab_size=NUM_IDS) as rig:
        assert (await asked(rig, shown(b"no picture")))[0] == 200


def test_a_server_of_images_loads_no_library_that_decodes_any() -> None:
    """Every module of the way of an image, with all that they import."""
    names = (
        "stenograph.dialects.common.media stenograph.session.media stenograph.session.kept_media"
        " stenograph.http.fetch_media stenograph.http.media_route stenograph.store.media stenograph.export.media"
        " stenograph.http.app"
    )
    code = f"import sys, {', '.join(names.split())}; print([one for one in {LIBRARIES} if one in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["uuid", "hash", "sha256", "mm_hash"])
async def test_a_hash_of_the_client_s_is_refused(seeing: Renderer, name: str) -> None:
    """It would be the name of another client's picture in a cache."""
    async with rig_of(seeing, vocab_size=NUM_IDS) as rig:
        told = "0" * 64
        for beside in ({**part(1), name: told}, {**part(1), "image_url": {**part(1)["image_url"], name: told}}):
            assert (await asked(rig, sees(beside)))[0] == 400
        assert rig.vllm.requests == []
