"""The command line: `stenograph serve`, `verify`, `fetch` and `bench`. Flags are the rows of the settings table.

Owns exit codes: 0 when all went well, 1 when `verify` found that it does not hold, 2 for whatever stops the start (one
line on stderr), 130 for an interrupt.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvloop

from stenograph import __version__
from stenograph.cli.bench_command import BENCH, become_bench
from stenograph.cli.verify_command import VERIFY, VERIFY_SETTINGS, verify_model
from stenograph.core.errors import StartupError
from stenograph.core.settings import SETTINGS, Setting, Settings, load_settings
from stenograph.embedded.fetch import resolve_model
from stenograph.embedded.progress import StreamProgress
from stenograph.http.app import serve

EXIT_STARTUP = 2
EXIT_INTERRUPTED = 130

FETCH_SETTINGS = ("model", "cache_dir")
"""The settings that `fetch` reads."""


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for a bad flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_STARTUP, f"stenograph: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    become_bench(sys.argv[1:] if arguments is None else arguments)
    options = vars(_parser().parse_args(arguments))
    command, config = options.pop("command"), options.pop("config")
    try:
        settings = load_settings(options, os.environ, config)
        _start_logging(settings)
        if command == VERIFY:
            plays = bool(settings.engine_url) or options["engine"] is not None
            return verify_model(settings, plays=plays, out=sys.stdout, progress=StreamProgress(sys.stderr))
        if command == "fetch":
            print(resolve_model(settings.model, cache_dir=settings.cache_dir, progress=StreamProgress(sys.stderr)))
        else:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(settings, announce=_announce, progress=StreamProgress(sys.stderr)))
    except StartupError as error:
        print(f"stenograph: {error}", file=sys.stderr)
        return EXIT_STARTUP
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stenograph", description="A session server that keeps the exact tokens of agent rollouts.")
    parser.add_argument("--version", action="version", version=f"stenograph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    serving = commands.add_parser("serve", help="run the server", description="Run the server until SIGTERM.")
    fetching = commands.add_parser(
        "fetch", help="fetch the model's weights", description="Fetch the model into the cache and print its path."
    )
    verifying = commands.add_parser(
        VERIFY,
        help="check that a model's sessions are exact in tokens",
        description="Check that the model's chat template is append-only, and that its sessions are exact in tokens:"
        " every kind of conversation is rendered, bridged and parsed. With --engine (and --engine-url, of one that is a"
        " server) a session is played with it too. Exit code: 0 it holds, 1 it does not, 2 something cannot be read.",
    )
    commands.add_parser(BENCH, help="measure the server: see `stenograph bench --help`", add_help=False)
    for setting in SETTINGS:
        _add_flag(serving, setting)
        if setting.name in FETCH_SETTINGS:
            _add_flag(fetching, setting)
        if setting.name in VERIFY_SETTINGS:
            _add_flag(verifying, setting)
    for command in (serving, fetching, verifying):
        command.add_argument("--config", type=Path, metavar="FILE.toml", help="settings file; flags win over it")
    return parser


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    shown = f"{setting.doc} Default: {setting.default}{f' {setting.unit}' if setting.unit else ''}."
    parser.add_argument(
        setting.flag,
        dest=setting.name,
        action="append" if setting.kind.repeatable else "store",
        metavar="|".join(setting.kind.choices) or setting.name.upper(),
        help=shown.replace("%", "%%"),
    )


def _start_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=str(settings.log_level).upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop lines say nothing that ours do not


def _announce(line: str) -> None:
    """The ready line goes to stdout, alone, so that a script can wait for it."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
