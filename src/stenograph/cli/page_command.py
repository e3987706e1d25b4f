"""`stenograph export --html`: one session as one file, a page that opens anywhere and fetches nothing.

The session is that of a folder, for which the model's tokenizer and template are read, or of a running server. Exit
codes: 0, or 2 (a StartupError) where there is no file.
"""

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

import msgspec

from stenograph.cli.export_command import ExportOptions, export_folder, new_file, write_file
from stenograph.cli.session_calls import CallFailed, ServerCalls
from stenograph.cli.settings_table import load_settings
from stenograph.cli.store_commands import found_session
from stenograph.console.assets import FILES
from stenograph.console.documents import (
    SessionDocuments,
    session_documents,
    shape_path,
    tokens_path,
    told_path,
    turns_path,
    vocabulary_path,
)
from stenograph.console.page import file_page
from stenograph.console.tokens import MAX_PAGE_TOKENS, TOKEN_BYTES
from stenograph.console.views import MAX_TURNS
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError
from stenograph.core.types import SessionId
from stenograph.export.line_drift import line_drift
from stenograph.export.lines import leaves
from stenograph.http.app import renderer_of
from stenograph.http.session_routes import drift_reports
from stenograph.http.settings import Settings
from stenograph.http.storage import model_mark
from stenograph.model.fetch import resolve_model
from stenograph.model.files import load_model_files
from stenograph.model.progress import Progress, StreamProgress
from stenograph.store.places import looks_at

EXIT_WRITTEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Options of a page: the session of that id, in a folder or on a server whose URL is given, goes into `html`."""

    source: str
    session: str
    html: Path


def export(options: dict[str, Any]) -> int:
    """Do what `export` is to do; returns the exit code. Raises StartupError."""
    progress, config = StreamProgress(sys.stderr), options.pop("config")
    if (page := _page_options(options)) is not None:
        return export_page(page, load_settings(options, os.environ, config), out=sys.stdout, progress=progress)
    options["folder"] = Path(options["folder"])
    wanted = ExportOptions(**{field.name: options.pop(field.name) for field in fields(ExportOptions)})
    return export_folder(wanted, load_settings(options, os.environ, config), out=sys.stdout, progress=progress)


def _page_options(options: dict[str, Any]) -> PageOptions | None:
    """The options of `export --html`, taken out of all of them; None if samples are wanted. Raises StartupError."""
    session, html = options.pop("session"), options.pop("html")
    if html is None and session is None:
        if options["out"] is None:
            raise StartupError(
                "export: name the file to write: --out FILE for samples, --session ID --html FILE for a page"
            )
        return None
    if html is None or session is None:
        raise StartupError("export: a page is one session's: it takes both --session ID and --html FILE")
    given = {field.name: options.pop(field.name) for field in fields(ExportOptions)}
    if given["out"] is not None or given["include_side"] or given["include_failed"]:
        raise StartupError("export: --html writes a page, --out samples: leave one of them out, with its flags")
    return PageOptions(source=given["folder"], session=session, html=html)


def export_page(options: PageOptions, settings: Settings, *, out: TextIO, progress: Progress) -> int:
    """Write the page; returns the exit code. Raises StartupError."""
    with new_file(options.html, flag="--html") as target:
        if options.source.startswith(("http://", "https://")):
            told = _of_server(options, settings.api_key[0] if settings.api_key else None, progress)
        else:
            told = _of_folder(options, settings, progress)
        files = {name: file.text for name, file in FILES.items()}
        page = file_page(files, session_id=told.session_id, documents=told.documents, contents=told.contents)
        write_file(target, iter((page.encode(),)))
    out.write(f"session {told.session_id}: {options.html} ({len(page.encode()) / 1e6:.1f} MB)\n")
    return EXIT_WRITTEN


def _of_folder(options: PageOptions, settings: Settings, progress: Progress) -> SessionDocuments:
    """The session as a folder has it. Raises StartupError, also if it was made with another model."""
    with looks_at(options.source) as looked:
        files = load_model_files(
            resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=False)
        )
        session = found_session(looked, SessionId(options.session), model=model_mark(files))
        if session.refusal is not None:
            raise StartupError(str(session.refusal))
        renderer = renderer_of(settings, files, SystemClock())
        reports = {leaf.id: line_drift(leaf, renderer) for leaf in leaves(session.nodes)}
        drift = drift_reports(session.id, [(leaf, reports[leaf.id]) for leaf in leaves(session.nodes)])
        return session_documents(session, renderer.tokenizer, reports, drift)


def _of_server(options: PageOptions, api_key: str | None, progress: Progress) -> SessionDocuments:
    """The session as a running server tells it. Raises StartupError."""
    calls, id_ = ServerCalls(options.source, api_key), options.session
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
        raise StartupError(f"what answers at {options.source} is no Stenograph server with a console") from error
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
