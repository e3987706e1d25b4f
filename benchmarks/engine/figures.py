"""The measurements of `stenograph bench engine` as figures, and as an artifact keeps them. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.engine.load import Prefilled, SessionTurn
from benchmarks.engine.window import Window
from benchmarks.kit.figures import Figures

OVER = {
    "decode_over_llamacpp": "decode_tokens_per_cpu_s",
    "prefill_over_llamacpp": "prefill_tokens_per_cpu_s",
    "session_cpu_over_cold": "session_cpu_s",
    "ttft_last_turn_over_cold": "ttft_last_turn_ms",
}
"""Figures that are one side / the other of the same round, by what they are the ratio of."""

Raw = dict[str, Any]


def middle_of(num_turns: int) -> int:
    """The number, from 1, of the turn in the middle: the tenth of twenty."""
    return (num_turns + 1) // 2


def decode_figures(window: Window, rss_mib: float) -> Figures:
    """Tokens of a batch that is whole, by CPU time and by the clock."""
    return {
        "decode_tokens_per_cpu_s": window.num_tokens / window.cpu_s,
        "decode_tokens_per_s": window.num_tokens / window.wall_s,
        "rss_loaded_mib": rss_mib,
    }


def prefill_figures(prefilled: Sequence[Prefilled], rss_mib: float) -> Figures:
    """Prompt tokens that were computed; each prompt's first token is drawn at its end, and counts as none."""
    num_computed = sum(one.num_prompt - one.num_cached for one in prefilled)
    return {
        "prefill_tokens_per_cpu_s": num_computed / sum(one.cpu_s for one in prefilled),
        "prefill_tokens_per_s": num_computed / sum(one.wall_s for one in prefilled),
        "ttft_p50_ms": statistics.median(one.wall_s for one in prefilled) * 1e3,
        "rss_loaded_mib": rss_mib,
    }


def session_figures(turns: Sequence[SessionTurn], rss_mib: float) -> Figures:
    """A session as a whole, and its turns at the beginning, in the middle and at the end."""
    return {
        "ttft_first_turn_ms": turns[0].ttft_s * 1e3,
        "ttft_middle_turn_ms": turns[middle_of(len(turns)) - 1].ttft_s * 1e3,
        "ttft_last_turn_ms": turns[-1].ttft_s * 1e3,
        "cached_last_turn_tokens": turns[-1].num_cached,
        "cached_share": sum(turn.num_cached for turn in turns) / sum(turn.num_prompt for turn in turns),
        "session_cpu_s": sum(turn.cpu_s for turn in turns),
        "session_s": sum(turn.wall_s for turn in turns),
        "rss_loaded_mib": rss_mib,
    }


def over(mine: Figures, other: Figures) -> Figures:
    """The ratios of one round that say something here."""
    return {name: mine[figure] / other[figure] for name, figure in OVER.items() if figure in mine and other.get(figure)}


def decode_raw(window: Window) -> Raw:
    """The raw data of the figures."""
    return {"run": asdict(window)}


def prefill_raw(prefilled: Sequence[Prefilled]) -> Raw:
    """The raw data of the figures."""
    return {"requests": _columns([asdict(one) for one in prefilled])}


def session_raw(turns: Sequence[SessionTurn]) -> Raw:
    """The raw data of the figures."""
    return {"turns": _columns([asdict(turn) for turn in turns])}


def _columns(rows: Sequence[Raw]) -> Raw:
    return {name: [row[name] for row in rows] for name in rows[0]}
