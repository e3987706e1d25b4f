"""What `bench guided` shows: guided beside free and their ratio, and a row of a CSV file for each run."""

import csv
import io
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from stenograph.bench.artifact import Artifact, ScenarioResult
from stenograph.bench.figures import LABELS, Figures, better, values_of
from stenograph.bench.guided_figures import FREE, GUIDED, OVER_FREE
from stenograph.bench.report import number, spread_cell, table
from stenograph.bench.verdicts import Verdict, compare_values

ENGINE = "engine"
"""Under which name an artifact has the figures of a mode: they are the engine's, no server is there."""

RATIOS = ("_ms", "_per_token", "_per_s", "_per_reply")
"""How figures end whose ratio says something."""

CSV_ARGUMENTS = (
    *("model", "grammar", "concurrency", "num_prompts", "max_tokens", "ignore_eos", "temperature", "seed"),
    *("threads", "repeats"),
)
CSV_FIGURES = (
    *("answered", "errors", "tokens_per_reply", "satisfied_share", "ttft_p50_ms", "tpot_p50_ms", "tpot_p90_ms"),
    *("tpot_mean_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "completion_tokens_per_s", "engine_cpu_ms_per_token"),
    *("loop_lag_p50_ms", "loop_lag_p99_ms", "loop_lag_max_ms"),
)
CSV_HEADER = (
    *("begun", "commit", "dirty", *CSV_ARGUMENTS, "num_prompts_there"),
    *(f"{mode}_{figure}" for mode in (GUIDED, FREE) for figure in CSV_FIGURES),
    *OVER_FREE,
)


def guided_table(artifact: Artifact) -> str:
    """Every figure: median (least … most) over rounds; the ratio is of the two phases of each round."""
    guided, free = (_result(artifact, mode).figures[ENGINE] for mode in (GUIDED, FREE))
    rows = [["figure", GUIDED, FREE, f"{GUIDED} / {FREE}", "told from noise"]]
    for figure, label in LABELS.items():
        values, free_values = values_of(guided, figure), values_of(free, figure)
        if figure in OVER_FREE or not (values or free_values):
            continue
        told = ""
        if values and free_values:
            verdict = compare_values(free_values, values, better(figure)).verdict
            told = "no" if verdict is Verdict.NOISE else "yes"
        ratios = list(_ratios(figure, guided, free))
        rows.append([label, spread_cell(values), spread_cell(free_values), spread_cell(ratios), told])
    return table(rows)


def _ratios(figure: str, guided: Sequence[Figures], free: Sequence[Figures]) -> Iterator[float]:
    """Guided / free of each round."""
    if figure.endswith(RATIOS):
        for mine, other in zip(guided, free, strict=True):
            if figure in mine and other.get(figure):
                yield mine[figure] / other[figure]


def notes_of(artifact: Artifact) -> Iterator[str]:
    """What there is to say beside the figures, a line each."""
    for mode in (GUIDED, FREE):
        runs = [raw["run"] for raw in _result(artifact, mode).raw[ENGINE]]
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
    """Append a row of medians, after the header where the file is new or empty. Raises OSError."""
    results = {mode: _result(artifact, mode) for mode in (GUIDED, FREE)}
    cells: list[object] = [artifact.begun, artifact.commit, artifact.dirty]
    cells += [artifact.arguments[name] for name in CSV_ARGUMENTS]
    cells.append(results[GUIDED].turns)
    cells += [_median(results[mode], figure) for mode in (GUIDED, FREE) for figure in CSV_FIGURES]
    cells += [_median(results[GUIDED], figure) for figure in OVER_FREE]
    with path.open("ab") as file:
        head = _line(CSV_HEADER) if os.fstat(file.fileno()).st_size == 0 else ""
        file.write((head + _line(cells)).encode())


def _median(result: ScenarioResult, figure: str) -> str:
    values = values_of(result.figures[ENGINE], figure)
    return f"{statistics.median(values):.6g}" if values else ""


def _line(cells: tuple[object, ...] | list[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _result(artifact: Artifact, mode: str) -> ScenarioResult:
    return next(result for result in artifact.scenarios if result.name == mode)
