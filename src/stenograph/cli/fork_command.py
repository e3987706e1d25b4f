"""`stenograph fork ID --turn N [--token K] [flags] -- COMMAND`: runs a command on a fork of a session, or on several in
turn, as `stenograph run` does on a new session.

The command begins anew. Its requests for the turns before the place get their recorded replies, and the model samples
from there on.
"""

import dataclasses
import http
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stenograph.cli.run_command import RunOptions, checked, code_before, ended_by_signals, on_session, store_of
from stenograph.cli.run_report import say
from stenograph.cli.run_server import ServerWish
from stenograph.cli.session_calls import CallFailed, OpenSession, ServerCalls
from stenograph.core.errors import StartupError

_KILLED = 128
"""Exit codes above it are of a signal: no other fork is begun then."""
_REFUSED = {int(http.HTTPStatus.NOT_FOUND): "session ID", int(http.HTTPStatus.BAD_REQUEST): "--turn, --token, --group"}
"""The wrong part of the command line, by status."""


def fork(arguments: dict[str, Any]) -> int:
    """Run a command on forks; returns the first exit code that is not 0. Raises StartupError."""
    session_id, num = arguments.pop("session_id"), arguments.pop("num")
    place = {name: arguments.pop(name) for name in ("turn", "token", "group")}
    server = ServerWish.of(arguments)
    options = RunOptions(server=server, session={}, command=arguments.pop("agent"), **arguments)
    if not options.command:
        raise StartupError(
            "fork needs a COMMAND: write it after --, for example: stenograph fork ID --turn 3 -- python my_agent.py"
        )
    if server.url is None and store_of(server.settings) is None:
        raise StartupError("fork needs the session's server: give --url, or the --data-dir or --store it is kept in")
    runs = [
        dataclasses.replace(
            options, samples=_numbered(options.samples, number, num), html=_numbered(options.html, number, num)
        )
        for number in range(1, num + 1)
    ]
    for own in runs:
        if (code := code_before(own)) is not None:
            return code
    code = 0
    with ended_by_signals(), server.reached() as reached:
        for number, own in enumerate(runs, start=1):
            opened = _forked(reached.calls, session_id, {**place, "replay": True})
            if number == 1:
                opened = checked(reached.calls, opened, own.samples)
            if num > 1:
                say(f"fork {number} of {num}")
            ended = on_session(reached, opened, own)
            code = code or ended
            if ended > _KILLED:
                break
    return code


def _forked(calls: ServerCalls, session_id: str, place: Mapping[str, object]) -> OpenSession:
    """A new fork. Raises StartupError."""
    try:
        return calls.fork(session_id, place)
    except CallFailed as error:
        if (where := _REFUSED.get(error.status or 0)) is not None:
            raise StartupError(f"{where}: {error.said or error}") from error
        raise StartupError(f"no fork at {calls.url}: {error}") from error


def _numbered(file: Path | None, number: int, num: int) -> Path | None:
    """The file of a fork: with its number where there are several."""
    return file if file is None or num == 1 else file.with_stem(f"{file.stem}-{number}")
