"""The command line: `serve`, `run`, `chat`, `ray`, `verify`, `fetch`, `inspect`, `check`, `export`, `bench`.

Flags are settings' rows.

Owns exit codes: 0 when all went well, 1 when `verify`, `check` or `export` found a fault, 2 for whatever stops the
start or the check (one line on stderr), 74 when the store of `serve` has failed, 130 for an interrupt, also where
`serve` drained after it; `run` and `chat` have their own.
"""

import argparse
import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, cast

import uvloop

from stenograph import __version__
from stenograph.cli.bench_command import BENCH, become_bench
from stenograph.cli.chat_command import CHAT, CHAT_EXAMPLES, ChatOptions, chat_command
from stenograph.cli.export_command import EXPORT, EXPORT_SETTINGS, ExportOptions, export_folder
from stenograph.cli.logs import LogFormat, LogProgress, logging_to_stderr
from stenograph.cli.page_command import PageOptions, export_page
from stenograph.cli.ray_command import RAY, RAY_ACTIONS, RAY_EXAMPLES, RayOptions, ray_command
from stenograph.cli.run_command import RUN, RUN_EXAMPLES, RunOptions, run_command, split_command
from stenograph.cli.samples_check import check_samples
from stenograph.cli.settings_table import (
    SECTIONS,
    SETTINGS,
    CommandSettings,
    given_settings,
    kubernetes_variables,
    load_settings,
)
from stenograph.cli.store_commands import CHECK, INSPECT, check_folder, inspect_folder
from stenograph.cli.store_parsers import add_looking_commands, export_parser
from stenograph.cli.verify_command import VERIFY, VERIFY_SETTINGS, verify_model
from stenograph.core.errors import StartupError, StorageLost
from stenograph.core.nearest import nearest_name
from stenograph.core.settings import Setting
from stenograph.deploy.workers import EXIT_STARTUP, EXIT_STORAGE, serve_workers
from stenograph.engine.settings import EngineKind
from stenograph.http.app import serve
from stenograph.model.fetch import resolve_model
from stenograph.model.progress import StreamProgress

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130

SERVE_EXAMPLES = """\
examples:
  stenograph serve
      a small model (smollm2-135m, fetched once) in a process of its own, at http://127.0.0.1:8080
  stenograph serve --model ./Qwen3-8B --engine sglang --engine-url http://10.0.0.5:30000
      an SGLang server; --model is the folder whose tokenizer and chat template are used
  stenograph serve --model ./Qwen3-8B --engine vllm --engine-url http://a:8000 --engine-url http://b:8000
      two vLLM servers of the same model: a session stays where its prefix is cached
  STENOGRAPH_API_KEY=$(openssl rand -hex 16) stenograph serve --host 0.0.0.0 --log-format json
      open to the network, with a key, and one JSON object for each line of the log

Each flag is also a STENOGRAPH_... variable and a key of the --config file: docs/settings.md has all names.
The line `stenograph ready at URL` goes to stdout once an engine takes turns; the log goes to stderr.
SIGTERM: drain, exit code 0. Ctrl-C: drain, exit code 130. A second signal ends the drain.
"""

FETCH_SETTINGS = ("model", "engine", "engine_url", "cache_dir")
"""The settings that `fetch` reads."""

_ALL = {setting.name for setting in SETTINGS}
_SETTINGS_OF = {
    "serve": _ALL,
    RUN: _ALL,
    CHAT: _ALL,
    RAY: _ALL,
    "fetch": FETCH_SETTINGS,
    VERIFY: VERIFY_SETTINGS,
    EXPORT: EXPORT_SETTINGS,
}


_OWN_FLAGS = {
    RUN: ("--url", "--samples"),
    CHAT: ("--url", "--session"),
    CHECK: ("--samples",),
    EXPORT: ("--out", "--format", "--include-side", "--include-failed", "--session", "--html"),
    RAY: ("--ray-address", "--cpus"),
}
"""Flags that are no settings."""


class _SectionedHelp(argparse.RawDescriptionHelpFormatter):
    """Flags with their help, and the examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for a bad flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_STARTUP, f"stenograph: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    become_bench(arguments)
    arguments, agent = split_command(arguments)
    options = vars(_parsed(arguments))
    try:
        if options["command"] in (INSPECT, CHECK, EXPORT):
            return _look(options)
        if options["command"] in (RUN, CHAT, RAY):
            return _start_and_use(options, agent)
        return _run_logged(options.pop("command"), options.pop("config"), options)
    except StartupError as error:
        print(f"stenograph: {error}", file=sys.stderr)
        return EXIT_STARTUP
    except StorageLost as error:
        print(f"stenograph: {error}", file=sys.stderr)
        return EXIT_STORAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _look(options: dict[str, Any]) -> int:
    """Look at what a server kept; returns the exit code. Raises StartupError."""
    command, progress = options.pop("command"), StreamProgress(sys.stderr)
    if command == INSPECT:
        return inspect_folder(**options, out=sys.stdout)
    if command == CHECK:
        if samples := options.pop("samples"):
            return check_samples(options["folder"], samples, out=sys.stdout, progress=progress)
        return check_folder(**options, out=sys.stdout, progress=progress)
    if (page := _page_options(options)) is not None:
        settings = load_settings(options, os.environ, options.pop("config"))
        return export_page(page, settings, out=sys.stdout, progress=progress)
    options["folder"] = Path(options["folder"])
    wanted = ExportOptions(**{field.name: options.pop(field.name) for field in fields(ExportOptions)})
    settings = load_settings(options, os.environ, options.pop("config"))
    return export_folder(wanted, settings, out=sys.stdout, progress=progress)


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


def _run_logged(command: str, config: Path | None, options: Mapping[str, object]) -> int:
    """Read the settings and run a command with the log open; returns the exit code.

    Raises StartupError, but for a log in JSON: there the error is a line of the log.
    """
    settings = load_settings(options, os.environ, config)
    with logging_to_stderr(settings):
        _note_kubernetes()
        try:
            return _run(command, settings, plays=bool(settings.engine_url) or options.get("engine") is not None)
        except StartupError as error:
            if settings.log_format is not LogFormat.JSON:
                raise
            log.error("%s", error)
            return EXIT_STARTUP


def _start_and_use(options: dict[str, Any], agent: Sequence[str]) -> int:
    """Run a command that starts servers of its own; returns the exit code. Raises StartupError."""
    if options["command"] == RAY:
        return _ray(options)
    return (
        chat_command(_chat_options(options))
        if options["command"] == CHAT
        else run_command(_run_options(options, agent))
    )


def _ray(options: dict[str, Any]) -> int:
    """Do what `ray` is to do; returns the exit code. Raises StartupError, for a bad setting too."""
    del options["command"]
    wanted = RayOptions(action=options.pop("action"), address=options.pop("ray_address"), cpus=options.pop("cpus"))
    config = options.pop("config")
    given = [setting.flag for setting in SETTINGS if options[setting.name] is not None]
    if wanted.action != "up":
        if given or config is not None:
            raise StartupError(f"{given[0] if given else '--config'} is of ray up, not of ray {wanted.action}")
        return ray_command(wanted, {}, out=sys.stdout)
    settings = given_settings(options, os.environ, config)
    own = {"advertise_url": "http://each-machine"} if "store" in settings else {}
    load_settings({**options, **own}, os.environ, config)
    return ray_command(wanted, settings, out=sys.stdout)


def _run_options(options: dict[str, object], agent: Sequence[str]) -> RunOptions:
    """The options of `run`, whose settings are checked here and read again by the server that it starts.

    Raises StartupError, for a bad setting too.
    """
    url, samples = options.pop("url"), options.pop("samples")
    flags, api_key = _serve_flags(options, is_started=url is None)
    return RunOptions(
        command=agent,
        url=None if url is None else str(url),
        samples=samples if isinstance(samples, Path) else None,
        serve_flags=flags,
        api_key=api_key,
    )


def _chat_options(options: dict[str, object]) -> ChatOptions:
    """The options of `chat`, as those of `run`. Raises StartupError, for a bad setting too."""
    url, session = options.pop("url"), options.pop("session")
    flags, api_key = _serve_flags(options, is_started=url is None)
    return ChatOptions(
        url=None if url is None else str(url),
        session=None if session is None else str(session),
        serve_flags=flags,
        api_key=api_key,
    )


def _serve_flags(options: dict[str, object], *, is_started: bool) -> tuple[list[str], str | None]:
    """The flags of a server that is started by another command, and the key by which it is asked.

    Of one that runs already only the key is wanted. Raises StartupError for a bad setting.
    """
    config = options.pop("config")
    del options["command"]
    settings = load_settings(options, os.environ, config if isinstance(config, Path) else None)
    given = {setting.flag: options[setting.name] for setting in SETTINGS if options[setting.name] is not None}
    if not is_started:
        given.pop("--api-key", None)
    flags = [text for flag, value in given.items() for one in _listed(value) for text in (flag, one)]
    if config is not None and is_started:
        flags = ["--config", str(config), *flags]
    return flags, settings.api_key[0] if settings.api_key else None


def _listed(value: object) -> list[str]:
    """A flag's value or values, as they were typed."""
    return [str(one) for one in cast("list[object]", value)] if isinstance(value, list) else [str(value)]


def _run(command: str, settings: CommandSettings, *, plays: bool) -> int:
    """Run a command whose settings are read; returns the exit code. `plays`: `verify` plays a session, too."""
    progress = LogProgress() if settings.log_format is LogFormat.JSON else StreamProgress(sys.stderr)
    if command == VERIFY:
        return verify_model(settings, plays=plays, out=sys.stdout, progress=progress)
    if command == "fetch":
        # Of a repository of the hub with the weights, where the engine is to be the embedded one.
        needs_weights = settings.engine is EngineKind.EMBEDDED
        print(resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=needs_weights))
        return 0
    if settings.workers > 1:
        ended_by = serve_workers(
            settings,
            announce=_announce,
            progress=progress,
            in_worker=lambda number: logging_to_stderr(settings, worker=number),
        )
        return EXIT_INTERRUPTED if ended_by is signal.SIGINT else 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ended_by = runner.run(serve(settings, announce=_announce, progress=progress))
    return EXIT_INTERRUPTED if ended_by is signal.SIGINT else 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command, and its flags by their settings' names; ends the process, in a line, for one that there is not."""
    parser, commands = _parsers()
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        typed = unknown[0].split("=")[0]  # without its value, which may be a key
        what = "unknown flag" if typed.startswith("-") else "unexpected argument"
        near = _nearest_flag(typed, found.command)
        advice = f"; did you mean {near}?" if near else ""
        if found.command == RUN and not typed.startswith("-"):
            advice = "; the command of an agent stands after --"
        commands[found.command].error(f"{what} {typed}{advice}")
    return found


def _nearest_flag(typed: str, command: str) -> str | None:
    """The flag of `command` that was clearly meant by `typed`, or None."""
    own = _OWN_FLAGS.get(command, ())
    flags = ("--config", "--help", *own, *(s.flag for s in SETTINGS if s.name in _SETTINGS_OF.get(command, ())))
    near = nearest_name(typed.lstrip("-"), (flag.removeprefix("--") for flag in flags))
    return None if near is None or f"--{near}" == typed else f"--{near}"


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The command line's parser, and that of each command."""
    parser = _Parser(
        prog="stenograph",
        allow_abbrev=False,
        description="A session server that keeps the exact tokens of agent rollouts.",
        epilog="`stenograph serve` starts a server with a small model; `stenograph COMMAND --help` lists the flags.",
    )
    parser.add_argument("--version", action="version", version=f"stenograph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    serving = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="run the server",
        description="Run the server until SIGTERM or Ctrl-C.",
        epilog=SERVE_EXAMPLES,
        formatter_class=_SectionedHelp,
        usage="stenograph serve [--model MODEL] [--engine ENGINE --engine-url URL] [flags]",
    )
    running, chatting = _run_parser(commands.add_parser), _chat_parser(commands.add_parser)
    placing = _ray_parser(commands.add_parser)
    fetching = commands.add_parser(
        "fetch",
        allow_abbrev=False,
        help="fetch the model's weights",
        description="Fetch the model into the cache and print its path.",
    )
    verifying = commands.add_parser(
        VERIFY,
        allow_abbrev=False,
        help="check that a model's sessions are exact in tokens",
        description="Check that the model's chat template is append-only, and that its sessions are exact in tokens:"
        " every kind of conversation is rendered, bridged and parsed. With --engine (and --engine-url, of one that is a"
        " server) a session is played with it too. Exit code: 0 it holds, 1 it does not, 2 it could not be checked,"
        " because a file cannot be read or the engine does not answer.",
    )
    add_looking_commands(commands.add_parser)
    exporting = export_parser(commands.add_parser)
    commands.add_parser(BENCH, help="measure the server: see `stenograph bench --help`", add_help=False)
    for command in (serving, running, chatting, placing):
        _add_sections(command)
    for command, names in ((fetching, FETCH_SETTINGS), (verifying, VERIFY_SETTINGS), (exporting, EXPORT_SETTINGS)):
        for setting in SETTINGS:
            if setting.name in names:
                _add_flag(command.add_argument, setting)
    for command in (serving, running, chatting, placing, fetching, verifying, exporting):
        command.add_argument("--config", type=Path, metavar="FILE.toml", help="settings file; flags win over it")
    return parser, commands.choices


def _add_sections(command: argparse.ArgumentParser) -> None:
    """The flags of all settings, in their groups."""
    by_name = {setting.name: setting for setting in SETTINGS}
    for title, names in SECTIONS.items():
        group = command.add_argument_group(title)
        for name in names:
            _add_flag(group.add_argument, by_name[name])


def _ray_parser(add_parser: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `ray`, without the settings."""
    placing = add_parser(
        RAY,
        allow_abbrev=False,
        help="run a server on each machine of a Ray cluster",
        description="Place a server on each machine of a Ray cluster that has none, list them, or stop them all. Ray"
        " starts a server again that ends. Needs the extra `ray`.",
        epilog=RAY_EXAMPLES,
        formatter_class=_SectionedHelp,
        usage="stenograph ray {up,down,status} [--ray-address ADDRESS] [flags of serve]",
    )
    placing.add_argument("action", choices=RAY_ACTIONS, help="what to do")
    placing.add_argument(
        "--ray-address", default="auto", metavar="ADDRESS", help="the cluster's. Default: the one this machine is in."
    )
    placing.add_argument(
        "--cpus", type=float, default=0.0, metavar="NUMBER", help="CPUs that Ray reserves for each server. Default: 0."
    )
    return placing


def _run_parser(add_parser: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `run`, without the settings."""
    running = add_parser(
        RUN,
        allow_abbrev=False,
        help="run an agent on a session, and write its samples",
        description="Run a command with a session's address in its environment, and write the samples when it ends.",
        epilog=RUN_EXAMPLES,
        formatter_class=_SectionedHelp,
        usage="stenograph run [--url URL] [--samples FILE] [flags of serve] -- COMMAND [ARGUMENTS]",
    )
    running.add_argument("--url", help="the address of a running server; without it, one is started and stopped")
    running.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="where the samples go: as JSON in a .json file, as Arrow in an .arrow file, else as safetensors",
    )
    return running


def _chat_parser(add_parser: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `chat`, without the settings."""
    chatting = add_parser(
        CHAT,
        allow_abbrev=False,
        help="talk to a model in the terminal, with ids and stages on demand",
        description="Talk to a model through a session. A line is a message; one that begins with / is a command.",
        epilog=CHAT_EXAMPLES,
        formatter_class=_SectionedHelp,
        usage="stenograph chat [--url URL [--session ID]] [flags of serve]",
    )
    chatting.add_argument("--url", help="the address of a running server; without it, one is started and stopped")
    chatting.add_argument("--session", metavar="ID", help="a session of the server at --url, to go on with")
    return chatting


def _add_flag(add_argument: Callable[..., argparse.Action], setting: Setting) -> None:
    shown = f"{setting.doc} Default: {_default_shown(setting)}."
    add_argument(
        setting.flag,
        dest=setting.name,
        action="append" if setting.kind.repeatable else "store",
        metavar="|".join(setting.kind.choices) or (setting.unit or setting.name.split("_")[-1]).upper(),
        help=shown.replace("%", "%%"),
    )


def _default_shown(setting: Setting) -> str:
    """The default with its unit, which a default in words does not have."""
    if not setting.unit or re.fullmatch(r"[0-9.]+", setting.default) is None:
        return setting.default
    return f"{setting.default} {setting.unit.removesuffix('s') if setting.default == '1' else setting.unit}"


def _note_kubernetes() -> None:
    if ignored := kubernetes_variables(os.environ):
        log.info(
            "ignored %d environment variables such as %s: Kubernetes sets them for a Service", len(ignored), ignored[0]
        )


def _announce(line: str) -> None:
    """The ready line goes to stdout, alone, so that a script can wait for it."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
