"""`stenograph export --html`: one session as one file, of a folder or a server, with all that the page shows."""

import asyncio
import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from standins.tiny.llama import write_tiny_folder
from stenograph.cli.main import main
from stenograph.http.loaded_model import model_mark
from stenograph.model.files import load_model_files

from .conftest import Live, assistant, user
from .console_kit import HOSTILE
from .test_durable import Serve, folder, kept

pytestmark = pytest.mark.timeout(600)

__all__ = ["folder", "kept"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny")


class Elements(HTMLParser):
    """A page's elements, and the texts of its scripts and styles, as a browser divides them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.texts.append(data)


def data_of(page: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    found = re.search(r'<script id="stenograph-data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    told = json.loads(found[1])
    return told["json"], {path: gzip.decompress(base64.b64decode(text)) for path, text in told["bytes"].items()}


async def hostile_turns(live: Live) -> str:
    session = await live.open(history="tree", metadata={"task": HOSTILE})
    live.says("one")
    assert (await live.chat(session, user(HOSTILE))).status == 200
    for reply in ("two", "three"):
        live.says(reply)
        assert (await live.chat(session, user(HOSTILE), assistant("one"), user("again"))).status == 200
    return session


def told_alike(one: dict[str, Any], other: dict[str, Any], session: str) -> None:
    """Both pages tell the same; each names its own vocabulary, and the store knows nothing of what came after it."""
    shape = f"console/api/sessions/{session}"
    for told in (one, other):
        told[shape].pop("vocabulary")
        for turn in (turn for path, page in told.items() if "/turns?" in path for turn in page["turns"]):
            assert {"receive", "decode_tokens"} <= set(turn.pop("stages_s"))
        for row in told[f"sessions/{session}/ledger"]["requests"]:
            assert row.pop("ended") >= row["received"]
    assert one == other


async def test_a_page_of_a_server_and_one_of_its_folder_are_alike(
    kept: Serve, folder: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept(mark=model_mark(load_model_files(model)), api_key=("secret",)) as live:
        live.client.headers["authorization"] = "Bearer secret"
        session = await hostile_turns(live)
        out = ["--session", session, "--html", str(tmp_path / "of-server.html")]
        assert await asyncio.to_thread(main, ["export", live.url, *out, "--api-key", "secret"]) == 0
        assert await asyncio.to_thread(main, ["export", live.url, *out[:3], str(tmp_path / "other.html")]) == 2
        assert "requires a key" in capsys.readouterr().err
    folder.close()
    arguments = ["export", str(folder.path), "--model", str(model), "--family", "smollm2", "--session", session]
    assert main([*arguments, "--html", str(tmp_path / "of-folder.html")]) == 0
    assert f"session {session}: " in capsys.readouterr().out
    pages = [(tmp_path / f"of-{name}.html").read_text() for name in ("server", "folder")]
    (told, contents), (told_of_folder, contents_of_folder) = map(data_of, pages)
    paths = [path for path in contents if "vocabulary" not in path]
    assert len(paths) == 2  # a line each
    assert [contents[path] for path in paths] == [contents_of_folder[path] for path in paths]
    told_alike(told, told_of_folder, session)
    assert told[f"sessions/{session}/ledger"]["num_requests"] == 3
    turns = told[f"console/api/sessions/{session}/turns?leaf=1"]["turns"]
    assert [turn["reply"]["content"] for turn in turns] == ["one", "two"]
    for page in pages:
        check_fetches_nothing(page)


def check_fetches_nothing(page: str) -> None:
    """The page has no address, and its policy allows its own script and style alone."""
    elements = Elements(page)
    tags = [tag for tag, _ in elements.found]
    assert (tags.count("script"), tags.count("style"), tags.count("meta")) == (3, 1, 4)
    assert set(tags) == {"html", "head", "meta", "title", "style", "body", "div", "script"}, "agents' text makes none"
    assert not any(name in ("src", "href") or name.startswith("on") for _, attrs in elements.found for name in attrs)
    (policy,) = (attrs["content"] for _, attrs in elements.found if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    scripts_and_style = [text for text in elements.texts if not text.startswith('{"session"')]
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts_and_style}
    assert hashes - {base64.b64encode(hashlib.sha256(b"\n").digest()).decode()} == allowed
    assert "\nimport " not in page


async def test_what_cannot_be_written_is_said_in_a_line(
    kept: Serve, folder: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept() as live:
        session = await hostile_turns(live)
    folder.close()
    page = tmp_path / "page.html"
    there = tmp_path / "there"
    there.write_text("kept")
    source = [str(folder.path), "--model", str(model), "--family", "smollm2"]
    for arguments, told in (
        ([*source], "name the file to write"),
        ([*source, "--html", str(page)], "both --session ID and --html FILE"),
        ([*source, "--session", session], "both --session ID and --html FILE"),
        ([*source, "--session", session, "--html", str(page), "--out", str(page)], "leave one of them out"),
        ([*source, "--session", session, "--html", str(there)], "there already"),
        ([*source, "--session", "0" * 32, "--html", str(page)], "there is no session"),
        ([*source, "--session", session, "--html", str(page)], "was made with"),  # the server's mark was another
        (["http://127.0.0.1:1", "--session", session, "--html", str(page)], "does not answer"),
    ):
        assert main(["export", *arguments]) == 2, arguments
        assert told in capsys.readouterr().err, arguments
    assert not page.exists()
    assert there.read_text() == "kept"
