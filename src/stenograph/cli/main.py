"""The command line: reads the flags of one command, and loads its modules (`cli/commands.py` lists all commands).

Owns exit codes: 0 when all went well, 1 when `verify`, `check` or `export` found a fault, 2 for whatever stops the
start or the check (one line on stderr), 74 when the store of `serve` has failed, 130 for an interrupt, also where
`serve` drained after it; `run`, `fork` and `chat` have their own.
"""

import sys
from collections.abc import Sequence
from typing import Any

from stenograph import __version__
from stenograph.cli.commands import COMMANDS, EXIT_INTERRUPTED, CommandParser
from stenograph.core.errors import StartupError, StorageLost
from stenograph.core.loaded import entry

_RUNS = ("run", "fork")
"""Commands with the command of an agent after `--`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else ""
    try:
        if name == "bench":  # its flags are its own
            return int(entry(COMMANDS[name].entry)(arguments[1:]))
        after: list[str] = []
        if name in _RUNS and "--" in arguments:
            at = arguments.index("--")
            arguments, after = arguments[:at], arguments[at + 1 :]
        options = parsed(arguments)
        if name in _RUNS:
            options["agent"] = after
        return int(entry(COMMANDS[options.pop("command")].entry)(options))
    except (StartupError, StorageLost) as error:
        print(f"stenograph: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """The command, and its flags by their settings' names; ends the process, in a line, for an unknown one."""
    parser = CommandParser(
        prog="stenograph",
        allow_abbrev=False,
        description="A session server that keeps the exact tokens of agent rollouts.",
        epilog="`stenograph serve` starts a server with a small model; `stenograph COMMAND --help` lists the flags.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"stenograph {__version__}")
    commands = parser.add_subparsers(dest="command", parser_class=CommandParser, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, allow_abbrev=False)
    parser.check_named(arguments, COMMANDS, "command", "serve")
    asked = arguments[0]
    chosen = parser if asked not in COMMANDS else commands.choices[asked]
    if asked in COMMANDS:
        COMMANDS[asked].declare(chosen)
    found, unknown = parser.parse_known_args(arguments)
    if unknown or found.command is None:
        of_run = asked in _RUNS and not unknown[0].startswith("-")
        chosen.refuse((unknown or arguments)[0], "; the command of an agent stands after --" if of_run else "")
    return vars(found)


if __name__ == "__main__":
    sys.exit(main())
