"""`stenograph serve` as a process: its one ready line, real clients, signals, and the death of its engine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent.py"


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "stenograph.cli.main", *flags]


@contextmanager
def running(*flags: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server on a free port; yields its URL when its ready line has come."""
    with subprocess.Popen(
        command("serve", "--port", "0", *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if found := re.search(r"stenograph ready at (http://\S+)", line):
                    yield found[1], process
                    break
            else:
                pytest.fail("no ready line: " + "".join(seen))
        finally:
            if process.poll() is None:
                process.kill()


def output_ids(record: Any) -> list[int]:
    return [id_ for _, id_, _ in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]


def post(url: str, body: Any = None) -> Any:
    data = json.dumps(body or {}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data, method="POST")) as response:
        return json.loads(response.read())


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.loads(response.read())


def stop(process: "subprocess.Popen[str]") -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    return process.returncode


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[str]:
    with running("--model", str(smollm2_path)) as (url, process):
        yield url
        assert stop(process) == 0  # SIGTERM drains and exits 0


@pytest.mark.weights
@pytest.mark.timeout(180)
def test_the_openai_sdk_talks_through_a_session_and_its_sample_is_exact(server: str) -> None:
    session = post(f"{server}/sessions")
    with openai.OpenAI(base_url=session["base_url"], api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
        first = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=40)
        assert "Paris" in (first.choices[0].message.content or "")
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And of Italy?"}]
        stream = client.chat.completions.create(
            model="smollm2", messages=messages, temperature=0, max_tokens=60, stream=True, logprobs=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    view = get(f"{server}/sessions/{session['session_id']}")
    first_record, second_record = view["records"]
    assert output_ids(first_record) == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    reply = second_record["response"]["choices"][0]
    assert reply["message"]["content"] == text
    line = second_record["request"]["input_ids"] + output_ids(second_record)
    assert line[: len(first_record["request"]["input_ids"]) + 8] == (
        first_record["request"]["input_ids"] + output_ids(first_record)
    )
    assert view["metadata"]["tito_session_mismatch"] == []
    (sample,) = post(f"{server}/sessions/{session['session_id']}/samples", {"format": "json"})["samples"]
    assert sample["tokens"] == line == view["metadata"]["accumulated_token_ids"]
    assert reply["meta_info"]["cached_tokens"] > 0  # the second turn did not compute the first again


@pytest.mark.weights
@pytest.mark.timeout(180)
def test_the_agent_of_the_demo_works_and_leaves_a_sample(server: str, tmp_path: Path) -> None:
    out = tmp_path / "sample.safetensors"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--url", server, "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.stat().st_size > 0


@pytest.mark.weights
@pytest.mark.timeout(180)
def test_when_the_engine_dies_its_request_gets_503_and_the_session_goes_on(smollm2_path: Path) -> None:
    with running("--model", str(smollm2_path)) as (url, process):
        session = post(f"{url}/sessions")
        with openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as client:

            def ask(*messages: Any) -> Any:
                return client.chat.completions.create(
                    model="m", messages=list(messages), temperature=0, max_tokens=30, stream=False
                )

            hello = {"role": "user", "content": "Say hello."}
            reply = ask(hello).choices[0].message.model_dump()
            (child,) = children_of(process.pid)
            stream = client.chat.completions.create(
                model="m",
                messages=[hello, reply, {"role": "user", "content": "Count to a hundred."}],
                max_tokens=500,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            os.kill(child, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="engine"):
                for _ in stream:
                    pass
            assert len(get(f"{url}/sessions/{session['session_id']}")["records"]) == 1
            with openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=20) as patient:
                again = patient.chat.completions.create(
                    model="m", messages=[hello, reply, {"role": "user", "content": "Bye."}], max_tokens=30
                )
            assert again.choices[0].finish_reason
        assert len(get(f"{url}/sessions/{session['session_id']}")["records"]) == 2
        assert stop(process) == 0


@pytest.mark.weights
@pytest.mark.timeout(180)
def test_sigterm_lets_a_running_turn_end_and_a_second_one_does_not(smollm2_path: Path) -> None:
    for second in (False, True):
        with running("--model", str(smollm2_path)) as (url, process):
            base = post(f"{url}/sessions")["base_url"]
            with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
                stream = client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "Count to a hundred."}],
                    max_tokens=3000 if second else 40,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                next(iter(stream))
                process.send_signal(signal.SIGTERM)
                if second:
                    process.send_signal(signal.SIGTERM)
                    with pytest.raises(openai.APIError):
                        list(stream)
                else:
                    assert list(stream)[-1].choices[0].finish_reason == "length"
            process.communicate(timeout=30)
            assert process.returncode == 0


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--port", "nonsense"), "port"),
        (("--no-such-flag",), "no-such-flag"),
        (("--model", "/nowhere/model.gguf", "--port", "0"), "/nowhere/model.gguf"),
        (("--model", "no-such-model", "--port", "0"), "no-such-model"),
        (("--family", "no-such-family", "--port", "0", "--model", "/nowhere"), "/nowhere"),
    ],
)
def test_what_stops_the_start_is_one_clear_line_and_exit_code_2(flags: tuple[str, ...], says: str) -> None:
    done = subprocess.run(command("serve", *flags), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_one_clear_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(command("serve", "--port", str(port)), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
