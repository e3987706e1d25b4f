"""The figures of a load of conversations, made of its raw requests, and their table. Pure.

Only requests that were answered are here; failures are counted beside them. TTFT and end to end count from when a turn
was due. TPOT is (end to end - TTFT) / (tokens - 1), of replies that came in two pieces or more; ITL are the gaps
between pieces, all of a run as one set, and a piece that holds several tokens is one.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.figures import Figures, spread, values_of
from benchmarks.kit.report import figure_rows, name_in, number, spread_cell, table, told_apart
from benchmarks.kit.requests import Columns, request_figures, without_gaps
from stenograph.core.stages import Stage

READ = (Stage.RECEIVE, Stage.ADMIT, Stage.DECODE)


def serving_figures(run: dict[str, Any], requests: Columns, num_errors: int) -> Figures:
    """The figures of one repeat. `requests` are as `load` reports them; see figures.LABELS."""
    figures: Figures = {"errors": num_errors}
    if not requests or not run["seconds"]:
        return figures
    num, seconds = len(requests["e2e_ms"]), run["seconds"]
    figures |= request_figures({**requests, "tpot_ms": list(_tpots_ms(requests))})
    figures["chats_per_s"] = num / seconds
    figures["prompt_tokens_per_s"] = figures["prompt_tokens"] / seconds
    figures["completion_tokens_per_s"] = figures["completion_tokens"] / seconds
    figures["cut_share"] = sum(requests["is_cut"]) / num
    return figures | _ttft_parts(requests)


def kept_columns(requests: Columns) -> Columns:
    """The columns as an artifact keeps them, with each request's TPOT."""
    if not requests:
        return {}
    tpots_ms = [None if tpot is None else round(tpot, 3) for tpot in _tpots_ms(requests)]
    return {**without_gaps(requests), "tpot_ms": tpots_ms}


def _tpots_ms(requests: Columns) -> Iterator[float | None]:
    columns = (requests[name] for name in ("ttft_ms", "e2e_ms", "num_completion", "gaps_ms"))
    for ttft, e2e, num_tokens, gaps in zip(*columns, strict=True):
        yield (e2e - ttft) / (num_tokens - 1) if gaps and num_tokens > 1 else None


def _ttft_parts(requests: Columns) -> Figures:
    """Where the time until the first piece went, mean over the uncut requests whose stages are known; they add up.

    Cut ones are left out, for what was taken back has no record.

    `ttft_rest_ms` is what no stage explains: both ways of the network, the first text's way out, and text that lags its
    tokens. `ttft_outside_ms` is all but queue and prefill, which are the engine's. An engine that gives its whole reply
    at once has `ttft_engine_ms` in place of these two.
    """
    parts: dict[str, list[float]] = {}
    columns = (requests[name] for name in ("wait_ms", "ttft_ms", "stages_ms", "is_cut"))
    for wait, ttft, stages, is_cut in zip(*columns, strict=True):
        if ttft is None or not stages or is_cut:
            continue
        found = {"ttft_wait_ms": wait, **dict(_stage_parts(stages))}
        found["ttft_rest_ms"] = ttft - sum(found.values())
        if "ttft_prefill_ms" in found:
            found["ttft_outside_ms"] = ttft - found["ttft_queue_ms"] - found["ttft_prefill_ms"]
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in parts.items()}


def _stage_parts(stages: dict[str, float]) -> Iterator[tuple[str, float]]:
    if Stage.RECEIVE in stages:
        yield "ttft_read_ms", sum(stages.get(stage, 0.0) for stage in READ)
    if Stage.RENDER in stages:
        yield "ttft_render_ms", stages[Stage.RENDER]
    if Stage.PREFILL in stages:
        yield "ttft_queue_ms", stages.get(Stage.QUEUE, 0.0)
        yield "ttft_prefill_ms", stages[Stage.PREFILL]
    elif Stage.DECODE_TOKENS in stages:
        yield "ttft_engine_ms", stages[Stage.DECODE_TOKENS]


def serving_table(artifact: Artifact) -> str:
    """Every figure of every load: median (least … most) through the server and straight, and what lies between."""
    rows = [["load", "figure", "server", "straight", "server - straight", "told from noise"]]
    for result in artifact.scenarios:
        rows += figure_rows(name_in(artifact, result), partial(_cells, result))
    return table(rows)


def _cells(result: ScenarioResult, figure: str) -> Sequence[str] | None:
    server, direct = (values_of(result.figures.get(target, []), figure) for target in ("server", "direct"))
    if not server and not direct:
        return None
    return spread_cell(server), spread_cell(direct), _between(direct, server), told_apart(figure, direct, server)


def _between(direct: list[float], server: list[float]) -> str:
    if not direct or not server:
        return ""
    straight = spread(direct).median
    difference = spread(server).median - straight
    change = f" ({difference / abs(straight):+.1%})" if straight else ""
    return f"{'+' if difference > 0 else ''}{number(difference)}{change}"
