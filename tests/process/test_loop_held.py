"""A server's loop that is held: the lag is counted always, and the culprit named where that is asked for.

Nothing is timed. A matcher of the test's own, which is called on the loop, stands there until the test lets it go.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.processes import Children
from benchmarks.kit.reply_shape import ReplyShape, reply_content
from benchmarks.kit.servers import start_standin
from standins.tiny.tokenizer import tiny_tokenizer_json

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HOLDER = """
import os

def stands_here(stored, given):
    with open(os.environ["HELD_UNTIL"]):  # a pipe: until somebody opens its other end
        return True
"""
SHAPE = ReplyShape(num_tokens=30, vocab_size=320)


@contextmanager
def running(folder: Path, *flags: str) -> Generator[tuple[str, "subprocess.Popen[str]"]]:
    """A server before a stand-in, whose matcher is `HOLDER`'s; yields its URL when it is ready."""
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    config = {"vocab_size": 320, "max_position_embeddings": 2**20, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    texts = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    (folder / "holder.py").write_text(HOLDER)
    os.mkfifo(folder / "held")
    with Children() as children:
        _, engine_url = start_standin(children, SHAPE)
        command = [sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--model", str(folder)]
        command += ["--engine", "sglang", "--engine-url", engine_url, "--matcher", "holder.stands_here", *flags]
        environment = {**os.environ, "PYTHONPATH": str(folder), "HELD_UNTIL": str(folder / "held")}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            try:
                yield next_line(process, r"stenograph ready at (http://\S+)")[1], process
            finally:
                process.kill()


def next_line(process: "subprocess.Popen[str]", pattern: str) -> "re.Match[str]":
    """Read on in what the server says until a line has this."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    pytest.fail(f"no line with {pattern!r}: " + "".join(seen))


def post(url: str, body: Any = None) -> Any:
    data = json.dumps(body or {}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json"}, method="POST")
    ) as response:
        return json.loads(response.read())


def num_beats(url: str, *, later_than_s: float | None = None) -> int:
    """How many heartbeats came, or how many of them were later than a bucket's bound."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    buckets = re.findall(r'^stenograph_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    counts = {le: float(count) for le, count in buckets}
    return int(counts["+Inf"] - (0 if later_than_s is None else counts[str(later_than_s)]))


@pytest.mark.timeout(600)
def test_the_callback_that_holds_the_loop_is_named_if_configured_and_the_lag_is_counted(tmp_path: Path) -> None:
    with running(tmp_path, "--loop-watchdog", "on") as (url, process):
        chat = f"{post(f'{url}/sessions')['base_url']}/chat/completions"
        said = [{"role": "user", "content": "a"}]
        post(chat, {"messages": said})
        before = num_beats(url, later_than_s=0.05)
        said += [{"role": "assistant", "content": reply_content(SHAPE)}, {"role": "user", "content": "b"}]
        held = threading.Thread(target=post, args=(chat, {"messages": said}))
        held.start()
        next_line(process, r"the event loop has been held for \d+ ms by:")
        next_line(process, "in stands_here")
        while held.is_alive():  # each comparison stands there
            with contextlib.suppress(OSError):
                os.close(os.open(tmp_path / "held", os.O_WRONLY | os.O_NONBLOCK))
            held.join(0.01)
        assert num_beats(url, later_than_s=0.05) > before


@pytest.mark.timeout(600)
def test_the_lag_is_counted_without_being_asked_for(tmp_path: Path) -> None:
    with running(tmp_path) as (url, _):
        while not num_beats(url):
            pass
