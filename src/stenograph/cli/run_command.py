"""`stenograph run [flags] -- COMMAND`: opens a session, runs a command with its address, and writes the samples.

The session is of a running server (`--url`), or of one started here with `serve`'s flags, on a free port unless
`--port` says otherwise, and stopped at the end. The terminal is the command's, so Ctrl-C ends the command; the server
stays until the samples are written.

Owns the exit code: the command's, 128 + the signal that killed it, 127 or 126 where it cannot be run; 1 where the
command succeeded but its samples cannot be got; 2 for whatever stops the start.
"""

import contextlib
import http
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

from stenograph.cli.agent_environment import agent_environment, write_agent_settings
from stenograph.cli.run_report import say
from stenograph.cli.run_samples import check_samples_file, format_of
from stenograph.cli.run_server import ServerWish, UsedServer
from stenograph.cli.run_session import RunSession
from stenograph.cli.session_calls import CallFailed, OpenSession, ServerCalls
from stenograph.cli.settings_table import CommandSettings
from stenograph.core.errors import StartupError
from stenograph.core.whole_file import check_new, check_writable

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""A shell's exit codes for a missing command, and for one that cannot be run."""
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
"""Signals to one process, meant for the command."""
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""Signals from a terminal to all of its foreground: the command has them already."""


Handler = Callable[[int, FrameType | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of one run. `session` are those of `POST /sessions`."""

    server: ServerWish
    command: Sequence[str]
    samples: Path | None
    html: Path | None
    session: Mapping[str, object]
    keep: bool


def store_of(settings: CommandSettings) -> str | None:
    """The place of a server's sessions, without any password in its address; None: its memory."""
    if settings.data_dir is not None:
        return str(settings.data_dir)
    return None if settings.store is None else "the database of --store"


def json_object(flag: str, text: str | None) -> Mapping[str, object]:
    """The JSON object of a flag, an empty one where it is not given. Raises StartupError for another text."""
    try:
        options: object = {} if text is None else json.loads(text)
    except ValueError as error:
        raise StartupError(f"{flag}: this is no JSON: {error}") from error
    if not isinstance(options, dict):
        raise StartupError(f'{flag}: a JSON object is expected, such as {{"max_turns": 50}}')
    return cast("dict[str, object]", options)


def run(arguments: dict[str, Any]) -> int:
    """Run a command on a session; returns the exit code. Raises StartupError before the command is started."""
    session = json_object("--session", arguments.pop("session"))
    server = ServerWish.of(arguments)
    options = RunOptions(server=server, session=session, command=arguments.pop("agent"), **arguments)
    if not options.command:
        raise StartupError("run needs a COMMAND: write it after --, for example: stenograph run -- python my_agent.py")
    if (code := code_before(options)) is not None:
        return code
    with ended_by_signals(), server.reached() as reached:
        return on_session(reached, _opened(reached.calls, options), options)


def on_session(reached: UsedServer, opened: OpenSession, options: RunOptions) -> int:
    """Run the command on an open session, which ends with it; returns the exit code of the run."""
    calls, server = reached.calls, options.server
    with contextlib.ExitStack() as stack:
        rollout = stack.enter_context(
            RunSession(
                calls,
                opened.id,
                samples=options.samples,
                html=options.html,
                keep=options.keep,
                kept_in=store_of(server.settings) if server.url is None else calls.url,
                has_ended=lambda: reached.has_ended,
            )
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stenograph-run-")))
        try:
            model = calls.model()
        except CallFailed as error:
            raise StartupError(f"no session at {calls.url}: {error}") from error
        write_agent_settings(folder, opened, model=model)
        environment = agent_environment(os.environ, opened, folder, model=model)
        say(f"session {opened.id}; watch it at {rollout.console}")
        rollout.is_begun = True
        with reached.quiet():
            code = _run_child(options.command, environment)
        return rollout.finished(code)


def code_before(options: RunOptions) -> int | None:
    """The exit code of a command that cannot be run; None if it can. Raises StartupError for options impossible to meet
    at the end."""
    _check(options)
    program = options.command[0]
    return None if shutil.which(program) else _cannot_run(program, is_there=os.path.exists(program))


def _check(options: RunOptions) -> None:
    """Raise StartupError for options impossible to meet at the end."""
    if options.samples is not None:
        check_samples_file(options.samples, is_here=options.server.url is None)
    if options.html is not None:
        check_new(options.html, "--html")
        check_writable(options.html, "--html")
    if options.keep and options.server.url is None and store_of(options.server.settings) is None:
        raise StartupError(
            "--keep: the server that is started here ends with the command, and its sessions with it: give --data-dir"
            " DIR too, or --url for a server that stays"
        )


def _opened(calls: ServerCalls, options: RunOptions) -> OpenSession:
    """A new session, checked to give its samples as they are wanted. Raises StartupError."""
    try:
        session = calls.open_session(options.session)
    except CallFailed as error:
        if error.status == http.HTTPStatus.BAD_REQUEST:
            raise StartupError(f"--session: {error.said}") from error
        raise StartupError(f"no session at {calls.url}: {error}") from error
    return checked(calls, session, options.samples)


def checked(calls: ServerCalls, opened: OpenSession, samples: Path | None) -> OpenSession:
    """A new session, if the server can give its samples in the format of this file. Raises StartupError."""
    if samples is not None:
        try:  # there are few yet, or none: the answer tells whether the server can write this format
            calls.samples(opened.id, format_of(samples))
        except CallFailed as error:
            with contextlib.suppress(CallFailed):
                calls.delete(opened.id)
            raise StartupError(
                f"--samples: the server at {calls.url} cannot give them: {error.said or error}"
            ) from error
    return opened


def _cannot_run(program: str, *, is_there: bool) -> int:
    if is_there:
        say(f"{program}: not executable")
        return _NOT_EXECUTABLE
    say(f"{program}: command not found")
    return _NOT_FOUND


def _run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end, in this terminal; returns its exit code as a shell has it."""
    with _signals_for_the_command() as children:
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            return _NOT_EXECUTABLE
        children.append(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_for_the_command() -> Generator[list["subprocess.Popen[bytes]"]]:
    """While inside, signals go to the command: ours are passed on, a terminal's it has got itself."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    def leave_to_it(number: int, frame: FrameType | None) -> None:
        if not _is_in_foreground():
            pass_on(number, frame)

    # Handlers, and not SIG_IGN, which the command would inherit.
    with handled({**dict.fromkeys(_PASSED_ON, pass_on), **dict.fromkeys(_OF_THE_TERMINAL, leave_to_it)}):
        yield children


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Generator[None]:
    """While inside, signals have these handlers."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """While inside, signals to end a process do so by way of every `with`."""
    return handled(dict.fromkeys(_PASSED_ON, _end))


def _end(number: int, frame: FrameType | None) -> None:
    """End, and on the way, by their `with`, the server and the session."""
    raise SystemExit(128 + number)


def _is_in_foreground() -> bool:
    """Whether a terminal's signals reach this process and the command alike."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
