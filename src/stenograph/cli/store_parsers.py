"""The parsers of `inspect`, `check` and `export`, which look at what a server kept."""

import argparse
from collections.abc import Callable
from pathlib import Path

from stenograph.cli.export_command import EXPORT
from stenograph.cli.store_commands import CHECK, INSPECT
from stenograph.dialects.sessions import SAMPLE_FORMATS


def add_looking_commands(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """The commands that look at what a server kept, and read no settings."""
    inspecting = add_parser(
        INSPECT,
        help="list the sessions that a server kept, or the turns of one",
        description="List the sessions in a folder of --data-dir, or the turns of one. Changes nothing, and needs no"
        " server: a folder that one holds is refused.",
    )
    checking = add_parser(
        CHECK,
        allow_abbrev=False,
        help="check that what a server kept is what was written, or that samples are what it holds",
        description="Read every row of every session in a folder of --data-dir, and hold it to its digest, its place"
        " and the sums of its session. With --samples, hold the samples of a file to the sessions that they are of"
        " instead: ids, loss mask, log-probabilities, session and turns. Changes nothing, and needs no server: a"
        " folder that one holds is refused. Exit code: 0 all is whole, 1 a fault was found, each on a line, 2 it could"
        " not be checked.",
    )
    for command in (inspecting, checking):
        command.add_argument(
            "folder", metavar="DIR", help="the folder of --data-dir, or of a backup, or the postgresql:// of --store"
        )
    checking.add_argument(
        "--samples",
        type=Path,
        action="append",
        metavar="FILE",
        help="a file of samples: safetensors, JSON or Arrow. May be repeated",
    )
    inspecting.add_argument("session", nargs="?", metavar="ID", help="a session: its turns are listed")


def export_parser(add_parser: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `export`, without the settings."""
    exporting = add_parser(
        EXPORT,
        allow_abbrev=False,
        help="write the samples of all sessions that a server kept, or one session as a page",
        description="Write the training samples of every session in a folder of --data-dir into one file, as the"
        " server would give them. Changes nothing, and needs no server, but the --model with which the sessions"
        " were made. With --session and --html write one session as a page that opens anywhere and fetches nothing;"
        " it may also be that of a running server, whose URL is given. Exit code: 0 all were exported, 1 a session"
        " could not be, each on a line, 2 nothing was begun.",
    )
    exporting.add_argument(
        "folder",
        metavar="DIR",
        help="the folder of --data-dir, or of a backup, or postgresql:// of --store; for a page also a server's URL",
    )
    exporting.add_argument("--out", type=Path, metavar="FILE", help="the file of samples to write; a new one")
    exporting.add_argument("--session", metavar="ID", help="the session of a page")
    exporting.add_argument("--html", type=Path, metavar="FILE", help="the page to write; a new file")
    exporting.add_argument(
        "--format", choices=SAMPLE_FORMATS, default=SAMPLE_FORMATS[0], help="of the file. Default: safetensors."
    )
    exporting.add_argument("--include-side", action="store_true", help="strands of every kind, not of the work alone")
    exporting.add_argument(
        "--include-failed", action="store_true", help="also rollouts whose outcome is that infrastructure failed"
    )
    return exporting
