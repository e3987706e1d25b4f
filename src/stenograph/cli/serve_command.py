"""`stenograph serve`: reports at once on its start, while the program and the model are loaded; then runs the server.

An early fault (a port in use, a missing model) stops it before anything is loaded.
"""

import asyncio
import contextlib
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from stenograph.cli.commands import EXIT_INTERRUPTED
from stenograph.cli.logs import logged, logging_to_stderr, progress_of
from stenograph.cli.settings_table import CommandSettings
from stenograph.core.loaded import entry
from stenograph.http.listen import listen
from stenograph.model.fetch import resolve_model

if TYPE_CHECKING:
    from stenograph.http.part import Part

log = logging.getLogger(__name__)


def serve(options: dict[str, Any]) -> int:
    """Run the server until a signal ends it; returns the exit code. Raises StartupError and StorageLost."""
    return logged(options, _serve)


def _serve(settings: CommandSettings) -> int:
    if settings.exit_with is not None:
        entry("stenograph.cli.exit_with:stop_with")(settings.exit_with)
    has_weights, progress = settings.loads_weights, progress_of(settings)
    with listen(settings.host, settings.port) as listener:
        path = resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=has_weights)
        log.info("loading the model %s from %s, for the engine %s", settings.model, path, settings.engine)
        parts: tuple[Part, ...] = entry("stenograph.cli.parts:PARTS")  # with them comes most of the program
        if settings.workers > 1:
            listener.close()  # each worker has a socket of its own on the port
            ended_by = entry("stenograph.cluster.parent:serve_workers")(
                settings,
                parts,
                announce=_announce,
                progress=progress,
                in_worker=partial(_log_of_worker, settings),
            )
        else:
            run = entry("stenograph.http.server:serve")
            processes = next(
                (entry(one.processes)(settings) for one in parts if one.processes and one.is_wanted(settings)), None
            )
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                ended_by = runner.run(
                    run(listener, settings, announce=_announce, progress=progress, parts=parts, processes=processes)
                )
    return EXIT_INTERRUPTED if ended_by is signal.SIGINT else 0


def _log_of_worker(settings: CommandSettings, number: int) -> contextlib.AbstractContextManager[None]:
    return logging_to_stderr(settings, worker=number)


def _announce(line: str) -> None:
    """The ready line goes to stdout, alone, for a script to wait for."""
    print(line, flush=True)
