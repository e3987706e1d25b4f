"""`stenograph export --html`: one session as one file: a page that opens anywhere and fetches nothing.

The session is of a folder (then the model's tokenizer and template are read) or of a running server. Exit codes: 0, or
2 (a StartupError) where there is no file.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from stenograph.cli.export_command import ExportOptions, export_folder, read_session
from stenograph.cli.places import looks_at
from stenograph.cli.served_page import served_session, write_page
from stenograph.cli.session_calls import ServerCalls
from stenograph.cli.settings_table import load_settings
from stenograph.cli.store_commands import found_rows
from stenograph.console.documents import SessionDocuments, session_documents
from stenograph.core.clock import SystemClock
from stenograph.core.errors import SessionDamaged, StartupError
from stenograph.core.types import SessionId
from stenograph.core.whole_file import new_file
from stenograph.http.line_drifts import drift_reports
from stenograph.http.loaded_model import load_model, model_mark
from stenograph.http.settings import Settings
from stenograph.model.progress import Progress, StreamProgress
from stenograph.session.facts import line_drift
from stenograph.trajectory.strand_facts import leaves

EXIT_WRITTEN = 0


def export(options: dict[str, Any]) -> int:
    """Carry out `export`; returns the exit code. Raises StartupError."""
    session, html, config = options.pop("session"), options.pop("html"), options.pop("config")
    wanted = {field.name: options.pop(field.name) for field in fields(ExportOptions)}
    _check(session, html, wanted)
    settings, progress = load_settings(options, os.environ, config), StreamProgress(sys.stderr)
    if html is not None:
        return _export_page(wanted["folder"], session, html, settings, progress)
    wanted["folder"] = Path(wanted["folder"])
    return export_folder(ExportOptions(**wanted), settings, out=sys.stdout, progress=progress)


def _check(session: str | None, html: Path | None, wanted: Mapping[str, Any]) -> None:
    """Raise StartupError unless either samples are wanted or a page."""
    if html is None and session is None:
        if wanted["out"] is None:
            raise StartupError(
                "export: name the file to write: --out FILE for samples, --session ID --html FILE for a page"
            )
    elif html is None or session is None:
        raise StartupError("export: a page is one session's: it takes both --session ID and --html FILE")
    elif wanted["out"] is not None or wanted["include_side"] or wanted["include_failed"]:
        raise StartupError("export: --html writes a page, --out samples: leave one of them out, with its flags")


def _export_page(source: str, session_id: str, html: Path, settings: Settings, progress: Progress) -> int:
    """Write the page of a session, in a folder or on the server at a URL; returns the exit code. Raises
    StartupError."""
    with new_file(html, flag="--html") as target:
        if source.startswith(("http://", "https://")):
            calls = ServerCalls(source, settings.api_key[0] if settings.api_key else None)
            told = served_session(calls, session_id, progress)
        else:
            told = _of_folder(source, session_id, settings, progress)
        size = write_page(target, told)
    print(f"session {told.session_id}: {html} ({size / 1e6:.1f} MB)")
    return EXIT_WRITTEN


def _of_folder(source: str, session_id: str, settings: Settings, progress: Progress) -> SessionDocuments:
    """The session as a folder has it. Raises StartupError, also if it was made with another model."""
    with looks_at(source) as looked:
        loaded = load_model(settings, SystemClock(), progress, weights=False)
        try:
            session = read_session(found_rows(looked, SessionId(session_id)), model=model_mark(loaded.files))
        except SessionDamaged as error:
            raise StartupError(str(error)) from error
        if session.refusal is not None:
            raise StartupError(str(session.refusal))
        renderer = loaded.renderer
        reports = {leaf.id: line_drift(leaf, renderer) for leaf in leaves(session.nodes)}
        drift = drift_reports(session.id, [(leaf, reports[leaf.id]) for leaf in leaves(session.nodes)])
        return session_documents(session, renderer.tokenizer, reports, drift)
