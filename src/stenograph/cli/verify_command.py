"""`stenograph verify`: checks a model's template to be append-only, and TITO to be exact for it.

Owns the exit codes. An unreadable file and an unreachable engine are a StartupError, as everywhere.
"""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import uvloop

from stenograph.cli.logs import logged, progress_of
from stenograph.cli.settings_table import CommandSettings
from stenograph.core.clock import SystemClock
from stenograph.core.day import Day
from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry
from stenograph.engine.base import EngineState
from stenograph.families.load import Loaded, family_made_for, load_renderer
from stenograph.http.engines import make_engine
from stenograph.http.loaded_model import template_kwargs_of
from stenograph.http.settings import Settings
from stenograph.model.fetch import resolve_model
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.model.progress import Progress
from stenograph.offload.body_slots import BodySlots
from stenograph.text.append_proof import Proof
from stenograph.verify.live_session import LiveSession, play
from stenograph.verify.report import found_lines, live_lines
from stenograph.verify.verify import Verification, verify

EXIT_HOLDS = 0
EXIT_DOES_NOT_HOLD = 1
EXIT_NOT_CHECKED = 2

_SHOWN_CHARS = 200


def verify_command(options: dict[str, Any]) -> int:
    """Carry out `verify`; returns the exit code. Raises StartupError."""
    return logged(options, partial(_verify, is_named=options["engine"] is not None))


def _verify(settings: CommandSettings, *, is_named: bool) -> int:
    """Verify the model of the settings, also with a session where the engine `is_named` or has an address.

    Raises StartupError: the model cannot be read, or the engine not be started or reached.
    """
    plays, out, progress = is_named or bool(settings.engine_url), sys.stdout, progress_of(settings)
    needs_weights = plays and settings.loads_weights
    path = resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=needs_weights)
    files = load_model_files(path)
    template_kwargs_of(settings)
    loaded = load_renderer(files, settings.family, strftime_now=Day.of(SystemClock().wall()))
    holds = verify_files(files, loaded, settings, out=out, progress=progress)
    if plays and holds:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            live = runner.run(_played(settings, files, path, loaded, progress))
        out.writelines(f"{line}\n" for line in ("", *live_lines(live)))
        if live.engine_failed:
            out.write("\nThe engine failed, so its sessions were not checked.\n")
            return EXIT_NOT_CHECKED
        holds = live.holds
        out.write(f"\n{'The session held.' if holds else 'The session did not hold.'}\n")
    elif plays:
        out.write("No session was played, because the template failed.\n")
    return EXIT_HOLDS if holds else EXIT_DOES_NOT_HOLD


def verify_files(files: ModelFiles, loaded: Loaded, settings: Settings, *, out: TextIO, progress: Progress) -> bool:
    """Verify a template without an engine, and write the findings to `out`; returns whether all holds."""
    renderer, kwargs = loaded.renderer, settings.chat_template_kwargs
    family = renderer.family
    out.write(f"model {files.path}\nfamily {family.name}: {family.summary}\n")
    if kwargs:
        out.write(f"chat_template_kwargs {dict(kwargs)}\n")
    out.writelines(f"note: {note}\n" for note in loaded.notes)
    found = verify(renderer, kwargs, told=_teller(progress, "rendering conversations"))
    out.writelines(f"{line}\n" for line in ("", *found_lines(found), ""))
    plain = renderer.prove()
    why_not = _why_not(found, plain)
    if not why_not:
        out.write("TITO is exact for this model.\n")
        return True
    out.write(f"TITO is not exact for this model: {why_not}\n")
    is_by_kwargs = bool(kwargs) and plain.holds
    if not is_by_kwargs and (better := family_made_for(files, family)):
        out.write(f"--family {better} is made for it.\n")
    return False


def _why_not(found: Verification, plain: Proof) -> str:
    """The reason not to start a server with it; empty where all holds. `plain` is the proof without arguments."""
    if found.failures and found.proof.holds:
        return f"{found.failures[0].check.value}: {found.failures[0].problem[:_SHOWN_CHARS]}"
    if found.proof.holds and not plain.holds:
        return f"without chat_template_kwargs {plain.why_not}"
    rewrites = found.proof.rewrites
    return f"it is not append-only: {rewrites[0].why}" if rewrites else found.proof.why_not


async def _played(settings: Settings, files: ModelFiles, path: Path, loaded: Loaded, progress: Progress) -> LiveSession:
    """A session with the engine, started and ended here."""
    clock = SystemClock()
    engine = make_engine(
        settings, files, path, BodySlots(settings.body_slots), clock, parts=entry("stenograph.cli.parts:PARTS")
    )
    where = f"at {', '.join(settings.engine_url)}" if settings.engine_url else "in a process of its own"
    try:
        await engine.start()
        if (health := engine.health()).state is not EngineState.READY:
            why = health.detail or health.state
            raise StartupError(f"the engine {where} does not answer: {why}; start it, or correct --engine-url")
        return await play(
            loaded.renderer,
            engine,
            where=where,
            clock=clock,
            timeout_s=settings.request_timeout_s,
            kwargs=settings.chat_template_kwargs,
            told=_teller(progress, "playing a session"),
        )
    finally:
        await engine.aclose()


def _teller(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(what, done, total)
