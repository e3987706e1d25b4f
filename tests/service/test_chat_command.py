"""`stenograph chat`: a conversation on a session, in a terminal and by a pipe, and what it shows of a turn."""

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from standins.scripted_engine import Script
from stenograph.cli.chat_command import COMMANDS, Chat
from stenograph.cli.main import main
from stenograph.cli.session_calls import ServerCalls
from stenograph.core.errors import EngineUnavailable
from stenograph.core.types import Finish, FinishReason

from .conftest import Live, assistant, output_ids, user

DOCS = Path(__file__).parents[2] / "docs" / "chat.md"

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m plain\r\x7f"


class Typed:
    """Lines that a test gives, as if a person typed them."""

    is_interactive = True

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    def next(self) -> str | None:
        return self._lines.pop(0) if self._lines else None


@contextlib.contextmanager
def never_stopped(stop: Callable[[], None]) -> Generator[None]:
    yield


async def chat(live: Live, *lines: str, session: str | None = None) -> str:
    """What a chat of these lines writes to its terminal."""
    out = io.StringIO()

    def talk() -> None:
        with Chat(ServerCalls(live.url, None), Typed(*lines), out, stoppable=never_stopped) as one:
            one.begin(session)
            one.run()

    await asyncio.to_thread(talk)
    return out.getvalue()


async def test_what_is_said_is_one_session_whose_turns_go_on_from_each_other(
    live: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    live.says("hello")
    live.says("again")
    samples = tmp_path / "out.json"
    shown = await chat(live, "first", "", "//second", "/ids", "/stages", f"/samples {samples}")
    assert shown.startswith("hello\nagain\n")
    (sample,) = json.loads(samples.read_text())["samples"]
    first, second = live.engine.requests
    assert second.prompt.ids[: len(first.prompt.ids)] == first.prompt.ids
    assert second.prompt.num_kept > len(first.prompt.ids)
    reply_ids = [int(id_) for id_ in re.findall(r'^ *(\d+) +-\d\.\d{6}  ".*"$', shown, re.MULTILINE)]
    assert reply_ids == [*live.renderer.tokenizer.encode("again"), 2]
    assert sample["tokens"][-len(reply_ids) :] == reply_ids
    assert "-0.125000" in shown
    stages = re.findall(r"^(\w+) +[0-9.]+ ms  [ █]+$", shown, re.MULTILINE)
    assert stages[:4] == ["receive", "admit", "decode", "render"]
    assert stages[-2:] == ["decode_tokens", "validate"]
    told = capsys.readouterr().err
    assert re.search(r"stenograph: session [0-9a-f]{32}\n", told)
    assert f"samples in {samples}" in told
    assert live.manager.sessions.num_sessions == 0  # it is deleted at the end


async def test_a_session_that_is_there_goes_on_from_its_last_turn_and_stays(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    session = await live.open()
    live.says("one")
    assert (await live.chat(session, {"role": "system", "content": "be kind"}, user("hi"))).status == 200
    live.says("two")
    assert await chat(live, "and then?", session=session) == "two\n"
    records = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert len(records) == 2
    assert [message["role"] for message in records[-1]["request"]["messages"]] == [
        *("system", "user", "assistant", "user")
    ]
    assert live.engine.requests[1].prompt.num_kept > 0
    assert f"session {session}, 3 messages" in capsys.readouterr().err
    assert live.manager.sessions.num_sessions == 1


async def test_reset_begins_again_in_a_new_session(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.says("one")
    live.says("two")
    assert await chat(live, "hi", "/reset", "/ids", "hi") == "one\ntwo\n"
    told = capsys.readouterr().err
    assert len(set(re.findall(r"session ([0-9a-f]{32})", told))) == 2
    assert "there is no reply yet" in told
    assert [request.prompt.num_kept for request in live.engine.requests] == [0, 0]


async def test_an_interrupt_between_two_replies_ends_nothing(live: Live) -> None:
    class Impatient(Typed):
        def next(self) -> str | None:
            line = super().next()
            if line == "^C":
                raise KeyboardInterrupt
            return line

    live.says("one")
    out = io.StringIO()

    def talk() -> None:
        with Chat(ServerCalls(live.url, None), Impatient("^C", "hi", "^C"), out, stoppable=never_stopped) as one:
            one.begin(None)
            one.run()

    await asyncio.to_thread(talk)
    assert out.getvalue() == "\none\n\n"


async def test_a_reply_that_fails_leaves_the_conversation_as_it_was(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    live.says("one")
    live.engine.plan(Script(ids=(), error=EngineUnavailable("The engine is gone\x1b[2J.")))
    live.says("two")
    lines = ["hi", "lost", "/nothing", "/samples", "/samples /no/such/folder/x", "more"]
    assert await chat(live, *lines) == "one\n\ntwo\n"
    told = capsys.readouterr().err
    assert "503 The engine is gone␛[2J." in told
    assert "there is no command /nothing; /help lists them" in told
    assert "/samples needs a file" in told
    assert "cannot write '/no/such/folder/x'" in told
    assert "\x1b" not in told
    assert live.engine.requests[-1].prompt.num_kept > 0


async def test_no_escape_sequence_of_a_model_reaches_the_terminal(live: Live) -> None:
    live.says(HOSTILE)
    shown = await chat(live, "hi", "/ids")
    assert shown.startswith("␛]0;owned␇␛[2J\N{REPLACEMENT CHARACTER}31m plain␍␡\n")
    assert not set(shown) & {chr(code) for code in (*range(32), *range(127, 160)) if code != 10}


async def test_reasoning_is_shown_apart_and_sent_back(live: Live) -> None:
    """The server's own reasoning fields, by a chat whose reply has both."""
    pieces = [
        {"choices": [{"delta": {"reasoning_content": "let me"}}]},
        {"choices": [{"delta": {"reasoning_content": " see"}}]},
        {"choices": [{"delta": {"content": "four"}, "finish_reason": "stop"}]},
    ]
    said: list[Any] = []

    class Reasoner(ServerCalls):
        def chunks(self, session_id: str, body: Any) -> Generator[Any]:
            said.append(body["messages"])
            yield from pieces

    out = io.StringIO()

    def talk() -> None:
        with Chat(Reasoner(live.url, None), Typed("2+2?", "sure?"), out, stoppable=never_stopped) as one:
            one.begin(None)
            one.run()

    await asyncio.to_thread(talk)
    assert out.getvalue() == "[reasoning] let me see\n\nfour\n" * 2
    assert said[1][1] == {"role": "assistant", "content": "four", "reasoning_content": "let me see"}


def test_every_command_is_in_the_help_and_in_its_page() -> None:
    rows = re.findall(r"^\| `(/[^`]+)` \| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    assert dict(rows) == dict(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--session", "x"], "--session is of a running server: name it with --url"),
        (["--url", "http://127.0.0.1:9", "--model", "x"], "--model is for one that is started here"),
        (["--url", "nowhere"], "--url: 'nowhere' is no address"),
        (["--url", "http://127.0.0.1:9"], "no session at http://127.0.0.1:9: the server does not answer"),
    ],
)
def test_what_stops_the_start_is_one_line_and_2(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["chat", *arguments]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


async def test_a_pipe_of_lines_is_answered_line_by_line(live: Live) -> None:
    live.says("one")
    live.says(HOSTILE)
    process = await started(live, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, told = await process.communicate(b"first\nsecond\n/nothing\n\xff\xfe")
    assert out.decode().startswith("one\n␛]0;owned")
    assert b"\x1b" not in out + told
    assert b"there is no command /nothing" in told
    assert process.returncode == 1  # one of its lines failed


async def test_on_a_terminal_ctrl_c_stops_a_reply_at_the_server_and_ctrl_d_ends(live: Live) -> None:
    live.says("hello")
    script = live.says("a long reply", paused=True)
    live.says("short")
    session = await live.open()
    ours, theirs = pty.openpty()
    process = await started(live, "--session", session, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = await until(ours, "Ctrl-D ends\n> ")
    os.write(ours, b"hi\r")
    shown += await until(ours, "cached 0\n> ")
    os.write(ours, b"tell me\r")
    await live.engine.begun(2)
    live.engine.step(3)
    partial = live.renderer.tokenizer.decode(script.ids[:3])
    shown += await until(ours, f"\n{partial}")
    os.write(ours, b"\x03")  # the reply is at a standstill: only an abort ends it
    shown += await until(ours, "; stopped: no part of the conversation\n> ")
    records = await records_of(live, session)
    assert [record["status"] for record in records] == ["completed", "aborted"]
    assert output_ids(records[1]) == list(script.ids[:3])
    os.write(ours, b"and now?\r")
    shown += await until(ours, "cached 0\n> ")
    os.write(ours, b"\x04")
    shown += await until(ours, None)
    assert "short\n" in shown
    assert await process.wait() == 0, shown
    os.close(ours)
    records = await records_of(live, session)
    assert [record["status"] for record in records] == ["completed", "completed"]
    assert [message["content"] for message in records[1]["request"]["messages"]] == ["hi", "hello", "and now?"]
    assert len(live.engine.requests) == 3


async def test_a_session_whose_last_turn_was_aborted_goes_on_from_the_one_before(live: Live) -> None:
    session = await live.open()
    live.says("one")
    live.engine.plan(Script(ids=(5,), finish=Finish(reason=FinishReason.ABORT)))
    live.says("two")
    for messages in ([user("hi")], [user("hi"), assistant("one"), user("lost")]):
        assert (await live.chat(session, *messages)).status == 200
    assert await chat(live, "more", session=session) == "two\n"
    assert [record["status"] for record in await records_of(live, session)] == ["completed", "completed"]


async def records_of(live: Live, session: str) -> list[Any]:
    records: list[Any] = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    return records


async def started(live: Live, *flags: str, **streams: Any) -> asyncio.subprocess.Process:
    arguments = [sys.executable, "-m", "stenograph.cli.main", "chat", "--url", live.url, *flags]
    is_terminal = not any(stream == subprocess.PIPE for stream in streams.values())
    return await asyncio.create_subprocess_exec(
        *arguments,
        **streams,
        env={**os.environ, "TERM": "dumb", "PYTHONUTF8": "1"},
        start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if is_terminal else None,
    )


async def until(terminal: int, text: str | None) -> str:
    """What a terminal shows, until there is this text or its end."""

    def read() -> str:
        shown = ""
        while text is None or text not in shown:
            ready, _, _ = select.select([terminal], [], [], 30)
            assert ready, f"{text!r} is not in {shown!r}"
            try:
                piece = os.read(terminal, 4096)
            except OSError:  # so ends a terminal on Linux
                break
            if not piece:
                break
            shown += piece.decode(errors="replace").replace("\r\n", "\n")
        return shown

    return await asyncio.to_thread(read)
