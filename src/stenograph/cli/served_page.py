"""The page of a session on a running server: asked of it, and written as one file.

A server is not loaded for it.
"""

from pathlib import Path
from typing import Any

import msgspec

from stenograph.cli.session_calls import CallFailed, ServerCalls
from stenograph.console.assets import FILES
from stenograph.console.documents import (
    SessionDocuments,
    shape_path,
    tokens_path,
    told_path,
    turns_path,
    vocabulary_path,
)
from stenograph.console.page import file_page
from stenograph.console.tokens import MAX_PAGE_TOKENS, TOKEN_BYTES
from stenograph.console.views import MAX_TURNS
from stenograph.core.errors import StartupError
from stenograph.core.whole_file import new_file, write_file
from stenograph.model.progress import Progress


def write_page(target: Path, told: SessionDocuments) -> int:
    """Write the page of a session; returns its number of bytes. Raises OSError."""
    files = {name: file.text for name, file in FILES.items()}
    page = file_page(files, session_id=told.session_id, documents=told.documents, contents=told.contents).encode()
    write_file(target, (page,))
    return len(page)


def write_served_page(calls: ServerCalls, session_id: str, html: Path) -> str:
    """Write the page of a server's session into a new file; returns a line about it. Raises StartupError."""
    with new_file(html, flag="--html") as target:
        size = write_page(target, served_session(calls, session_id, silent))
    return f"page in {html} ({size / 1e6:.1f} MB)"


def silent(what: str, done: int, total: int) -> None:
    """Say nothing of the progress."""


def served_session(calls: ServerCalls, id_: str, progress: Progress) -> SessionDocuments:
    """The session as a running server tells it. Raises StartupError."""
    try:
        shape = calls.content(shape_path(id_))
        known = msgspec.json.decode(shape, type=_KnownShape)
        documents = {shape_path(id_): shape, told_path(id_, "ledger"): _ledger(calls, id_)}
        for what in ("why", "drift"):
            documents[told_path(id_, what)] = calls.content(told_path(id_, what))
        contents: dict[str, bytes] = {}
        for index, line in enumerate(known.lines):
            progress("asking", index, len(known.lines))
            documents[turns_path(id_, line.leaf)] = _turns(calls, turns_path(id_, line.leaf), line.num_turns)
            contents[tokens_path(id_, line.leaf)] = _tokens(calls, tokens_path(id_, line.leaf), line.num_tokens)
        if known.vocabulary is not None:
            path = vocabulary_path(known.vocabulary["hash"])
            contents[path] = calls.content(path)
        progress("asking", len(known.lines), len(known.lines))
    except CallFailed as error:
        raise StartupError(str(error)) from error
    except msgspec.DecodeError as error:
        raise StartupError(f"what answers at {calls.url} is no Stenograph server with a console") from error
    return SessionDocuments(session_id=id_, documents=documents, contents=contents)


class _KnownLine(msgspec.Struct):
    leaf: int
    num_turns: int
    num_tokens: int


class _KnownShape(msgspec.Struct):
    lines: list[_KnownLine]
    vocabulary: dict[str, Any] | None


def _turns(calls: ServerCalls, path: str, num: int) -> bytes:
    """All turns of a line, as one page."""
    page: dict[str, Any] = {}
    turns: list[Any] = []
    for start in range(0, max(num, 1), MAX_TURNS):
        page = msgspec.json.decode(calls.content(f"{path}&start={start}&limit={MAX_TURNS}&whole=true"))
        turns += page["turns"]
    return msgspec.json.encode({**page, "start": 0, "turns": turns})


def _tokens(calls: ServerCalls, path: str, num: int) -> bytes:
    """All tokens of a line, as one page."""
    columns: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
    for start in range(0, num, MAX_PAGE_TOKENS):
        part = calls.content(f"{path}&start={start}&limit={MAX_PAGE_TOKENS}")
        size = len(part) // TOKEN_BYTES
        for column, begin, end in zip(columns, (0, 4, 8), (4, 8, 9), strict=True):
            column.append(part[begin * size : end * size])
    return b"".join(piece for column in columns for piece in column)


def _ledger(calls: ServerCalls, session_id: str) -> bytes:
    rows = calls.ledger(session_id)
    return msgspec.json.encode({"session_id": session_id, "requests": rows, "num_requests": len(rows), "next": None})
