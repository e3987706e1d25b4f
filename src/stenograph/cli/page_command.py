"""`stenograph export --html`: one session as one file: a page that opens anywhere and fetches nothing.

The session is of a folder (then the model's tokenizer and template are read) or of a running server. Exit codes: 0, or
2 (a StartupError) where there is no file.
"""

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from stenograph.cli.export_command import ExportOptions, export_folder
from stenograph.cli.places import looks_at
from stenograph.cli.served_page import served_session, write_page
from stenograph.cli.session_calls import ServerCalls
from stenograph.cli.settings_table import load_settings
from stenograph.cli.store_commands import found_session
from stenograph.cli.whole_file import new_file
from stenograph.console.documents import SessionDocuments, session_documents
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError
from stenograph.core.types import SessionId
from stenograph.export.lines import leaves
from stenograph.http.line_drifts import drift_reports
from stenograph.http.loaded_model import model_mark, renderer_of
from stenograph.http.settings import Settings
from stenograph.model.fetch import resolve_model
from stenograph.model.files import load_model_files
from stenograph.model.progress import Progress, StreamProgress
from stenograph.session.facts import line_drift

EXIT_WRITTEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Options of a page: the session of an id, in a folder or on the server at a URL, goes into `html`."""

    source: str
    session: str
    html: Path


def export(options: dict[str, Any]) -> int:
    """Carry out `export`; returns the exit code. Raises StartupError."""
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
            calls = ServerCalls(options.source, settings.api_key[0] if settings.api_key else None)
            told = served_session(calls, options.session, progress)
        else:
            told = _of_folder(options, settings, progress)
        size = write_page(target, told)
    out.write(f"session {told.session_id}: {options.html} ({size / 1e6:.1f} MB)\n")
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
