"""`stenograph bench render`: what does the text side of a turn cost, and does it grow with the conversation?

Conversations of several lengths; of each, in turns: the bridge to its last message, the parse of its last reply, and a
render of all of it. No engine and no server: one thread, and the CPU time of each call. Owns the options, the order of
a run and its table; what is timed is in turn.py.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.engine.report import MOST_LOAD
from benchmarks.kit.artifact import Artifact, ScenarioResult, write_artifact
from benchmarks.kit.figures import Figures
from benchmarks.kit.options import add_artifact, add_model, count
from benchmarks.kit.report import column_table, number
from benchmarks.kit.runner import begin_artifact, cached_model, say, show
from benchmarks.render.turn import TurnWork, conversation, turn_work
from stenograph.families.load import load_renderer
from stenograph.model.files import load_model_files
from stenograph.text.renderer import Renderer

SIDE = "text"
"""Under which name an artifact has the figures: neither a server nor an engine is there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model(parser)
    parser.add_argument("--family", default="auto", help="as of `serve`. Default: auto.")
    parser.add_argument(
        "--messages", type=_counts, default=(8, 64, 256), metavar="8,64,256", help="how long. Default: 8,64,256."
    )
    parser.add_argument("--message-bytes", type=count, default=1024, help="of each message. Default: 1024.")
    parser.add_argument("--calls", type=count, default=20, help="of each kind, a repeat. Default: 20.")
    add_artifact(parser, "render", repeats=5)


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    files = load_model_files(cached_model(options.model, weights=False))
    renderer = load_renderer(files, options.family).renderer
    artifact = begin_artifact("render", options)
    artifact.arguments["family"] = renderer.family.name
    work = {num: _work(renderer, num, options.message_bytes) for num in options.messages}
    artifact.scenarios += [_scenario(num, one, options.message_bytes) for num, one in work.items()]
    for repeat in range(options.repeats):
        say(f"{repeat + 1} of {options.repeats}")
        for result, one in zip(artifact.scenarios, work.values(), strict=True):
            result.figures[SIDE].append(_figures(one, options.calls))
    write_artifact(options.out, artifact)
    return show(artifact, options, column_table(artifact, SIDE), _note(artifact))


def _note(artifact: Artifact) -> str:
    load, cores = artifact.machine["load_average"], artifact.machine["cores"]
    if load <= MOST_LOAD * cores:
        return ""
    return f"NOTE the machine had other work (load average {number(load)} on {cores} cores before the run)"


def _work(renderer: Renderer, num_messages: int, message_bytes: int) -> TurnWork:
    work = turn_work(renderer, *conversation(renderer, num_messages, message_bytes))
    for call in work.timed.values():  # warm: what is made once is no part of a turn
        call()
    return work


def _scenario(num_messages: int, work: TurnWork, message_bytes: int) -> ScenarioResult:
    return ScenarioResult(
        name=f"messages{num_messages}",
        title=f"{num_messages} messages",
        sessions=1,
        turns=num_messages // 2,
        message_bytes=message_bytes,
        figures={SIDE: []},
        raw={SIDE: [{"num_prompt": work.num_prompt, "num_bridged": work.num_bridged, "num_reply": work.num_reply}]},
    )


def _figures(work: TurnWork, num_calls: int) -> Figures:
    figures: Figures = {name: _cpu_ms(call, num_calls) for name, call in work.timed.items()}
    figures["rerender_over_turn"] = figures["rerender_ms"] / (figures["bridge_ms"] + figures["parse_ms"])
    figures |= {"line_tokens": work.num_prompt, "bridged_tokens": work.num_bridged, "reply_tokens": work.num_reply}
    return figures


def _cpu_ms(call: Callable[[], object], num_calls: int) -> float:
    """The median of a call's CPU time, of all threads."""
    times_ns: list[int] = []
    for _ in range(num_calls):
        start_ns = time.process_time_ns()
        call()
        times_ns.append(time.process_time_ns() - start_ns)
    return statistics.median(times_ns) / 1e6


def _counts(text: str) -> Sequence[int]:
    """Lengths of conversations: a system message, a user's, and pairs of a reply and what is new after it."""
    lengths = tuple(int(part) for part in text.split(","))
    if any(length < 4 or length % 2 for length in lengths):
        raise argparse.ArgumentTypeError(f"even numbers of at least 4, the first of a system message; got {text}")
    return lengths
