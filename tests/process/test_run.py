"""`stenograph run` as a process: the command's environment and exit code, signals, samples, and what is left behind."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import tomllib
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from standins.tiny.llama import write_tiny_folder

from .test_serve import command, get, running

pytestmark = pytest.mark.timeout(600)

AGENT = """
import sys
import openai

with openai.OpenAI() as client:
    messages = [{"role": "user", "content": "hi"}]
    for text in ("more", "bye"):
        reply = client.chat.completions.create(model="any", messages=messages, max_tokens=8, temperature=0)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": text}]
print("the agent is done")
sys.exit(3)
"""

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
"""An agent that shows its environment."""

WAIT = """
import os, signal, sys, urllib.request

def end(number, frame):
    os.write(1, f"ended by {signal.Signals(number).name}\\n".encode())
    sys.exit(9)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).read()
os.write(1, b"waits\\n")
while True:
    signal.pause()
"""
"""An agent that makes one turn, and ends by a signal alone. It does not `print`: a signal may come within that, and a
handler must not print then."""


def run(*arguments: str, environ: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **(environ or {})}
    return subprocess.run(command("run", *arguments), capture_output=True, text=True, check=False, env=environment)


def python(text: str) -> list[str]:
    return ["--", sys.executable, "-c", text]


def test_an_agent_runs_on_a_server_that_is_started_for_it_and_leaves_samples(tiny: Path, tmp_path: Path) -> None:
    samples = tmp_path / "out.json"
    done = run("--model", str(tiny), "--samples", str(samples), *python(AGENT))
    assert (done.returncode, done.stdout) == (3, "the agent is done\n"), done.stderr
    (sample,) = json.loads(samples.read_text())["samples"]
    assert sum(sample["loss_mask"]) == 16
    assert list(tmp_path.iterdir()) == [samples]
    assert "stenograph: starting a server" in done.stderr
    assert re.search(r"session [0-9a-f]{32}: 2 turns in 1 strand, 16 tokens sampled", done.stderr)
    assert re.search(r"strand +0 +main +2 turns +\d+ tokens", done.stderr)
    assert re.search(r"drift: ", done.stderr)
    assert f"samples in {samples}" in done.stderr
    assert " INFO " not in done.stderr
    (port,) = re.findall(r"ready at http://127\.0\.0\.1:(\d+)", done.stderr)
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(port))) != 0, "its server is gone"


SIDE = """
import json, os, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for first in ([], [{"role": "system", "content": "You are a title generator. Write a title."}]):
    body = {"messages": [*first, {"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    head = {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
"""
"""An agent that makes a turn of its work, and asks for a title."""


def test_what_is_in_no_sample_is_said(server: str, tmp_path: Path) -> None:
    samples = tmp_path / "out.json"
    done = run("--url", server, "--samples", str(samples), *python(SIDE))
    assert done.returncode == 0, done.stderr
    answer = json.loads(samples.read_text())
    assert len(answer["samples"]) == 1
    (row,) = answer["session_metadata"]["left_out"].values()
    assert row["sampled_tokens"] > 0
    assert f"left out of the samples: 1 strand of title ({row['sampled_tokens']} sampled tokens)" in done.stderr


def test_each_client_finds_the_session_in_its_environment(server: str) -> None:
    others = {"GOOGLE_API_KEY": "theirs", "ANTHROPIC_AUTH_TOKEN": "theirs", "https_proxy": "http://proxy:1"}
    show = f"{SHOW}; import pathlib; print(json.dumps([pathlib.Path(os.environ[n]).joinpath(p).read_text() for n, p in "
    show += "[('CODEX_HOME', 'config.toml'), ('GEMINI_CLI_HOME', '.gemini/settings.json')]]))"
    done = run("--url", f"{server}/", *python(show), environ=others)
    assert done.returncode == 0, done.stderr
    found, (codex, gemini) = map(json.loads, done.stdout.splitlines())
    session = found["OPENAI_API_KEY"]
    root = f"{server}/sessions/{session}"
    assert {
        name: found[name] for name in found if name.startswith(("OPENAI", "ANTHROPIC", "GOOGLE", "GEMINI_API"))
    } == {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": session,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": session,
        "ANTHROPIC_MODEL": get(f"{server}/v1/models")["data"][0]["id"],
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": session,
    }
    assert found["NO_PROXY"].split(",")[-2:] == ["127.0.0.1", "localhost"]
    settings = tomllib.loads(codex)
    assert settings["model_providers"][settings["model_provider"]] == {
        "name": "Stenograph",
        "base_url": f"{root}/v1",
        "wire_api": "responses",
        "env_key": "OPENAI_API_KEY",
    }
    assert json.loads(gemini)["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert not Path(found["CODEX_HOME"]).exists(), "the settings are gone"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(root)
    assert "no turn was made; the command sent the session no request" in done.stderr


def test_no_setting_and_no_credential_of_a_server_reaches_the_command(tmp_path: Path) -> None:
    """Neither of one that runs, nor of one that is started here."""
    model = write_tiny_folder(tmp_path / "model")
    hidden = {
        "STENOGRAPH_API_KEY": "the-trainers",
        "STENOGRAPH_ADMIN_KEY": "the-admins",
        "STENOGRAPH_LOG_LEVEL": "error",
        "OTEL_EXPORTER_OTLP_HEADERS": "x=the-tracers",
        "PGPASSWORD": "the-stores",
        "HF_TOKEN": "the-hubs",
    }
    kept = {"MY_AGENT": "1", "OTEL_SERVICE_NAME": "agent", "NOT_STENOGRAPH_AT_ALL": "1"}
    keys = ("--api-key", hidden["STENOGRAPH_API_KEY"], "--admin-key", hidden["STENOGRAPH_ADMIN_KEY"])
    with running("--model", str(model), *keys) as (url, _):
        for server in (("--url", url), ("--model", str(model))):
            done = run(*server, *python(SHOW), environ={**hidden, **kept})
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert not {name for name in found if name.startswith("STENOGRAPH")} | (found.keys() & hidden.keys())
            for secret in (value for value in hidden.values() if "the-" in value):
                assert secret not in done.stdout
            assert kept.items() <= found.items()
            assert found["OPENAI_API_KEY"].startswith("stg-")
            assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"] == found["GEMINI_API_KEY"]


def test_the_key_of_a_command_makes_turns_and_sets_no_reward(tmp_path: Path) -> None:
    agent = """
import json, os, urllib.error, urllib.request

def status(method, path, body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    session = os.environ["ANTHROPIC_BASE_URL"]
    url = (session if path.startswith("+") else session.rpartition("/sessions/")[0]) + path.lstrip("+")
    try:
        return urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method)).status
    except urllib.error.HTTPError as error:
        return error.code

print(json.dumps([
    status("POST", "+/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'),
    status("PUT", "+/outcome", b'{"reward": 1}'), status("GET", "+", None), status("DELETE", "+", None),
    status("POST", "/sessions", b"{}"), status("GET", "/sessions", None), status("POST", "/flush_cache", b"{}"),
]))
"""
    flags = ("--model", str(write_tiny_folder(tmp_path / "model")), "--api-key", "the-trainers")
    done = run(*flags, *python(agent))
    assert json.loads(done.stdout) == [200, *[403] * 6], done.stderr


def test_the_exit_code_is_the_command_s(server: str, tmp_path: Path) -> None:
    assert run("--url", server, "--", "sh", "-c", "exit 7").returncode == 7
    assert run("--url", server, "--", "sh", "-c", "kill -KILL $$").returncode == 128 + 9
    plain = tmp_path / "plain"
    plain.write_text("x")
    for program, code, why in (("no-such-command", 127, "command not found"), (str(plain), 126, "not executable")):
        done = run("--url", "http://127.0.0.1:9", "--", program)
        assert (done.returncode, done.stderr) == (code, f"stenograph: {program}: {why}\n")


def test_what_stops_the_start_is_one_line_and_2(server: str, tiny: Path, tmp_path: Path) -> None:
    for arguments, why in (
        (["--url", server], "run needs a COMMAND: write it after --"),
        (["--url", server, "--"], "run needs a COMMAND"),
        (["--url", server, "--model", "x", "--", "true"], "--model is for one that is started here"),
        (["--url", "http://127.0.0.1:9", "--", "true"], "no session at http://127.0.0.1:9: the server does not answer"),
        (["--url", "nowhere", "--", "true"], "--url: 'nowhere' is no address: write it as http://HOST:PORT"),
        (
            ["--url", f"{server}/v1", "--", "true"],
            "is more than the server's address: leave out /v1",
        ),
        (["true"], "unexpected argument true; the command of an agent stands after -- (see stenograph run --help)"),
        (["--samples", str(tmp_path / "no" / "file"), "--", "true"], "--samples: cannot write"),
        (["--sample", "x", "--", "true"], "unknown flag --sample; did you mean --samples?"),
        (["--engine", "vllm", "--", "true"], "give --engine-url"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert why in done.stderr
        assert done.stderr.count("\n") == 1
    taken = server.rpartition(":")[2]
    done = run("--model", str(tiny), "--port", taken, "--", "true")
    assert done.returncode == 2
    assert f"port {taken} on 127.0.0.1 is in use; choose another with --port" in done.stderr
    assert "the server did not start: exit code 2" in done.stderr


def test_a_server_with_a_key_is_asked_with_it_and_so_does_the_agent(tiny: Path, tmp_path: Path) -> None:
    samples = tmp_path / "out.safetensors"
    keys = {"STENOGRAPH_API_KEY": "secret,other"}
    done = run("--model", str(tiny), "--samples", str(samples), *python(AGENT), environ=keys)
    assert done.returncode == 3, done.stderr
    assert samples.stat().st_size > 0
    assert "secret" not in done.stderr


def test_a_key_that_is_missing_or_wrong_is_said_with_the_flag_for_it(tiny: Path) -> None:
    with running("--model", str(tiny), "--api-key", "secret") as (url, _):
        for keys, what in (((), "a key"), (("--api-key", "other"), "another key than the given one")):
            done = run("--url", url, *keys, "--", "true")
            assert done.returncode == 2
            assert f"the server requires {what}: set --api-key or STENOGRAPH_API_KEY" in done.stderr


def test_a_signal_goes_to_the_command_and_the_samples_are_written_all_the_same(server: str, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # without a terminal, nobody else would give it the second one
        samples = tmp_path / f"{number}.json"
        arguments = command("run", "--url", server, "--samples", str(samples), *python(WAIT))
        with subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(number)
            out, log = process.communicate()
        assert (process.returncode, out) == (9, f"ended by {number.name}\n"), log
        assert len(json.loads(samples.read_text())["samples"]) == 1


def test_ctrl_c_in_a_terminal_ends_the_command_once_and_its_server_stays_for_the_samples(
    tiny: Path, tmp_path: Path
) -> None:
    samples = tmp_path / "out.json"
    arguments = command("run", "--model", str(tiny), "--samples", str(samples), *python(WAIT))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no other thread runs here
    ) as process:
        os.close(theirs)
        shown = read_until(ours, "waits")
        os.write(ours, b"\x03")
        shown += read_until(ours, None)
        assert process.wait(60) == 9, shown
    os.close(ours)
    assert shown.count("ended by SIGINT") == 1
    assert len(json.loads(samples.read_text())["samples"]) == 1


def read_until(terminal: int, text: str | None) -> str:
    """What a terminal shows, until there is this text or its end."""
    shown = ""
    while text is None or text not in shown:
        select.select([terminal], [], [], 60)
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # so ends a terminal on Linux
            break
        if not piece:
            break
        shown += piece.decode(errors="replace")
    return shown


def test_a_chat_by_a_pipe_starts_a_server_and_leaves_none(tiny: Path, tmp_path: Path) -> None:
    samples, sampling = tmp_path / "out.json", tmp_path / "sampling.json"
    sampling.write_text('{"force": {"max_tokens": 8}}')
    done = subprocess.run(
        command("chat", "--model", str(tiny), "--sampling", str(sampling)),
        input=f"hi\n/stages\n/samples {samples}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^prefill +[0-9.]+ ms", done.stdout, re.MULTILINE)
    (sample,) = json.loads(samples.read_text())["samples"]
    assert 0 < sum(sample["loss_mask"]) <= 8
    (port,) = re.findall(r"ready at http://127\.0\.0\.1:(\d+)", done.stderr)
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(port))) != 0, "its server is gone"


def test_a_sample_of_a_session_that_is_gone_is_1_where_the_command_did_well(server: str, tmp_path: Path) -> None:
    delete: Any = """
import os, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"]
urllib.request.urlopen(urllib.request.Request(url, method="DELETE")).read()
"""
    samples = tmp_path / "out.json"
    done = run("--url", server, "--samples", str(samples), *python(delete))
    assert done.returncode == 1
    assert "cannot get the session's samples: " in done.stderr
    assert "404 There is no session" in done.stderr
    assert not samples.exists()
