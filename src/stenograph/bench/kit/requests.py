"""Answered requests as columns, a list a fact, and the figures that those of every engine have. Pure.

The columns: `ttft_ms`, `tpot_ms` (None where it cannot be known), `e2e_ms`, `gaps_ms` (a list a request), `num_prompt`,
`num_completion` and `num_cached`; a benchmark has more of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stenograph.bench.kit.figures import Figures
from stenograph.bench.kit.quantiles import latency_figures

Columns = dict[str, list[Any]]


def as_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Requests as an artifact keeps them."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def request_figures(requests: Columns) -> Figures:
    """Tokens, the share of them that was cached, and latencies; ITL are the gaps of all requests as one set."""
    num_prompt = sum(requests["num_prompt"])
    figures: Figures = {"prompt_tokens": num_prompt, "completion_tokens": sum(requests["num_completion"])}
    if num_prompt:
        figures["cached_share"] = sum(requests["num_cached"]) / num_prompt
    for name in ("ttft", "tpot", "e2e"):
        figures |= latency_figures(name, [value for value in requests[f"{name}_ms"] if value is not None])
    return figures | latency_figures("itl", [gap for gaps in requests["gaps_ms"] for gap in gaps])


def without_gaps(requests: Columns) -> Columns:
    """The columns as an artifact keeps them: of the gaps, the longest of each request."""
    if not requests:
        return {}
    kept = {name: values for name, values in requests.items() if name != "gaps_ms"}
    return {**kept, "longest_gap_ms": [max(gaps, default=None) for gaps in requests["gaps_ms"]]}
