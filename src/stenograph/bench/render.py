"""`stenograph bench render`: what does the text side of a turn cost, and does it grow with the conversation?

Conversations of several lengths; of each, in turns: the bridge to its last message, the parse of its last reply, and a
render of all of it. No engine and no server: one thread, and the CPU time of each call. Owns the options, the order of
a run and its table; what is timed is in render_turn.py.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stenograph.bench.artifact import Artifact, ScenarioResult, write_artifact
from stenograph.bench.engine_report import MOST_LOAD
from stenograph.bench.figures import LABELS, Figures, values_of
from stenograph.bench.render_turn import TurnWork, conversation, turn_work
from stenograph.bench.report import json_line, number, spread_cell, table
from stenograph.bench.responsiveness import begin_artifact, cached_model, count
from stenograph.core.errors import CallerError, StartupError
from stenograph.render.load import load_renderer
from stenograph.render.model_files import load_model_files
from stenograph.render.renderer import Renderer

SIDE = "text"
"""Under which name an artifact has the figures: neither a server nor an engine is there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--model", default="smollm2-135m", help="as of `serve`. Default: smollm2-135m.")
    parser.add_argument("--family", default="auto", help="as of `serve`. Default: auto.")
    parser.add_argument(
        "--messages", type=_counts, default=(8, 64, 256), metavar="8,64,256", help="how long. Default: 8,64,256."
    )
    parser.add_argument("--message-bytes", type=count, default=1024, help="of each message. Default: 1024.")
    parser.add_argument("--calls", type=count, default=20, help="of each kind, a repeat. Default: 20.")
    parser.add_argument("--repeats", type=count, default=5, help="rounds that are measured. Default: 5.")
    parser.add_argument("--out", type=Path, default=Path("bench-render.json"), help="Default: bench-render.json.")


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    try:
        files = load_model_files(cached_model(options.model))
        renderer = load_renderer(files, options.family).renderer
        artifact = begin_artifact("render", options)
        artifact.arguments["family"] = renderer.family.name
        work = {num: _work(renderer, num, options.message_bytes) for num in options.messages}
        for num, one in work.items():
            artifact.scenarios.append(_scenario(num, one, options.message_bytes))
        for number in range(options.repeats):
            sys.stderr.write(f"{number + 1} of {options.repeats}\n")
            for result, one in zip(artifact.scenarios, work.values(), strict=True):
                result.figures[SIDE].append(_figures(one, options.calls))
        write_artifact(options.out, artifact)
    except (CallerError, StartupError, ValueError, OSError) as error:
        sys.stderr.write(f"stenograph: {error}\n")
        return 2
    sys.stdout.write(f"{render_table(artifact)}\n{_note(artifact)}written to {options.out}\n{json_line(artifact)}\n")
    sys.stdout.flush()
    return 0


def render_table(artifact: Artifact) -> str:
    """Every figure: median (least … most) over repeats, a column for each length."""
    columns = [result.figures[SIDE] for result in artifact.scenarios]
    rows = [["figure", *(result.title for result in artifact.scenarios)]]
    for figure, label in LABELS.items():
        if any(values_of(repeats, figure) for repeats in columns):
            rows.append([label, *(spread_cell(values_of(repeats, figure)) for repeats in columns)])
    return table(rows)


def _note(artifact: Artifact) -> str:
    load, cores = artifact.machine["load_average"], artifact.machine["cores"]
    if load <= MOST_LOAD * cores:
        return ""
    return f"NOTE the machine had other work (load average {number(load)} on {cores} cores before the run)\n"


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
        goals=[],
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
