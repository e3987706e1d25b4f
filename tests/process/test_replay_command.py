"""`stenograph serve --engine replay` as a process: without weights, from the folder of a server before it."""

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .test_serve import command, post, running, stop


def ask(url: str, session: str, text: str) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    return bytes(str(post(f"{url}/sessions/{session}/v1/chat/completions", body)), "utf-8")


def streamed(url: str, session: str, body: dict[str, Any]) -> bytes:
    at = f"{url}/sessions/{session}/v1/chat/completions"
    asked = urllib.request.Request(at, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as response:
        return bytes(response.read())


def test_a_recorded_session_is_answered_without_an_engine(tiny: Path, tmp_path: Path) -> None:
    with running("--model", str(tiny), "--data-dir", str(tmp_path)) as (url, process):
        session = post(f"{url}/sessions")["session_id"]
        before = ask(url, session, "hello")
        assert stop(process) == 0
    with running("--model", str(tiny), "--data-dir", str(tmp_path), "--engine", "replay") as (url, process):
        assert ask(url, session, "hello") == before
        with pytest.raises(OSError, match="400"):
            ask(url, session, "good bye")
        assert stop(process) == 0


def test_a_reply_at_its_pace_has_no_signs_of_life_between(tiny: Path, tmp_path: Path) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "stream": True, "temperature": 0}
        for text in "abcdefgh"
    ]
    with running("--model", str(tiny), "--data-dir", str(tmp_path)) as (url, process):
        session = post(f"{url}/sessions")["session_id"]
        for body in bodies:
            assert b"data: [DONE]" in streamed(url, session, body)
        assert stop(process) == 0
    with running("--model", str(tiny), "--data-dir", str(tmp_path), "--engine", "replay", "--play", "recorded") as (
        url,
        process,
    ):
        for body in bodies:
            lines = streamed(url, session, body).splitlines()
            assert [line for line in lines if line and not line.startswith(b"data: ")] == []
        assert stop(process) == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--engine", "replay"], "give --data-dir, too"),
        (["--engine", "replay", "--data-dir", "{empty}"], "no sessions to live again"),
        (["--play", "at-once", "--data-dir", "{empty}", "--workers", "2"], "leave --workers 2 out"),
        (["--engine", "replay", "--engine-url", "http://127.0.0.1:9"], "--engine-url is set, but --engine is replay"),
        (["--strict", "on"], "give --play, too"),
        (["--play-ignores", "a("], "regular expressions"),
    ],
)
def test_a_replay_of_nothing_ends_at_once_with_a_line(tiny: Path, tmp_path: Path, flags: list[str], told: str) -> None:
    given = [flag.format(empty=tmp_path) for flag in flags]
    ended = subprocess.run(
        command("serve", "--port", "0", "--model", str(tiny), *given), check=False, capture_output=True, text=True
    )
    assert ended.returncode != 0
    assert told in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
