"""What a phase of `bench guided` came to, and the figures made of it. Pure.

Averages are over the requests that were answered; those that failed are counted beside them. TTFT counts from when the
request was given to the engine. TPOT is (last piece - first piece) / (tokens - 1), of replies that came in two pieces
or more; ITL are the gaps between pieces, all of a phase as one set.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stenograph.bench.figures import Figures
from stenograph.bench.quantiles import quantile, summary_ms
from stenograph.core.types import EngineTimes, FinishReason

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

_QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A request that was answered. Times are monotonic seconds; `prompt` is the prompt's number."""

    prompt: int
    sent_s: float
    pieces_s: tuple[float, ...]
    end_s: float
    num_prompt: int
    num_cached: int
    num_completion: int
    finish: FinishReason
    text: str
    times: EngineTimes | None

    @property
    def ttft_s(self) -> float | None:
        """Until the first piece; None where nothing was drawn."""
        return self.pieces_s[0] - self.sent_s if self.pieces_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first piece; None where it cannot be told."""
        if len(self.pieces_s) < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.num_completion - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces."""
        return [after - before for before, after in pairwise(self.pieces_s)]


@dataclass(slots=True, kw_only=True)
class Phase:
    """`num_asked` prompts once, guided or free. `num_drawn` counts all tokens of the time: also those of requests that
    failed, and of those that only kept the batch full.

    `engine_cpu_s` is None where the engine's process did not live through it.
    """

    mode: str
    num_asked: int
    heard: list[Heard] = field(default_factory=list[Heard])
    errors: Counter[str] = field(default_factory=Counter[str])
    messages: Counter[str] = field(default_factory=Counter[str])
    first_error: str = ""
    num_drawn: int = 0
    seconds: float = 0.0
    engine_cpu_s: float | None = None
    late_s: list[float] = field(default_factory=list[float])

    @property
    def is_over(self) -> bool:
        """Whether every prompt has its reply, or has failed."""
        return len(self.heard) + self.errors.total() == self.num_asked

    def failed(self, kind: str, message: str) -> None:
        """Count a request that was not answered."""
        self.errors[kind] += 1
        self.first_error = self.first_error or f"{kind}: {message}"
        if message in self.messages or len(self.messages) < MAX_MESSAGES:
            self.messages[message] += 1


def guided_figures(phase: Phase, is_kept: Callable[[str], bool] | None) -> Figures:
    """The figures of a phase; see figures.LABELS. `is_kept` tells whether a text satisfies the grammar."""
    figures: Figures = {"answered": len(phase.heard), "errors": phase.errors.total()}
    heard = phase.heard
    if not heard:
        return figures
    num_tokens = sum(one.num_completion for one in heard)
    figures["completion_tokens_per_s"] = phase.num_drawn / phase.seconds
    figures["tokens_per_reply"] = num_tokens / len(heard)
    figures["cached_share"] = sum(one.num_cached for one in heard) / sum(one.num_prompt for one in heard)
    figures["cut_share"] = sum(one.finish is FinishReason.LENGTH for one in heard) / len(heard)
    _add_latencies(figures, "ttft", [ttft for one in heard if (ttft := one.ttft_s) is not None])
    _add_ttft_parts(figures, heard)
    _add_latencies(figures, "tpot", [tpot for one in heard if (tpot := one.tpot_s) is not None])
    _add_latencies(figures, "itl", [gap for one in heard for gap in one.gaps_s])
    _add_latencies(figures, "e2e", [one.end_s - one.sent_s for one in heard])
    if phase.num_drawn and phase.engine_cpu_s is not None:
        figures["engine_cpu_ms_per_token"] = phase.engine_cpu_s * 1e3 / phase.num_drawn
    _add_late(figures, phase.late_s)
    if is_kept is not None:
        _add_kept(figures, heard, is_kept)
    return figures


def over_free(guided: Figures, free: Figures) -> Figures:
    """Guided / free of one round, where both have the figure."""
    return {
        name: guided[figure] / free[figure]
        for name, figure in OVER_FREE.items()
        if figure in guided and free.get(figure)
    }


def raw_of(phase: Phase, is_kept: Callable[[str], bool] | None) -> dict[str, Any]:
    """What the figures were made of: the phase, and its requests as columns, in the order in which they were sent."""
    ordered = sorted(phase.heard, key=lambda one: one.sent_s)
    rows = [_row(one, ordered[0].sent_s, is_kept) for one in ordered]
    return {
        "run": {
            "step": phase.mode,
            "num_ok": len(ordered),
            "seconds": phase.seconds,
            "num_drawn": phase.num_drawn,
            "finish_reasons": dict(Counter(str(one.finish) for one in ordered)),
            "errors": dict(phase.errors),
            "first_error": phase.first_error,
            "messages": dict(phase.messages),
            "num_heartbeats": len(phase.late_s),
        },
        "requests": {name: [row[name] for row in rows] for name in rows[0]} if rows else {},
    }


def _row(one: Heard, zero_s: float, is_kept: Callable[[str], bool] | None) -> dict[str, Any]:
    return {
        "prompt": one.prompt,
        "sent_ms": _ms(one.sent_s - zero_s),
        "ttft_ms": _ms(one.ttft_s),
        "tpot_ms": _ms(one.tpot_s),
        "e2e_ms": _ms(one.end_s - one.sent_s),
        "longest_gap_ms": _ms(max(one.gaps_s, default=None)),
        "num_prompt": one.num_prompt,
        "num_cached": one.num_cached,
        "num_completion": one.num_completion,
        "finish": str(one.finish),
        "satisfies": None if is_kept is None else is_kept(one.text),
        "text": one.text,
    }


def _add_latencies(figures: Figures, name: str, values_s: Sequence[float]) -> None:
    if not values_s:
        return
    ordered = sorted(values_s)
    for shown, q in _QUANTILES.items():
        figures[f"{name}_{shown}_ms"] = quantile(ordered, q) * 1e3
    figures[f"{name}_mean_ms"] = statistics.fmean(ordered) * 1e3


def _add_ttft_parts(figures: Figures, heard: Sequence[Heard]) -> None:
    """Where the engine says that TTFT went: a guided request waits for its grammar in the queue."""
    known = [(one.sent_s, one.times) for one in heard if one.times is not None and one.pieces_s]
    if known:
        figures["ttft_queue_ms"] = statistics.fmean(times.admitted - sent_s for sent_s, times in known) * 1e3
        figures["ttft_prefill_ms"] = statistics.fmean(times.first_token - times.admitted for _, times in known) * 1e3


def _add_late(figures: Figures, late_s: Sequence[float]) -> None:
    late = summary_ms(late_s)
    figures |= {f"loop_lag_{name}": late[name] for name in ("p50_ms", "p99_ms", "max_ms") if name in late}


def _add_kept(figures: Figures, heard: Sequence[Heard], is_kept: Callable[[str], bool]) -> None:
    kept = [is_kept(one.text) for one in heard]
    ended = [is_right for one, is_right in zip(heard, kept, strict=True) if one.finish is FinishReason.STOP]
    figures["satisfied_share"] = sum(kept) / len(kept)
    if ended:
        figures["satisfied_ended_share"] = sum(ended) / len(ended)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
