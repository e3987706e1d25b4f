"""`stenograph bench rollouts`: what does a rollout cost in the client's own process?

A server in front of an engine stand-in, both processes of their own. Here: the client, and agents of so many turns, of
which a share fails and a share hangs; groups of eight, and half as many spares. The agents' own requests go over plain
sockets; what they cost is measured by themselves first, on sessions that are open already, and taken off.
"""

import argparse
import asyncio
import json
import random
import time
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from benchmarks.kit.artifact import ScenarioResult, write_artifact
from benchmarks.kit.figures import Figures
from benchmarks.kit.options import add_artifact, add_model, count
from benchmarks.kit.processes import Children
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.report import column_table
from benchmarks.kit.runner import begin_artifact, cached_model, say, show
from benchmarks.kit.servers import start_serve, start_standin
from stenograph.client import Client, RolloutBatch, RolloutSession, silent
from stenograph.model.files import load_model_files

SIDE = "server"
GROUP_SIZE, SPARES = 8, 4
WARM_ROLLOUTS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model(parser)
    add = parser.add_argument
    add("--groups", type=count, default=32, help="whole groups of eight rollouts. Default: 32.")
    add("--turns", type=count, default=2, help="of each agent. Default: 2.")
    add("--tokens", type=count, default=60, help="of each reply. Default: 60.")
    add("--failures", type=float, default=0.2, help="share of agents that fail. Default: 0.2.")
    add("--hangs", type=float, default=0.1, help="share of agents that never end. Default: 0.1.")
    add("--concurrency", type=count, default=64, help="rollouts at a time. Default: 64.")
    add_artifact(parser, "rollouts", repeats=5)


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    artifact = begin_artifact("rollouts", options)
    num, title = options.groups * GROUP_SIZE, f"{options.groups} groups of {options.turns} turns"
    artifact.scenarios = [ScenarioResult(name="rollouts", title=title, sessions=num, turns=options.turns)]
    path = cached_model(options.model, weights=False)
    shape = ReplyShape(num_tokens=options.tokens, vocab_size=load_model_files(path).vocab_size)
    with Children() as children:
        _, engine = start_standin(children, shape)
        flags = ["--model", str(path), "--engine", "sglang", "--engine-url", engine]
        _, url = start_serve(children, flags)
        artifact.scenarios[0].figures[SIDE] = [asyncio.run(_measure(url, options)) for _ in range(options.repeats)]
    write_artifact(options.out, artifact)
    return show(artifact, options, column_table(artifact, SIDE))


async def _measure(url: str, options: argparse.Namespace) -> Figures:
    agent = Turns(options.turns, failures=options.failures, hangs=options.hangs)
    async with Client(url) as client:
        await client.rollouts(Turns(options.turns), range(WARM_ROLLOUTS), progress=silent)
        per_turn = await _agents_alone(client, options)
        began, cpu = time.monotonic(), time.process_time()
        batch: RolloutBatch[int] = await client.rollouts(
            agent,
            range(options.groups),
            group_size=GROUP_SIZE,
            spares=SPARES,
            concurrency=options.concurrency,
            failed_reward=0.0,
            timeout_s=30.0,
            progress=silent,
        )
        cpu_s, wall_s = time.process_time() - cpu, time.monotonic() - began
        left = await client.num_sessions()
    num_ended = sum(len(group.rollouts) + len(group.others) for group in (*batch.groups, *batch.others))
    say(f"{len(batch.groups)} groups whole, {num_ended} rollouts ended, {left} sessions left")
    return {
        "client_cpu_ms_per_rollout": 1000 * (cpu_s - per_turn * agent.num_turns_done) / num_ended,
        "rollouts_per_s": num_ended / wall_s,
        "sessions_left": left,
    }


async def _agents_alone(client: Client, options: argparse.Namespace) -> float:
    """CPU seconds of a turn of an agent, on sessions that were opened before."""
    agent = Turns(options.turns)
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(client.session()) for _ in range(GROUP_SIZE * SPARES)]
        cpu = time.process_time()
        await asyncio.gather(*(agent(number, session) for number, session in enumerate(sessions)))
        return (time.process_time() - cpu) / agent.num_turns_done


class Turns:
    """Agents of so many turns over a socket of their own; some fail after the first, some never end."""

    def __init__(self, num_turns: int, *, failures: float = 0.0, hangs: float = 0.0) -> None:
        self._num_turns, self._failures, self._hangs = num_turns, failures, hangs
        self._random = random.Random(0)
        self.num_turns_done = 0

    async def __call__(self, task: int, session: RolloutSession) -> float:
        luck = self._random.random()
        url = urlsplit(session.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            messages: list[object] = [{"role": "user", "content": f"Task {task}."}]
            for _ in range(self._num_turns):
                messages.append(await self._turn(reader, writer, url.path, messages))
                messages.append({"role": "user", "content": "Go on."})
                if luck < self._hangs:
                    await asyncio.Event().wait()
                if luck < self._hangs + self._failures:
                    raise ValueError("the agent broke")
        finally:
            writer.close()
        return luck

    async def _turn(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, messages: list[object]
    ) -> object:
        body = json.dumps({"messages": messages}).encode()
        head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.split(b"content-length:")[1].split(b"\r\n")[0])
        self.num_turns_done += 1
        return json.loads(await reader.readexactly(length))["choices"][0]["message"]
