"""The table of `bench guided`: guided beside free and their ratio; and a row of a CSV file for each mode."""

import csv
import io
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stenograph.bench.guided.figures import FREE, GUIDED, OVER_FREE
from stenograph.bench.kit.artifact import ENGINE, Artifact, ScenarioResult
from stenograph.bench.kit.figures import Figures, values_of
from stenograph.bench.kit.report import figure_rows, number, ratios_of, spread_cell, table, told_apart

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
    if path.exists() and (head := path.read_text("utf-8").partition("\n")[0]) and head != _line(CSV_HEADER).strip():
        raise ValueError(f"{path} has other columns than this version writes: give another file")


def append_csv(path: Path, artifact: Artifact) -> None:
    """Append a row of medians for each mode, after the header where the file is new or empty. Raises OSError."""
    rows = [
        _row(artifact, result, MEDIAN, {name: _median(result, name) for name in (*CSV_FIGURES, *OVER_FREE)})
        for result in artifact.scenarios
    ]
    with path.open("ab") as file:
        head = _line(CSV_HEADER) if os.fstat(file.fileno()).st_size == 0 else ""
        file.write((head + "".join(rows)).encode())


def write_row(artifact: Artifact, mode: str, number: int, figures: Figures) -> None:
    """Write the row of one phase to stdout, after the header where it is the first."""
    result = next(result for result in artifact.scenarios if result.name == mode)
    is_first = number == 1 and result is artifact.scenarios[0]
    shown = {name: f"{figures[name]:.6g}" for name in CSV_FIGURES if name in figures}
    sys.stdout.write((_line(CSV_HEADER) if is_first else "") + _row(artifact, result, number, shown))
    sys.stdout.flush()


def _row(artifact: Artifact, result: ScenarioResult, number: int | str, figures: Mapping[str, str]) -> str:
    arguments = [artifact.arguments[name] for name in CSV_ARGUMENTS]
    shown = [figures.get(name, "") for name in (*CSV_FIGURES, *OVER_FREE)]
    head = [artifact.begun, artifact.commit, artifact.dirty, *arguments, result.turns, result.name, number]
    return _line([*head, *shown])


def _median(result: ScenarioResult, figure: str) -> str:
    values = values_of(result.figures[ENGINE], figure)
    return f"{statistics.median(values):.6g}" if values else ""


def _line(cells: tuple[object, ...] | list[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
