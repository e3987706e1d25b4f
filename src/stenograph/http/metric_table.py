"""The table of the server's metrics: their names, types, labels and meanings, from which docs/metrics.md is checked.

Label values are never a client's words. Laws and error codes are open sets, but each is written in our own code, which
bounds them; the others are enums. Counts nothing: metrics.py does.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stenograph.core.errors import Limit, StenographError
from stenograph.core.kinds import StrandKind
from stenograph.core.outcome import NO_VERDICT, RolloutVerdict, TokenFate
from stenograph.core.stages import Stage
from stenograph.core.telemetry import GrammarStep, SessionEnd, TurnEnd
from stenograph.engine.base import Outcome

BODY_BYTES = "body_bytes"
"""The one limit that is not a `Limit`: the server refuses a body with more bytes with 413."""

DRIFT_CLASSES = ("special_token_count", "special_token_type", "non_assistant_text", "assistant_text")

_STAGE_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""A stage takes anything from a dictionary look-up to a long generation."""
_TTFT_BOUNDS_S = _STAGE_BOUNDS_S[3:]
"""Nothing gets from a socket to a token in less than a millisecond."""
_TOKEN_BOUNDS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0),
)
"""Fine between 1 and 200 ms, where engines differ; above it are stalls."""

_GRAMMAR_BOUNDS_S = (0.00001, 0.000025, 0.00005, *_STAGE_BOUNDS_S[:17])
"""A mask is filled in some 0.1 ms, a grammar compiled in anything up to its deadline of 30 s."""

ENGINE_LABEL = "engine"


class MetricType(enum.StrEnum):
    """The type of a metric, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One metric. `values` of its one label are shown from the start, at 0; `is_open`: others may come.

    `bounds` are the upper ends of a histogram's buckets, ascending, without the infinite one. `by_engine`: read of each
    engine at the time of a scrape, whose name is the label before the other. Equal only to itself.
    """

    name: str
    type: MetricType
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    is_open: bool = False
    bounds: tuple[float, ...] = ()
    by_engine: bool = False

    def __post_init__(self) -> None:
        if (self.label is None) != (not self.values and not self.is_open):
            raise ValueError(f"{self.name}: label values without a label, or a label without values")
        if (self.type is MetricType.HISTOGRAM) != bool(self.bounds):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has bounds")

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels: the engine's where there is one, and the other, if any."""
        return (*((ENGINE_LABEL,) if self.by_engine else ()), *(() if self.label is None else (self.label,)))


def _error_codes(kind: type[StenographError] = StenographError) -> Iterator[str]:
    """Codes of the tree's leaves."""
    below = kind.__subclasses__()
    if not below:
        yield kind.code
    for child in below:
        yield from _error_codes(child)


def _counter(
    name: str, meaning: str, *, label: str | None = None, values: Iterable[str] = (), is_open: bool = False
) -> Metric:
    once = tuple(dict.fromkeys(map(str, values)))
    return Metric(name=name, type=MetricType.COUNTER, help=meaning, label=label, values=once, is_open=is_open)


def _gauge(name: str, meaning: str, *, label: str | None = None) -> Metric:
    return Metric(name=name, type=MetricType.GAUGE, help=meaning, label=label, is_open=label is not None)


def _of_engine(
    name: str, type_: MetricType, meaning: str, *, label: str | None = None, values: Iterable[str] = ()
) -> Metric:
    once = tuple(map(str, values))
    return Metric(name=name, type=type_, help=meaning, label=label, values=once, by_engine=True)


def _histogram(
    name: str, meaning: str, bounds: tuple[float, ...], *, label: str | None = None, values: Iterable[str] = ()
) -> Metric:
    once = tuple(map(str, values))
    return Metric(name=name, type=MetricType.HISTOGRAM, help=meaning, label=label, values=once, bounds=bounds)


TURNS = _counter("stenograph_turns_total", "Turns, by how they ended.", label="end", values=TurnEnd)
LABELLED_TURNS = _counter(
    "stenograph_labelled_turns_total",
    "Turns of sessions whose requests a rule labels, by the kind that it says.",
    label="kind",
    values=StrandKind,
)
TURN_FAILURES = _counter(
    "stenograph_turn_failures_total",
    "Turns that failed, by the error's code.",
    label="code",
    values=sorted(_error_codes()),
    is_open=True,
)
UPSTREAM_INVALID = _counter(
    "stenograph_upstream_invalid_total",
    "Turns whose engine sent an invalid reply (502), by the law that it broke.",
    label="law",
    is_open=True,
)
TURNS_ABORTED = _counter(
    "stenograph_turns_aborted_total", "Turns that the engine ended early, with finish reason abort."
)
STAGE = _histogram(
    "stenograph_stage_seconds",
    "Time that a turn spent in a stage; render, tokenize, queue and prefill are the parts of the time to the first "
    "token.",
    _STAGE_BOUNDS_S,
    label="stage",
    values=Stage,
)
TTFT = _histogram(
    "stenograph_ttft_seconds", "Time from a request's first byte to its first token; streaming engines.", _TTFT_BOUNDS_S
)
TPOT = _histogram(
    "stenograph_tpot_seconds",
    "Mean time per token of a turn, after its first step; streaming engines.",
    _TOKEN_BOUNDS_S,
)
ITL = _histogram(
    "stenograph_itl_seconds", "Time between two steps that sampled tokens; streaming engines.", _TOKEN_BOUNDS_S
)
GRAMMAR = _histogram(
    "stenograph_grammar_seconds",
    "Time the embedded engine spent on grammars: compiling one, filling a token's mask, accepting a token.",
    _GRAMMAR_BOUNDS_S,
    label="step",
    values=GrammarStep,
)
PROMPT_TOKENS = _counter(
    "stenograph_prompt_tokens_total", "Prompt tokens of the turns that got a reply, cached ones included."
)
COMPLETION_TOKENS = _counter("stenograph_completion_tokens_total", "Sampled tokens, wasted ones included.")
KEPT_TOKENS = _counter(
    "stenograph_kept_prompt_tokens_total",
    "Prompt tokens that were in the session's line before the turn; an engine need not compute them again.",
)
CACHED_TOKENS = _counter("stenograph_cached_tokens_total", "Prompt tokens that the engine did not compute again.")
ABORTED_TOKENS = _counter(
    "stenograph_aborted_tokens_total", "Tokens of turns that the engine ended early, with finish reason abort."
)
WASTED_TOKENS = _counter("stenograph_wasted_tokens_total", "Sampled tokens of turns that failed or were abandoned.")
REWRITES = _counter("stenograph_rewrites_total", "Changes to what clients sent, by rule.", label="rule", is_open=True)
DISCARDED_TURNS = _counter(
    "stenograph_discarded_turns_total", "Committed turns that a later turn of their session replaced."
)
DISCARDED_TOKENS = _counter(
    "stenograph_discarded_tokens_total", "Sampled tokens of the committed turns that a later turn replaced."
)
ERRORS = _counter(
    "stenograph_errors_total",
    "Error responses sent to clients, by code.",
    label="code",
    values=sorted(_error_codes()),
    is_open=True,
)
LIMITS = _counter(
    "stenograph_limits_total",
    "Requests refused by a limit or answered with nothing, by limit.",
    label="limit",
    values=[*Limit, BODY_BYTES],
)
RETRIES = _counter(
    "stenograph_retries_total",
    "Repeated requests that joined a running turn or got a finished turn's reply again.",
    label="answer",
    values=["joined", "redelivered"],
)
SESSIONS_ENDED = _counter(
    "stenograph_sessions_ended_total", "Sessions that ended, by reason.", label="end", values=SessionEnd
)
OUTCOMES = _counter(
    "stenograph_session_outcomes_total",
    "Sessions that ended, by the verdict of their outcome; none: they ended without one.",
    label="verdict",
    values=[*RolloutVerdict, NO_VERDICT],
)
ENDED_TOKENS = _counter(
    "stenograph_ended_session_tokens_total",
    "Sampled tokens of sessions that ended, each once, by what became of them.",
    label="fate",
    values=TokenFate,
)
DRIFT = _counter(
    "stenograph_drift_total",
    "Differences between recorded tokens and a new render of their messages, by class.",
    label="class",
    values=DRIFT_CLASSES,
)
UNASKED_REPLAY = _counter(
    "stenograph_unasked_replay_total",
    "Replay payloads in replies to turns that did not request them; they are not recorded.",
    label="payload",
    values=["routed_experts", "indexer_topk"],
)
LOOP_LAG = _histogram(
    "stenograph_loop_lag_seconds", "How late the event loop's heartbeat, due every 10 ms, came.", _TOKEN_BOUNDS_S
)
SESSIONS = _gauge("stenograph_sessions", "Sessions held now, including those being deleted.")
TURNS_IN_FLIGHT = _gauge("stenograph_turns_in_flight", "Turns running now.")
ENGINE_READY = _gauge("stenograph_engine_ready", "1 if the engine takes turns now, else 0.")
ENGINE_UP = _of_engine("stenograph_engine_up", MetricType.GAUGE, "1 if this engine takes turns now, else 0.")
ENGINE_RUNNING = _of_engine(
    "stenograph_engine_turns_in_flight", MetricType.GAUGE, "This server's turns that the engine is running now."
)
ENGINE_REQUESTS = _of_engine(
    "stenograph_engine_requests_total",
    MetricType.COUNTER,
    "Turns given to this engine of a fleet, by how they ended; moved turns went on to another engine.",
    label="outcome",
    values=Outcome,
)
ENGINE_EXPECTED_CACHED = _of_engine(
    "stenograph_engine_expected_cached_tokens_total",
    MetricType.COUNTER,
    "Prompt tokens that the session's last turn had left in the cache of this engine of a fleet.",
)
ENGINE_CACHED = _of_engine(
    "stenograph_engine_cached_tokens_total",
    MetricType.COUNTER,
    "Prompt tokens of the same turns that this engine of a fleet did not compute again.",
)
BUILD_INFO = _gauge("stenograph_build_info", "Always 1; the label is the running version.", label="version")

METRICS: tuple[Metric, ...] = (
    *(TURNS, LABELLED_TURNS, TURN_FAILURES, UPSTREAM_INVALID, TURNS_ABORTED),
    *(STAGE, TTFT, TPOT, ITL, GRAMMAR),
    *(PROMPT_TOKENS, COMPLETION_TOKENS, KEPT_TOKENS, CACHED_TOKENS, ABORTED_TOKENS, WASTED_TOKENS),
    REWRITES,
    *(DISCARDED_TURNS, DISCARDED_TOKENS),
    *(ERRORS, LIMITS, RETRIES, SESSIONS_ENDED, OUTCOMES, ENDED_TOKENS, DRIFT, UNASKED_REPLAY),
    LOOP_LAG,
    *(SESSIONS, TURNS_IN_FLIGHT, ENGINE_READY),
    *(ENGINE_UP, ENGINE_RUNNING, ENGINE_REQUESTS, ENGINE_EXPECTED_CACHED, ENGINE_CACHED),
    BUILD_INFO,
)
"""Every metric, in the order of the exposition."""
