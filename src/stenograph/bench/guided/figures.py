"""The result of a phase of `bench guided`, and the figures made of it. Pure.

Averages are over the requests that were answered; those that failed are counted beside them. TTFT counts from when the
request was given to the engine. TPOT is (last piece - first piece) / (tokens - 1), of replies that came in two pieces
or more; ITL are the gaps between pieces, all of a phase as one set.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stenograph.bench.kit.client import Failures, RequestFailed
from stenograph.bench.kit.figures import Figures
from stenograph.bench.kit.quantiles import latency_figures, milliseconds
from stenograph.bench.kit.requests import as_columns, request_figures, without_gaps
from stenograph.bench.kit.timed_reply import TimedReply
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedReply:
    """A request that was answered. `prompt` is the prompt's number."""

    prompt: int
    num_prompt: int
    text: str
    reply: TimedReply

    @property
    def reason(self) -> FinishReason:
        """The finish reason."""
        return self.reply.finish.reason


@dataclass(slots=True, kw_only=True)
class Phase:
    """`num_asked` prompts once, guided or free. `num_sampled` counts all tokens of the time: those of requests that
    failed, and of those that only kept the batch full, too.

    `engine_cpu_s` is None where the engine's process did not live through it.
    """

    mode: str
    num_asked: int
    heard: list[GuidedReply] = field(default_factory=list[GuidedReply])
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


def guided_figures(phase: Phase, is_kept: Callable[[str], bool] | None) -> Figures:
    """The figures of a phase; see figures.LABELS. `is_kept` says whether a text satisfies the grammar."""
    figures: Figures = {"answered": len(phase.heard), "errors": phase.failures.by_kind.total()}
    heard = phase.heard
    if not heard:
        return figures
    figures |= request_figures(as_columns([_facts(one) for one in heard]))
    figures["elapsed_s"] = phase.seconds
    figures["requests_per_s"] = len(heard) / phase.seconds
    figures["completion_tokens_per_s"] = phase.num_sampled / phase.seconds
    figures["tokens_per_reply"] = figures["completion_tokens"] / len(heard)
    figures["cut_share"] = sum(one.reason is FinishReason.LENGTH for one in heard) / len(heard)
    _add_ttft_parts(figures, heard)
    if phase.num_sampled and phase.engine_cpu_s is not None:
        figures["engine_cpu_ms_per_token"] = phase.engine_cpu_s * 1e3 / phase.num_sampled
    figures |= latency_figures("loop_lag", [late * 1e3 for late in phase.late_s], "p50 p99 max")
    if is_kept is not None:
        _add_kept(figures, heard, is_kept)
    return figures


def raw_of(phase: Phase, is_kept: Callable[[str], bool] | None) -> dict[str, Any]:
    """The source of the figures: the phase, and its requests as columns, in the order in which they were sent."""
    ordered = sorted(phase.heard, key=lambda one: one.reply.sent_s)
    rows = [
        {
            "prompt": one.prompt,
            "sent_ms": milliseconds(one.reply.sent_s - ordered[0].reply.sent_s),
            **_facts(one),
            "finish": str(one.reason),
            "satisfies": None if is_kept is None else is_kept(one.text),
            "text": one.text,
        }
        for one in ordered
    ]
    return {
        "run": {
            "step": phase.mode,
            "num_ok": len(ordered),
            "seconds": phase.seconds,
            "num_drawn": phase.num_sampled,
            "finish_reasons": dict(Counter(str(one.reason) for one in ordered)),
            **phase.failures.report(),
            "messages": dict(phase.messages),
            "num_heartbeats": len(phase.late_s),
        },
        "requests": without_gaps(as_columns(rows)),
    }


def _facts(one: GuidedReply) -> dict[str, Any]:
    """The facts that figures are made of."""
    reply = one.reply
    return {
        "ttft_ms": _ms(reply.ttft_s),
        "tpot_ms": _ms(reply.tpot_s),
        "e2e_ms": _ms(reply.end_s - reply.sent_s),
        "gaps_ms": [milliseconds(gap) for gap in reply.gaps_s],
        "num_prompt": one.num_prompt,
        "num_cached": reply.num_cached,
        "num_completion": len(reply.ids),
    }


def _add_ttft_parts(figures: Figures, heard: Sequence[GuidedReply]) -> None:
    """Where the engine says that TTFT went: a guided request waits for its grammar in the queue."""
    replies = [one.reply for one in heard]
    known = [(reply.sent_s, reply.times) for reply in replies if reply.times is not None and reply.pieces_s]
    if known:
        figures["ttft_queue_ms"] = statistics.fmean(times.admitted - sent_s for sent_s, times in known) * 1e3
        figures["ttft_prefill_ms"] = statistics.fmean(times.first_token - times.admitted for _, times in known) * 1e3


def _add_kept(figures: Figures, heard: Sequence[GuidedReply], is_kept: Callable[[str], bool]) -> None:
    kept = [is_kept(one.text) for one in heard]
    ended = [is_right for one, is_right in zip(heard, kept, strict=True) if one.reason is FinishReason.STOP]
    figures["satisfied_share"] = sum(kept) / len(kept)
    if ended:
        figures["satisfied_ended_share"] = sum(ended) / len(ended)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else milliseconds(seconds)
