"""A phase of `bench guided`, the figures made of it, and how they are shown: a table, notes, rows of a CSV file.

Averages are over the requests that were answered; those that failed are counted beside them. TTFT counts from when the
request was given to the engine. TPOT is (last piece - first piece) / (tokens - 1), of replies that came in two pieces
or more; ITL are the gaps between pieces, all of a phase as one set.
"""

import csv
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from benchmarks.kit.artifact import ENGINE, Artifact, Raw, ScenarioResult
from benchmarks.kit.client import Failures, RequestFailed
from benchmarks.kit.figures import Figures, values_of
from benchmarks.kit.quantiles import latency_figures, milliseconds
from benchmarks.kit.report import figure_rows, number, ratios_of, spread_cell, table, told_apart
from benchmarks.kit.requests import GeneratedReply, as_columns, request_figures, without_gaps
from stenograph.core.stages import Stage
from stenograph.core.types import FinishReason

GUIDED, FREE = "guided", "free"
OVER_FREE = {
    "tpot_p50_over_free": "tpot_p50_ms",
    "tpot_mean_over_free": "tpot_mean_ms",
    "itl_p50_over_free": "itl_p50_ms",
    "itl_p99_over_free": "itl_p99_ms",
    "engine_cpu_over_free": "engine_cpu_ms_per_token",
}
"""Figures that are guided / free of the same round, by what they are the ratio of."""
MAX_MESSAGES = 20
"""Distinct messages of failures that are kept."""
RATIOS = ("_ms", "_per_token", "_per_s", "_per_reply")
"""The endings of figures whose ratio is shown."""
MEDIAN = "median"
"""In place of the number of a round: a row of medians over all."""
CSV_ARGUMENTS = (
    *("model", "grammar", "dataset", "concurrency", "num_prompts", "max_tokens", "ignore_eos", "temperature"),
    *("top_p", "top_k", "seed", "threads", "repeats"),
)
CSV_FIGURES = (
    *("elapsed_s", "prompt_tokens", "completion_tokens", "answered", "errors", "tokens_per_reply", "satisfied_share"),
    *("requests_per_s", "completion_tokens_per_s"),
    *(f"{latency}_{of}_ms" for latency in ("e2e", "ttft", "tpot", "itl") for of in ("mean", "p50", "p99")),
    *("engine_cpu_ms_per_token", "loop_lag_p50_ms", "loop_lag_p99_ms", "loop_lag_max_ms"),
)
CSV_HEADER = (
    *("begun", "commit", "dirty", *CSV_ARGUMENTS, "num_prompts_there", "mode", "round", *CSV_FIGURES, *OVER_FREE),
)

IsKept = Callable[[str], bool]
"""Whether a text satisfies the grammar."""


@dataclass(slots=True, kw_only=True)
class Phase:
    """`num_asked` prompts once, guided or free. `heard` are the replies by the prompt's number. `num_sampled` counts
    all tokens of the time: those of requests that failed, and of those that only kept the batch full, too.

    `engine_cpu_s` is None where the engine's process did not live through it.
    """

    mode: str
    num_asked: int
    heard: dict[int, GeneratedReply] = field(default_factory=dict[int, GeneratedReply])
    failures: Failures = field(default_factory=Failures)
    messages: Counter[str] = field(default_factory=Counter[str])
    num_sampled: int = 0
    seconds: float = 0.0
    engine_cpu_s: float | None = None
    late_s: list[float] = field(default_factory=list[float])

    def __str__(self) -> str:
        return f"{self.num_ended} of {self.num_asked} replies, {self.num_sampled} tokens"

    @property
    def num_ended(self) -> int:
        """Prompts that have their reply, or have failed."""
        return len(self.heard) + self.failures.by_kind.total()

    @property
    def is_over(self) -> bool:
        """Whether every prompt has its reply, or has failed."""
        return self.num_ended == self.num_asked

    def failed(self, kind: str, message: str) -> None:
        """Count a request that was not answered."""
        self.failures.add(RequestFailed(kind, message))
        if message in self.messages or len(self.messages) < MAX_MESSAGES:
            self.messages[message] += 1


def guided_figures(phase: Phase, is_kept: IsKept | None) -> Figures:
    """The figures of a phase; see figures.LABELS."""
    figures: Figures = {"answered": len(phase.heard), "errors": phase.failures.by_kind.total()}
    replies = list(phase.heard.values())
    if not replies:
        return figures
    figures |= request_figures(as_columns([reply.facts(reply.sent_s) for reply in replies]))
    figures["elapsed_s"] = phase.seconds
    figures["requests_per_s"] = len(replies) / phase.seconds
    figures["completion_tokens_per_s"] = phase.num_sampled / phase.seconds
    figures["tokens_per_reply"] = figures["completion_tokens"] / len(replies)
    figures["cut_share"] = sum(reply.is_cut for reply in replies) / len(replies)
    known = [reply.stages_s for reply in replies if reply.stages_s and reply.pieces_s]
    for stage in (Stage.QUEUE, Stage.PREFILL):  # a guided request waits for its grammar in the queue
        if known:
            figures[f"ttft_{stage}_ms"] = statistics.fmean(stages_s[stage] for stages_s in known) * 1e3
    if phase.num_sampled and phase.engine_cpu_s is not None:
        figures["engine_cpu_ms_per_token"] = phase.engine_cpu_s * 1e3 / phase.num_sampled
    figures |= latency_figures("loop_lag", [late * 1e3 for late in phase.late_s], "p50 p99 max")
    if is_kept is not None:
        kept = [(is_kept(reply.text), reply.finish_reason == FinishReason.STOP) for reply in replies]
        figures["satisfied_share"] = sum(is_right for is_right, _ in kept) / len(kept)
        if ended := [is_right for is_right, has_ended in kept if has_ended]:
            figures["satisfied_ended_share"] = sum(ended) / len(ended)
    return figures


def raw_of(phase: Phase, is_kept: IsKept | None) -> Raw:
    """The source of the figures: the phase, and its requests as columns, in the order in which they were sent."""
    ordered = sorted(phase.heard.items(), key=lambda one: one[1].sent_s)
    rows = [
        {
            "prompt": number,
            "sent_ms": milliseconds(reply.sent_s - ordered[0][1].sent_s),
            **reply.facts(reply.sent_s),
            "finish": reply.finish_reason,
            "satisfies": None if is_kept is None else is_kept(reply.text),
            "text": reply.text,
        }
        for number, reply in ordered
    ]
    return {
        "run": {
            "step": phase.mode,
            "num_ok": len(ordered),
            "seconds": phase.seconds,
            "num_drawn": phase.num_sampled,
            "finish_reasons": dict(Counter(str(reply.finish_reason) for _, reply in ordered)),
            **phase.failures.report(),
            "messages": dict(phase.messages),
            "num_heartbeats": len(phase.late_s),
        },
        "requests": without_gaps(as_columns(rows)),
    }


def guided_table(artifact: Artifact) -> str:
    """Every figure: median (least … most) over rounds; the ratio is of the two phases of each round.

    Without free phases there is the column of the guided ones alone.
    """
    guided, free = ([*(result.figures[ENGINE] for result in artifact.scenarios), []])[:2]
    head = ["figure", GUIDED, FREE, f"{GUIDED} / {FREE}", "told from noise"]

    def cells(figure: str) -> Sequence[str] | None:
        mine, other = values_of(guided, figure), values_of(free, figure)
        if not free:
            return [spread_cell(mine)] if mine else None
        if figure in OVER_FREE or not (mine or other):
            return None
        ratios = ratios_of(figure, guided, free) if figure.endswith(RATIOS) else []
        return spread_cell(mine), spread_cell(other), spread_cell(ratios), told_apart(figure, other, mine)

    return table([head if free else head[:2], *figure_rows(None, cells)])


def notes_of(artifact: Artifact) -> Iterator[str]:
    """Finish reasons, failures and the idle heartbeat, a line each."""
    for result in artifact.scenarios:
        mode, runs = result.name, [raw["run"] for raw in result.raw[ENGINE]]
        ended, failed = Counter[str](), Counter[str]()
        for run in runs:
            ended.update(run["finish_reasons"])
            failed.update(run["messages"])
        shown = ", ".join(f"{reason} {num}" for reason, num in sorted(ended.items()))
        yield f"{mode}: replies ended by {shown or 'nothing'}"
        yield from (f"FAILED {mode}, {num} times: {message}" for message, num in failed.most_common())
    late = artifact.machine["idle_loop_late"]
    shown = ", ".join(f"{name} {number(late[f'{name}_ms'])}" for name in ("p50", "p99", "max"))
    yield f"the event loop's heartbeat without any load is late by {shown} ms"


def check_csv(path: Path) -> None:
    """Raises ValueError where the file has other columns than a run of this version writes, and OSError."""
    if path.exists() and (head := path.read_text("utf-8").partition("\n")[0]) and head != ",".join(CSV_HEADER):
        raise ValueError(f"{path} has other columns than this version writes: give another file")


def append_csv(path: Path, artifact: Artifact) -> None:
    """Append a row of medians for each mode, after the header where the file is new or empty. Raises OSError."""
    with path.open("a", encoding="utf-8", newline="") as file:
        is_new = file.tell() == 0
        for result in artifact.scenarios:
            found = {name: values_of(result.figures[ENGINE], name) for name in (*CSV_FIGURES, *OVER_FREE)}
            medians = {name: statistics.median(values) for name, values in found.items() if values}
            write_row(file, artifact, result, MEDIAN, medians, has_header=is_new and result is artifact.scenarios[0])


def write_row(
    file: TextIO,
    artifact: Artifact,
    result: ScenarioResult,
    number: int | str,
    figures: Mapping[str, float],
    *,
    has_header: bool,
) -> None:
    """Write the row of a mode and round, after the header where it is the first."""
    rows = csv.DictWriter(file, CSV_HEADER, restval="", extrasaction="ignore", lineterminator="\n")
    if has_header:
        rows.writeheader()
    head = {"begun": artifact.begun, "commit": artifact.commit, "dirty": artifact.dirty, **artifact.arguments}
    own = {"num_prompts_there": result.turns, "mode": result.name, "round": number}
    rows.writerow({**head, **own, **{name: f"{value:.6g}" for name, value in figures.items()}})
    file.flush()
