"""`stenograph bench store`: what do sessions that are on disk cost when they are wanted again?

One session is played on a real server with an engine stand-in, and copied until there are as many as asked for. Then a
server is started on the folder, and every session gets one turn, in random order, one at a time; every tenth gets
another one at once, which needs no reading. Owns the options, the order of a run and its table.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.kit.artifact import ScenarioResult, write_artifact
from benchmarks.kit.figures import Figures, values_of
from benchmarks.kit.options import add_artifact, add_model, count
from benchmarks.kit.processes import CannotMeasure, Child, Children
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.report import spread_cell, table
from benchmarks.kit.runner import begin_artifact, cached_model, say
from benchmarks.kit.servers import start_serve, start_standin
from benchmarks.store.fill import fill

SIDE = "server"
_SECOND_EVERY = 10

LABELS = {
    "ready_s": "the server is ready after, s",
    "first_turn_after_start_s": "its first turn is answered after, s",
    "first_turn_ms": "that turn, ms",
    "cold_turn_p50_ms": "turn of a session that is on disk alone p50, ms",
    "cold_turn_p99_ms": "turn of a session that is on disk alone p99, ms",
    "warm_turn_p50_ms": "the next turn of it p50, ms",
    "warm_turn_p99_ms": "the next turn of it p99, ms",
    "touch_p50_ms": "the first p50 over the next p50, ms more",
    "cpu_ms_per_turn": "server CPU, ms per turn",
    "rss_most_mib": "most RSS, MiB",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model(parser)
    parser.add_argument("--sessions", type=count, default=10_000, help="on disk. Default: 10,000.")
    parser.add_argument("--turns", type=count, default=50, help="of each. Default: 50.")
    parser.add_argument("--touches", type=count, default=10_000, help="sessions that get a turn. Default: 10,000.")
    parser.add_argument("--message-bytes", type=count, default=200, help="of each user message. Default: 200.")
    parser.add_argument("--max-held-tokens", type=count, default=1_000_000, help="as of `serve`. Default: 1,000,000.")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the sessions lie. Default: a temporary one.")
    add_artifact(parser, "store", repeats=1)


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    artifact = begin_artifact("store", options)
    result = ScenarioResult(
        name="touch",
        title=f"{options.sessions} sessions of {options.turns} turns",
        sessions=options.sessions,
        turns=options.turns,
        message_bytes=options.message_bytes,
    )
    artifact.scenarios.append(result)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plan = _Plan(options, Path(folder) / "data", str(cached_model(options.model)))
        say(f"one session of {options.turns} turns, copied {options.sessions} times")
        talk, ids = plan.filled()
        for repeat in range(options.repeats):
            say(f"a turn of {min(options.touches, len(ids))} sessions; {repeat + 1} of {options.repeats}")
            result.figures.setdefault(SIDE, []).append(plan.touched(talk, ids, seed=repeat))
            write_artifact(options.out, artifact)
    figures = {name: values_of(result.figures[SIDE], name) for name in LABELS}
    told = {"bench": "store", "commit": artifact.commit, "dirty": artifact.dirty, "figures": figures}
    sys.stdout.write(f"{store_table(result)}\n{json.dumps(told)}\n")
    return 0


def store_table(result: ScenarioResult) -> str:
    """Every figure: median (least … most) over repeats."""
    rows = ([label, spread_cell(values_of(result.figures[SIDE], name))] for name, label in LABELS.items())
    return table([["figure", result.title], *rows])


@dataclass(slots=True)
class _Talk:
    """A client's side of one session."""

    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


class _Plan:
    """A run: what is asked for, and where its sessions lie."""

    def __init__(self, options: argparse.Namespace, folder: Path, model: str) -> None:
        self._options = options
        self._folder = folder
        self._model = model

    def filled(self) -> tuple[_Talk, list[str]]:
        """Play one session and copy it; what its client has said and heard, and the ids of all."""
        with Children() as children:
            _, client = self._started(children)
            session, talk = client.call("POST", "/sessions", {})["session_id"], _Talk()
            for number in range(self._options.turns):
                client.chat(session, talk, self._message(number))
        return talk, fill(self._folder, session, self._options.sessions)

    def touched(self, talk: _Talk, ids: Sequence[str], *, seed: int) -> Figures:
        """Start a server on the folder, and give sessions a turn; what that took."""
        chosen = random.Random(seed).sample(list(ids), min(self._options.touches, len(ids)))
        cold_s: list[float] = []
        warm_s: list[float] = []
        most_kib, first_s = 0, 0.0
        with Children() as children:
            began_s = time.perf_counter()
            server, client = self._started(children)
            ready_s = time.perf_counter()
            before_s = server.cpu_s()
            for index, session in enumerate(chosen):
                one = _Talk(list(talk.messages))
                cold_s.append(client.chat(session, one, self._message(seed)))
                if index == 0:
                    first_s = time.perf_counter()
                if index % _SECOND_EVERY == 0:
                    most_kib = max(most_kib, server.rss_kib())
                    warm_s.append(client.chat(session, one, self._message(seed + 1)))
            cpu_s = server.cpu_s() - before_s
            client.close()
        cold, warm = _quantiles("cold_turn", cold_s), _quantiles("warm_turn", warm_s)
        return {
            "ready_s": ready_s - began_s,
            "first_turn_ms": cold_s[0] * 1e3,
            "first_turn_after_start_s": first_s - began_s,
            **cold,
            **warm,
            "touch_p50_ms": cold["cold_turn_p50_ms"] - warm["warm_turn_p50_ms"],
            "cpu_ms_per_turn": cpu_s * 1e3 / (len(cold_s) + len(warm_s)),
            "rss_most_mib": most_kib / 1024,
        }

    def _started(self, children: Children) -> "tuple[Child, _Client]":
        _, engine_url = start_standin(children, ReplyShape())
        flags = ["--engine", "sglang", "--engine-url", engine_url, "--model", self._model]
        flags += ["--data-dir", str(self._folder), "--max-held-tokens", str(self._options.max_held_tokens)]
        server, url = start_serve(children, flags)
        return server, _Client(url)

    def _message(self, number: int) -> str:
        return f"question {number} {'of many words ' * self._options.message_bytes}"[: self._options.message_bytes]


class _Client:
    """One connection that asks and waits."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def call(self, method: str, path: str, body: object) -> dict[str, str]:
        """The answer to a request. Raises CannotMeasure for an error."""
        self._connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        with self._connection.getresponse() as response:
            content = response.read()
        if response.status != 200:
            raise CannotMeasure(f"{path} answered {response.status}: {content[:200]!r}")
        answer: dict[str, str] = json.loads(content)
        return answer

    def chat(self, session: str, talk: _Talk, text: str) -> float:
        """Have a turn, and add it to the talk; the seconds until its answer was read."""
        talk.messages.append({"role": "user", "content": text})
        body, path = json.dumps({"messages": talk.messages}), f"/sessions/{session}/v1/chat/completions"
        began_s = time.perf_counter()
        self._connection.request("POST", path, body, {"content-type": "application/json"})
        with self._connection.getresponse() as response:
            content = response.read()
        took_s = time.perf_counter() - began_s
        if response.status != 200:
            raise CannotMeasure(f"{path} answered {response.status}: {content[:200]!r}")
        talk.messages.append({"role": "assistant", "content": json.loads(content)["choices"][0]["message"]["content"]})
        return took_s

    def close(self) -> None:
        self._connection.close()


def _quantiles(name: str, times_s: Sequence[float]) -> Figures:
    ordered = sorted(times_s)
    return {f"{name}_{q}_ms": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for q, p in _SHOWN}


_SHOWN = (("p50", 50), ("p99", 99))
