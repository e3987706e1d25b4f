"""`stenograph serve` as a process: its one ready line, real clients, signals, and the death of its engine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from stenograph.cli.settings_table import SETTINGS
from stenograph.core.settings import Section

EXAMPLES = Path(__file__).parents[2] / "examples"


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "stenograph.cli.main", *flags]


@contextmanager
def running(*flags: str, environ: Mapping[str, str] | None = None) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server on a free port; yields its URL when its ready line has come."""
    with subprocess.Popen(
        command("serve", "--port", "0", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environ or {})},
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
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json"}, method="POST")
    ) as response:
        return json.loads(response.read())


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.loads(response.read())


def stop(process: "subprocess.Popen[str]") -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return process.returncode


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[str]:
    with running("--model", str(smollm2_path)) as (url, process):
        yield url
        assert stop(process) == 0  # SIGTERM drains and exits 0


@pytest.mark.weights
@pytest.mark.timeout(600)
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
@pytest.mark.timeout(600)
def test_the_agent_of_the_demo_works_and_leaves_a_sample(server: str, tmp_path: Path) -> None:
    out = tmp_path / "sample.safetensors"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "openai_agent.py"), "--url", server, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.stat().st_size > 0


@pytest.mark.weights
@pytest.mark.timeout(600)
def test_the_agent_of_anthropic_s_sdk_works_and_leaves_a_sample(server: str) -> None:
    command = [sys.executable, str(EXAMPLES / "anthropic_agent.py"), "--url", server]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"\((\d+) tokens counted before, (\d+) used; (\w+)\)", done.stdout)
    assert [counted == used for counted, used, _ in counts] == [True] * len(counts)
    assert (counts[0][2], counts[-1][2] != "tool_use", "[tool]" in done.stdout) == ("tool_use", True, True)


@pytest.mark.weights
@pytest.mark.timeout(600)
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
@pytest.mark.timeout(600)
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
                    assert process.stdout is not None
                    next(line for line in process.stdout if "shutting down" in line)  # two at once would be one
                    process.send_signal(signal.SIGTERM)
                    with pytest.raises(openai.APIError):
                        list(stream)
                else:
                    assert list(stream)[-1].choices[0].finish_reason == "length"
            process.communicate()
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
def test_an_error_at_start_is_one_clear_line_and_exit_code_2(flags: tuple[str, ...], says: str) -> None:
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


def test_an_address_that_is_not_this_machines_is_one_line_with_a_way_out() -> None:
    done = said_by("serve", "--host", "203.0.113.1", "--port", "0")
    assert (done.returncode, done.stderr) == (
        2,
        "stenograph: cannot listen on 203.0.113.1:0: Cannot assign requested address; choose another with --host or"
        " --port\n",
    )


def said_by(*arguments: str, environ: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """What a command that ends by itself said."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, env={**os.environ, **(environ or {})}
    )


def test_the_help_of_serve_has_every_flag_in_a_section_and_examples_at_its_end() -> None:
    told = said_by("serve", "--help").stdout
    sections = [line.removesuffix(":") for line in told.splitlines() if re.fullmatch(r"[A-Za-z][A-Za-z ]*:", line)]
    assert sections == ["options", *Section, "examples"]
    assert set(re.findall(r"^  (--[a-z-]+) ", told, re.MULTILINE)) == {"--config", *(s.flag for s in SETTINGS)}
    options = told.split("\noptions:\n")[1].split("\n\n")[0]
    assert not any(setting.flag in options for setting in SETTINGS)


def test_the_help_of_serve_shows_a_unit_only_after_a_number_and_one_in_the_singular() -> None:
    told = " ".join(said_by("serve", "--help").stdout.split())
    for shown in ("none: kept until deleted.", "min(16, CPUs).", "1 thread.", "0 threads.", "30.0 seconds."):
        assert f"Default: {shown}" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--max-inflight", "3"), "unknown flag --max-inflight; did you mean --max-in-flight?"),
        (("serve", "--bogus"), "unknown flag --bogus (see stenograph serve --help)"),
        (("serve", "now"), "unexpected argument now (see stenograph serve --help)"),
        (("serve", "--port", "70000"), "bad value '70000' for --port on the command line"),
        (("verify", "--prot", "3"), "unknown flag --prot (see stenograph verify --help)"),
        (("serve", "--prot", "3"), "unknown flag --prot; did you mean --port?"),
        (("fetch", "--port", "3"), "unknown flag --port (see stenograph fetch --help)"),
        (("verify", "--port", "3"), "unknown flag --port (see stenograph verify --help)"),
        (("fetch", "--modle", "x"), "unknown flag --modle; did you mean --model?"),
        (("serve", "--shop", "x"), "unknown flag --shop (see stenograph serve --help)"),
        (("serve", "--max-s", "5"), "unknown flag --max-s (see stenograph serve --help)"),
        (("fetch", "--mod", "x"), "unknown flag --mod (see stenograph fetch --help)"),
        (("verify", "--fam", "x"), "unknown flag --fam (see stenograph verify --help)"),
    ],
)
def test_a_flag_that_is_wrong_is_named_as_it_was_typed(arguments: tuple[str, ...], says: str) -> None:
    done = said_by(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_variables_that_kubernetes_sets_do_not_stop_the_start_and_are_noted_once() -> None:
    of_a_service = {"STENOGRAPH_SERVICE_HOST": "10.0.0.11", "STENOGRAPH_PORT": "tcp://10.0.0.11:8080"}
    done = said_by("serve", "--port", "0", "--model", "/nowhere", environ=of_a_service)
    note, stopped = done.stderr.splitlines()
    assert "Kubernetes" in note
    assert "/nowhere" in stopped
