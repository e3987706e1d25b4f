"""`stenograph bench store`: what do sessions that are on disk cost when they are wanted again?

One session is played on a real server with an engine stand-in, and copied until there are as many as asked for. Then a
server is started on the folder, and every session gets one turn, in random order, one at a time; every tenth gets
another one at once, which needs no reading. Owns the options, the order of a run and its table.
"""

import argparse
import http.client
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.kit.artifact import ScenarioResult, write_artifact
from benchmarks.kit.figures import Figures
from benchmarks.kit.options import add_artifact, add_model, count
from benchmarks.kit.processes import CannotMeasure, Child, Children
from benchmarks.kit.quantiles import latency_figures
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.report import column_table
from benchmarks.kit.runner import begin_artifact, cached_model, say, show
from benchmarks.kit.servers import start_serve, start_standin
from benchmarks.store.fill import fill
from stenograph.model.files import load_model_files

Talk = list[dict[str, str]]
"""The messages of one session, said and heard."""
SIDE = "server"
LAYERS_TOP_K = 48 * 8
_SECOND_EVERY = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model(parser)
    parser.add_argument("--sessions", type=count, default=10_000, help="on disk. Default: 10,000.")
    parser.add_argument("--turns", type=count, default=50, help="of each. Default: 50.")
    touches = "sessions that get a turn, others in each repeat. Default: 10,000."
    parser.add_argument("--touches", type=count, default=10_000, help=touches)
    parser.add_argument("--message-bytes", type=count, default=200, help="of each user message. Default: 200.")
    routed = "new rows of experts in each reply, 48 layers × 8. Default: none."
    parser.add_argument("--routed-tokens", type=int, default=0, help=routed)
    parser.add_argument("--max-held-tokens", type=count, default=1_000_000, help="as of `serve`. Default: 1,000,000.")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the sessions lie. Default: a temporary one.")
    add_artifact(parser, "store", repeats=1)


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    if options.repeats > options.sessions:
        raise ValueError(f"--repeats {options.repeats} needs as many --sessions, got {options.sessions}")
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
        plan = _Plan(options, Path(folder) / "data", cached_model(options.model, weights=False))
        say(f"one session of {options.turns} turns, copied {options.sessions} times")
        talk, ids = plan.filled()
        random.Random(0).shuffle(ids)
        num = min(options.touches, len(ids) // options.repeats)
        for repeat in range(options.repeats):
            say(f"a turn of {num} sessions; {repeat + 1} of {options.repeats}")
            touched = plan.touched(talk, ids[repeat * num : (repeat + 1) * num], seed=repeat)
            result.figures.setdefault(SIDE, []).append(touched)
            write_artifact(options.out, artifact)
    return show(artifact, options, column_table(artifact, SIDE))


class _Plan:
    """A run: what is asked for, and where its sessions lie."""

    def __init__(self, options: argparse.Namespace, folder: Path, model: Path) -> None:
        self._options = options
        self._folder = folder
        self._model = model
        base64_bytes = options.routed_tokens * LAYERS_TOP_K * 4 // 3 * 4
        self._shape = ReplyShape(vocab_size=load_model_files(model).vocab_size, base64_bytes=base64_bytes)

    def filled(self) -> tuple[Talk, list[str]]:
        """Play one session and copy it; what its client has said and heard, and the ids of all."""
        talk: Talk = []
        with Children() as children:
            _, client = self._started(children)
            session = client.post("/sessions", {})[0]["session_id"]
            for number in range(self._options.turns):
                client.chat(session, talk, self._message(number))
        return talk, fill(self._folder, session, self._options.sessions)

    def touched(self, talk: Talk, ids: Sequence[str], *, seed: int) -> Figures:
        """Start a server on the folder, and give sessions a turn; what that took."""
        cold_s: list[float] = []
        warm_s: list[float] = []
        most_kib, first_s = 0, 0.0
        with Children() as children:
            began_s = time.perf_counter()
            server, client = self._started(children)
            ready_s = time.perf_counter()
            before_s = server.cpu_s()
            for index, session in enumerate(ids):
                one = talk.copy()
                cold_s.append(client.chat(session, one, self._message(seed)))
                if index == 0:
                    first_s = time.perf_counter()
                if index % _SECOND_EVERY == 0:
                    most_kib = max(most_kib, server.rss_kib())
                    warm_s.append(client.chat(session, one, self._message(seed + 1)))
            cpu_s = server.cpu_s() - before_s
            client.close()
        cold = latency_figures("cold_turn", [1e3 * one for one in cold_s], "p50 p99")
        warm = latency_figures("warm_turn", [1e3 * one for one in warm_s], "p50 p99")
        return {
            "ready_s": ready_s - began_s,
            "first_turn_ms": cold_s[0] * 1e3,
            "first_turn_after_start_s": first_s - began_s,
            **cold,
            **warm,
            "touch_p50_ms": cold["cold_turn_p50_ms"] - warm["warm_turn_p50_ms"],
            "cpu_ms_per_turn": cpu_s * 1e3 / (len(cold_s) + len(warm_s)),
            "rss_most_mib": most_kib / 1024,
            "data_mib": sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file()) / 2**20,
        }

    def _started(self, children: Children) -> "tuple[Child, _Client]":
        _, engine_url = start_standin(children, self._shape)
        flags = ["--engine", "sglang", "--engine-url", engine_url, "--model", str(self._model)]
        flags += ["--replay", "routed_experts"] if self._options.routed_tokens else []
        flags += ["--data-dir", str(self._folder), "--max-held-tokens", str(self._options.max_held_tokens)]
        server, url = start_serve(children, flags)
        return server, _Client(url)

    def _message(self, number: int) -> str:
        return f"question {number} {'of many words ' * self._options.message_bytes}"[: self._options.message_bytes]


class _Client:
    """One connection that asks and waits."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def post(self, path: str, body: object) -> tuple[Any, float]:
        """The answer to a request, and the seconds until it was read. Raises CannotMeasure for an error."""
        content = json.dumps(body)
        began_s = time.perf_counter()
        self._connection.request("POST", path, content, {"content-type": "application/json"})
        with self._connection.getresponse() as response:
            answer = response.read()
        took_s = time.perf_counter() - began_s
        if response.status != 200:
            raise CannotMeasure(f"{path} answered {response.status}: {answer[:200]!r}")
        return json.loads(answer), took_s

    def chat(self, session: str, talk: Talk, text: str) -> float:
        """Have a turn, and add it to the talk; the seconds until its answer was read."""
        talk.append({"role": "user", "content": text})
        answer, took_s = self.post(f"/sessions/{session}/v1/chat/completions", {"messages": talk})
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return took_s

    def close(self) -> None:
        self._connection.close()
