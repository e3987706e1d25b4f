"""What a load of conversations came to: raw requests, as the load reports them, to figures. Pure.

Only requests that were answered are here; failures are counted beside them. TTFT and end to end count from when a turn
was due. TPOT is (end to end - TTFT) / (tokens - 1), of replies that came in two pieces or more; ITL are the gaps
between pieces, all of a run as one set, and a piece that holds several tokens is one.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from stenograph.bench.figures import Figures
from stenograph.bench.quantiles import quantile
from stenograph.core.types import Stage

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}

READ = (Stage.RECEIVE, Stage.ADMIT, Stage.DECODE)


def serving_figures(run: dict[str, Any], requests: dict[str, list[Any]], num_errors: int) -> Figures:
    """The figures of one repeat. `requests` are columns, as `serving_load` reports them; see figures.LABELS."""
    figures: Figures = {"errors": num_errors}
    if not requests or not run["seconds"]:
        return figures
    num, seconds = len(requests["e2e_ms"]), run["seconds"]
    num_prompt = sum(requests["num_prompt"])
    figures["chats_per_s"] = num / seconds
    figures["prompt_tokens_per_s"] = num_prompt / seconds
    figures["completion_tokens_per_s"] = sum(requests["num_completion"]) / seconds
    if num_prompt:
        figures["cached_share"] = sum(requests["num_cached"]) / num_prompt
    figures["cut_share"] = sum(requests["is_cut"]) / num
    _add_latencies(figures, "ttft", [ttft for ttft in requests["ttft_ms"] if ttft is not None])
    _add_latencies(figures, "tpot", [tpot for tpot in tpots_ms(requests) if tpot is not None])
    _add_latencies(figures, "itl", [gap for gaps in requests["gaps_ms"] for gap in gaps])
    _add_latencies(figures, "e2e", requests["e2e_ms"])
    figures |= ttft_parts(requests)
    return figures


def tpots_ms(requests: dict[str, list[Any]]) -> Iterator[float | None]:
    """Time per output token of each request; None where it cannot be told."""
    columns = (requests[name] for name in ("ttft_ms", "e2e_ms", "num_completion", "gaps_ms"))
    for ttft, e2e, num_tokens, gaps in zip(*columns, strict=True):
        yield (e2e - ttft) / (num_tokens - 1) if gaps and num_tokens > 1 else None


def ttft_parts(requests: dict[str, list[Any]]) -> Figures:
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


def without_gaps(requests: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns as an artifact keeps them: of the gaps, the longest of each request; and its TPOT."""
    if not requests:
        return {}
    kept = {name: values for name, values in requests.items() if name != "gaps_ms"}
    kept["tpot_ms"] = [None if tpot is None else round(tpot, 3) for tpot in tpots_ms(requests)]
    kept["longest_gap_ms"] = [max(gaps, default=None) for gaps in requests["gaps_ms"]]
    return kept


def _add_latencies(figures: Figures, name: str, values_ms: Sequence[float]) -> None:
    if not values_ms:
        return
    ordered = sorted(values_ms)
    for shown, q in QUANTILES.items():
        figures[f"{name}_{shown}_ms"] = quantile(ordered, q)
    figures[f"{name}_mean_ms"] = statistics.fmean(ordered)
