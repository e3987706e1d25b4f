"""`stenograph chat`: a conversation with a model through a session, in the terminal or by a pipe of lines.

The session is of a running server (`--url`), or of one started here as `stenograph run` does. A line is a message, or
with a leading slash a command. Ctrl-C stops the reply: the server ends its turn and records the sampled tokens; a
second one hangs up. Ctrl-D ends.

Owns the terminal, and the exit code: 0, or 1 where a reply to a piped line failed. All text of a model or a server is
shown without control characters.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self, TextIO
from urllib.parse import quote

from stenograph.cli.chat_turns import STOPPED, ChatTalk, ChatTurn
from stenograph.cli.run_command import ended_by_signals, handled
from stenograph.cli.run_report import say
from stenograph.cli.run_samples import check_samples_file, write_samples
from stenograph.cli.run_server import ServerWish
from stenograph.cli.session_calls import CallFailed, ServerCalls
from stenograph.cli.terminal_text import safe_line, safe_text
from stenograph.core.errors import StartupError

Context = contextlib.AbstractContextManager[None]

COMMANDS: Mapping[str, str] = {
    "/ids": "the ids of the last reply, each with its log-probability and its text",
    "/stages": "the time that each stage of the last turn took",
    "/samples FILE": "write the session's training samples: as JSON in a .json file, as Arrow in an .arrow file, else"
    " as safetensors",
    "/reset": "begin again, in a new session",
    "/help": "these commands; a line that begins with // is a message that begins with /",
}
"""The commands, as docs/chat.md lists them."""

EXIT_FAILED = 1
STOP_S = 5.0
"""Longest wait for the server's answer to a request to stop a reply, if it has ended meanwhile."""
_BAR_CHARS = 40


class Lines(Protocol):
    """A source of lines."""

    @property
    def is_interactive(self) -> bool:
        """Whether a person types them."""
        ...

    def next(self) -> str | None:
        """The next line, None at the end."""
        ...


def chat(options: dict[str, Any]) -> int:
    """Chat until the input ends; returns the exit code. Raises StartupError before the first line is read."""
    session, server = options.pop("session"), ServerWish.of(options)
    if session is not None and server.url is None:
        raise StartupError("--session is of a running server: name it with --url")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        reached = stack.enter_context(server.reached())
        calls = reached.calls
        lines = TerminalLines() if sys.stdin.isatty() else PipedLines(sys.stdin)
        try:
            talk = stack.enter_context(Chat(calls, lines, sys.stdout, stoppable=stopped_by_interrupt))
            talk.begin(session)
            model = calls.model()
        except CallFailed as error:
            raise StartupError(f"no session at {calls.url}: {safe_line(str(error))}") from error
        if lines.is_interactive:
            say(f"{safe_line(model)}; /help lists commands, Ctrl-C stops a reply, Ctrl-D ends")
        with reached.quiet():
            try:
                num_failed = talk.run()
            except BrokenPipeError:  # nobody reads the replies any more
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return EXIT_FAILED
    return EXIT_FAILED if num_failed and not lines.is_interactive else 0


class TerminalLines:
    """Lines typed by a person, with the editing and the history of `readline` where Python has it."""

    is_interactive = True

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # `input` uses it; imported without a terminal it writes to stdout

    def next(self) -> str | None:
        """The next line, None at the end. An interrupted line is empty."""
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            return ""


class PipedLines:
    """Lines of a file or a pipe."""

    is_interactive = False

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def next(self) -> str | None:
        """The next line, None at the end."""
        line = self._file.readline()
        return line.removesuffix("\n") if line else None


@contextlib.contextmanager
def stopped_by_interrupt(stop: Callable[[], None]) -> Generator[None]:
    """While inside, a first Ctrl-C calls `stop`, on a thread, because the reading meanwhile must not be torn; a second
    one raises KeyboardInterrupt."""
    threads: list[threading.Thread] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        if threads:
            raise KeyboardInterrupt
        threads.append(threading.Thread(target=stop, name="stop-reply", daemon=True))
        threads[0].start()

    try:
        with handled({signal.SIGINT: interrupted}):
            yield
    finally:
        for thread in threads:
            thread.join(STOP_S)  # or it would stop the next reply


class Chat:
    """The lines of one chat, and their session. Sessions it opens are deleted when it ends.

    `stoppable` is a context for a person to call its argument, to stop the reply.
    """

    def __init__(
        self, calls: ServerCalls, lines: Lines, out: TextIO, *, stoppable: Callable[[Callable[[], None]], Context]
    ) -> None:
        self._calls = calls
        self._lines = lines
        self._out = out
        self._stoppable = stoppable
        self._opened = contextlib.ExitStack()
        self._talk = ChatTalk(calls, "")
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/ids": self._show_ids,
            "/stages": self._show_stages,
            "/samples": self._write_samples,
            "/reset": self._reset,
            "/help": self._help,
        }

    def __repr__(self) -> str:
        return f"<Chat of {self._talk!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Delete its own session."""
        self._opened.close()

    def begin(self, session_id: str | None) -> None:
        """Go on with a session, or open one. Raises CallFailed."""
        if session_id is None:
            self._open()
            return
        self._talk = ChatTalk(self._calls, quote(session_id, safe=""))
        self._talk.resume()
        say(f"session {safe_line(session_id)}, {self._talk.num_messages} messages")

    def run(self) -> int:
        """Take lines until they end; returns the number of failed ones."""
        num_failed = 0
        while True:
            try:
                if (line := self._lines.next()) is None:
                    return num_failed
                self._take(line)
            except KeyboardInterrupt:  # a person who meant the reply that had just ended
                if not self._lines.is_interactive:
                    raise
                self._write("\n")
            except (CallFailed, OSError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                num_failed += 1
                say(safe_line(str(error)))

    def _open(self) -> None:
        self._talk = ChatTalk(self._calls, self._opened.enter_context(self._calls.session()).id)
        say(f"session {safe_line(self._talk.session_id)}")

    def _take(self, line: str) -> None:
        """A message, or a command."""
        if not line.strip():
            return
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line.strip().partition(" ")
            command = self._commands.get(name)
            if command is None:
                raise CallFailed(f"there is no command {name}; /help lists them")
            command(argument.strip())
            return
        self._say(line[1:] if line.startswith("//") else line)

    def _say(self, text: str) -> None:
        """Say something to the model, and show its reply as it comes. Ctrl-C stops it, a second one hangs up."""
        session_id = self._talk.session_id

        def stop() -> None:
            with contextlib.suppress(CallFailed):
                self._calls.abort(session_id)

        try:
            with self._stoppable(stop):
                turn = self._talk.turn(text, self._show_piece)
        except KeyboardInterrupt:
            self._write("\n")
            raise CallFailed("hung up: nothing of this turn was kept") from None
        except CallFailed:
            self._write("\n")
            raise
        self._write("\n")
        if self._lines.is_interactive or turn.finish not in ("stop", ""):
            say(_summary(turn))

    def _show_piece(self, turn: ChatTurn, reasoning: str, content: str) -> None:
        if reasoning:
            self._write(("[reasoning] " if turn.reasoning == reasoning else "") + safe_text(reasoning))
        if content:
            is_first = turn.text == content and turn.reasoning
            self._write(("\n\n" if is_first else "") + safe_text(content))

    def _show_ids(self, _: str) -> None:
        turn = self._last()
        width = max((len(str(id_)) for id_, _, _ in turn.rows), default=2)
        self._write(f"{'id':>{width}}  {'logprob':>10}  text\n")
        for id_, logprob, text in turn.rows:
            self._write(f'{id_:>{width}}  {logprob:>10.6f}  "{safe_line(text)}"\n')

    def _show_stages(self, _: str) -> None:
        self._last()
        stages_s = self._talk.stages_s()
        whole_s, before_s = sum(stages_s.values()) or 1.0, 0.0
        for name, took_s in stages_s.items():
            start, end = (round(at / whole_s * _BAR_CHARS) for at in (before_s, before_s + took_s))
            bar = " " * start + "█" * max(1, end - start)
            self._write(f"{safe_line(name):<14} {took_s * 1e3:>10.2f} ms  {bar}\n")
            before_s += took_s

    def _write_samples(self, argument: str) -> None:
        if not argument:
            raise CallFailed("/samples needs a file: /samples FILE")
        file = Path(argument).expanduser()
        try:
            check_samples_file(file, is_here=False)
        except StartupError as error:
            raise CallFailed(str(error).removeprefix("--samples: ")) from error
        say(write_samples(self._calls, self._talk.session_id, file))

    def _reset(self, _: str) -> None:
        self._opened.close()
        self._open()

    def _help(self, _: str) -> None:
        for name, meaning in COMMANDS.items():
            self._write(f"{name:<14} {meaning}\n")

    def _last(self) -> ChatTurn:
        if self._talk.last is None:
            raise CallFailed("there is no reply yet")
        return self._talk.last

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _summary(turn: ChatTurn) -> str:
    """A reply in one line."""
    first = "" if turn.first_s is None else f", the first after {turn.first_s * 1e3:.0f} ms"
    ends = {"stop": "", STOPPED: "; stopped: no part of the conversation", "length": "; cut by the token limit"}
    end = ends.get(turn.finish, f"; {safe_line(turn.finish)}")
    return f"{turn.num_sampled} tokens{first}; prompt {turn.num_prompt}, cached {turn.num_cached}{end}"
