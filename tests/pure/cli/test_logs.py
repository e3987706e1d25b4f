"""The log's lines: made of facts, as text or JSON, and written by whoever reads them in their own time."""

import json
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.cli.logs import MAX_WAITING, JsonFormatter, LogWriter, TextFormatter
from stenograph.core.log_line import MAX_TEXT_CHARS, LogLine
from stenograph.core.stages import Stage

LINE = LogLine(
    event="turn_end",
    facts={
        "session": "0a", "client": 'a "b"\nINFO forged', "finish": None, "prompt_tokens": 0,
    },
    stages_s={Stage.RENDER: 0.000125, Stage.COMMIT: 0.0020004},
)  # fmt: skip


def test_the_text_of_a_line_has_its_facts_in_order_and_stays_one_line() -> None:
    assert str(LINE) == (
        r'turn_end session=0a client="a \"b\"\nINFO forged" prompt_tokens=0 stages_ms=render:0.125,commit:2.000'
    )


def test_a_long_text_is_cut() -> None:
    line = LogLine(event="e", facts={"detail": "x" * 1000})
    assert len(str(line.fields()["detail"])) == MAX_TEXT_CHARS
    assert len(str(line)) == len('e detail=""') + MAX_TEXT_CHARS - 1 + len(r"\u2026")
    assert str(LogLine(event="e", facts={"detail": "x" * MAX_TEXT_CHARS})) == "e detail=" + "x" * MAX_TEXT_CHARS


def record_of(message: object, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    about = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("stenograph.x", logging.INFO, "", 0, message, arguments, about)


def test_a_json_line_has_the_same_keys_first_and_a_lines_facts_as_they_are() -> None:
    told = json.loads(JsonFormatter().format(record_of(LINE)))
    assert list(told) == ["time", "level", "logger", "event", *LINE.facts, "stages_ms"]
    assert told["time"].endswith("+00:00")
    assert (told["level"], told["logger"], told["event"]) == ("info", "stenograph.x", "turn_end")
    assert {name: told[name] for name in LINE.facts} == LINE.facts
    assert told["stages_ms"] == {"render": 0.125, "commit": 2.0}


@given(created=st.floats(0, 4e9), later=st.floats(0, 3))
def test_a_text_line_is_as_logging_would_write_it(created: float, later: float) -> None:
    ours, theirs = TextFormatter(), logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for at in (created, created + later):
        record = record_of(LINE, error=ValueError("wrong"))
        record.created, record.msecs = at, float(int((at - int(at)) * 1000))
        assert ours.format(record) == theirs.format(record)


def test_any_other_message_is_a_json_line_too_and_an_error_has_its_traceback() -> None:
    told = json.loads(JsonFormatter().format(record_of("%d\n%s", 3, "\udcff", error=ValueError("wrong"))))
    assert (told["event"], told["message"][:2]) == ("message", "3\n")
    assert "ValueError: wrong" in told["traceback"]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_all(reader: int, until: bytes) -> bytes:
    read = b""
    while until not in read:
        read += os.read(reader, 2**16)
    return read


def test_a_log_that_is_not_read_blocks_no_thread_and_reports_its_dropped_lines(pipe: tuple[int, int]) -> None:
    reader, writer_end = pipe
    writer = LogWriter(writer_end)
    num = 3 * MAX_WAITING
    for number in range(num):
        writer.handle(record_of("%06d %s", number, "x" * 200))
    read = read_all(reader, b" dropped, ")
    lines = [line for line in read.splitlines() if line.endswith(b"x" * 200)]
    (told,) = [line for line in read.splitlines() if b" dropped, " in line]
    assert len(lines) + int(told.split()[0]) == num
    numbers = [int(line[:6]) for line in lines]
    assert numbers == sorted(set(numbers))
    writer.close()


def test_what_was_logged_before_the_end_is_written_and_a_value_that_changed_since_is_as_it_was(
    pipe: tuple[int, int],
) -> None:
    reader, writer_end = pipe
    writer = LogWriter(writer_end)
    value = [1]
    writer.handle(record_of("%s", value))
    value.append(2)
    writer.close()
    assert os.read(reader, 100) == b"[1]\n"


def test_a_log_that_is_closed_at_the_other_end_blocks_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer_end = os.pipe()
    os.close(reader)
    writer = LogWriter(writer_end)
    for _ in range(3):
        writer.handle(record_of("a"))
    writer.close()
    os.close(writer_end)
    assert capsys.readouterr().err == ""
