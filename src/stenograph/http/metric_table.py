"""The table of the server's metrics: a row has a metric's name, type, meaning and labels, and how its value is read.

A row is all that a metric needs: `METRICS` is the exposition, and docs/metrics.md is checked against it. Label values
are never a client's words. Laws and error codes are open sets, but each is written in our own code, which bounds them;
the others are enums. Counts nothing: metrics.py does.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Never, TypeVar

from stenograph import __version__
from stenograph.core.errors import Limit, StenographError
from stenograph.core.kinds import StrandKind
from stenograph.core.outcome import NO_VERDICT, RolloutVerdict, TokenFate
from stenograph.core.stages import Stage
from stenograph.core.telemetry import GrammarStep, SessionEnd, SessionReport, TurnEnd, TurnReport
from stenograph.engine.base import Engine, EngineCounts, EngineLoad, EngineState, EngineStatus, Outcome
from stenograph.session.manager import SessionManager
from stenograph.session.weights import UpdateOutcome, Weights

S = TypeVar("S")
Source = type[object]

Reading = float | str | Sequence[str] | Mapping[str, float] | Sequence[float] | None
"""A number; of a counter with a label one value or several, each counted once, or numbers by value; a histogram's
duration or durations; None where the source has none."""

BODY_BYTES = "body_bytes"
"""The one limit that is not a `Limit`: the server refuses a body with more bytes with 413."""

DRIFT_CLASSES = ("special_token_count", "special_token_type", "non_assistant_text", "assistant_text")

_STAGE_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""A stage takes anything from a dictionary look-up to a long generation."""
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


COUNTER, GAUGE, HISTOGRAM = MetricType


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. `values` of its one label are shown from the start, at 0; `is_open`: others may come.

    `read` takes its value from a source, an `of`, or names the source's field: from each `TurnReport` and
    `SessionReport` when it comes, from each engine's `EngineStatus` and any other source at the time of a scrape.
    Without it the metric is counted by name. `bounds` are the upper ends of a histogram's buckets, ascending, without
    the infinite one. Equal only to itself.
    """

    name: str
    type: MetricType
    help: str
    of: Source | None = None
    read: str | Callable[[Never], Reading] | None = None
    label: str | None = None
    values: tuple[str, ...] = ()
    is_open: bool = False
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.label is None) != (not self.values and not self.is_open):
            raise ValueError(f"{self.name}: label values without a label, or a label without values")
        if (self.type is MetricType.HISTOGRAM) != bool(self.bounds):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has bounds")
        if isinstance(self.read, str) and not hasattr(self.of, self.read):
            raise ValueError(f"{self.name}: {self.of} has no {self.read}")

    @property
    def by_engine(self) -> bool:
        """Whether each engine has its own, whose name is the label before the other."""
        return self.of is EngineStatus

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels: the engine's where there is one, and the other, if any."""
        return (*((ENGINE_LABEL,) if self.by_engine else ()), *(() if self.label is None else (self.label,)))


def row(
    name: str,
    type_: MetricType,
    meaning: str,
    of: type[S] | None = None,
    read: str | Callable[[S], Reading] | None = None,
    *,
    label: tuple[str, Iterable[str]] | None = None,
    is_open: bool = False,
    bounds: tuple[float, ...] = (),
) -> Metric:
    """A metric, with the name and the values of its label. Without a source it is counted by name."""
    called, values = label or (None, ())
    return Metric(name, type_, meaning, of, read, called, tuple(dict.fromkeys(map(str, values))), is_open, bounds)


def _error_codes(kind: type[StenographError] = StenographError) -> Iterator[str]:
    """Codes of the tree's leaves."""
    below = kind.__subclasses__()
    if not below:
        yield kind.code
    for child in below:
        yield from _error_codes(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The server at the time of a scrape."""

    manager: SessionManager
    engine: Engine


def _of_fleet(read: Callable[[EngineCounts], Reading]) -> Callable[[EngineStatus], Reading]:
    """A reading of an engine of several: a single one has no such numbers."""
    return lambda engine: None if engine.counts is None else read(engine.counts)


def _of_load(read: Callable[[EngineLoad], float | None]) -> Callable[[EngineStatus], Reading]:
    """A reading of an engine's own word, while there is one."""
    return lambda engine: None if engine.load is None else read(engine.load)


TURNS = row("stenograph_turns_total", COUNTER, "Turns, by how they ended.", TurnReport, "end", label=("end", TurnEnd))
STAGE = row(
    "stenograph_stage_seconds",
    HISTOGRAM,
    "Time that a turn spent in a stage; render, tokenize, queue and prefill are the parts of the time to the first "
    "token.",
    label=("stage", Stage),
    bounds=_STAGE_BOUNDS_S,
)
TTFT = row(
    "stenograph_ttft_seconds",
    HISTOGRAM,
    "Time from a request's first byte to its first token; streaming engines.",
    TurnReport,
    "ttft_s",
    bounds=_STAGE_BOUNDS_S[3:],  # nothing gets from a socket to a token in less than a millisecond
)
GRAMMAR = row(
    "stenograph_grammar_seconds",
    HISTOGRAM,
    "Time the embedded engine spent on grammars: compiling one, filling a token's mask, accepting a token.",
    label=("step", GrammarStep),
    bounds=_GRAMMAR_BOUNDS_S,
)
PROMPT_TOKENS = row(
    "stenograph_prompt_tokens_total",
    COUNTER,
    "Prompt tokens of the turns that got a reply, cached ones included.",
    TurnReport,
    "num_prompt",
)
COMPLETION_TOKENS = row(
    "stenograph_completion_tokens_total", COUNTER, "Sampled tokens, wasted ones included.", TurnReport, "num_completion"
)
WASTED_TOKENS = row("stenograph_wasted_tokens_total", COUNTER, "Sampled tokens of turns that failed or were abandoned.")
ABORTED_TOKENS = row(
    "stenograph_aborted_tokens_total", COUNTER, "Tokens of turns that the engine ended early, with finish reason abort."
)
REWRITES = row(
    "stenograph_rewrites_total", COUNTER, "Changes to what clients sent, by rule.", label=("rule", ()), is_open=True
)
ERRORS = row(
    "stenograph_errors_total",
    COUNTER,
    "Error responses sent to clients, by code.",
    label=("code", sorted(_error_codes())),
    is_open=True,
)
LIMITS = row(
    "stenograph_limits_total",
    COUNTER,
    "Requests refused by a limit or answered with nothing, by limit.",
    label=("limit", [*Limit, BODY_BYTES]),
)
RETRIES = row(
    "stenograph_retries_total",
    COUNTER,
    "Repeated requests that joined a running turn or got a finished turn's reply again.",
    label=("answer", ["joined", "redelivered"]),
)
DRIFT = row(
    "stenograph_drift_total",
    COUNTER,
    "Differences between recorded tokens and a new render of their messages, by class.",
    label=("class", DRIFT_CLASSES),
)
LOOP_LAG = row(
    "stenograph_loop_lag_seconds",
    HISTOGRAM,
    "How late the event loop's heartbeat, due every 10 ms, came.",
    bounds=_TOKEN_BOUNDS_S,
)

METRICS: tuple[Metric, ...] = (
    TURNS,
    row(
        "stenograph_labelled_turns_total",
        COUNTER,
        "Turns of sessions whose requests a rule labels, by the kind that it says.",
        TurnReport,
        "kind",
        label=("kind", StrandKind),
    ),
    row(
        "stenograph_turn_failures_total",
        COUNTER,
        "Turns that failed, by the error's code.",
        TurnReport,
        "code",
        label=("code", sorted(_error_codes())),
        is_open=True,
    ),
    row(
        "stenograph_upstream_invalid_total",
        COUNTER,
        "Turns whose engine sent an invalid reply (502), by the law that it broke.",
        TurnReport,
        "law",
        label=("law", ()),
        is_open=True,
    ),
    row(
        "stenograph_turns_aborted_total",
        COUNTER,
        "Turns that the engine ended early, with finish reason abort.",
        TurnReport,
        "was_aborted",
    ),
    STAGE,
    TTFT,
    row(
        "stenograph_tpot_seconds",
        HISTOGRAM,
        "Mean time per token of a turn, after its first step; streaming engines.",
        TurnReport,
        "tpot_s",
        bounds=_TOKEN_BOUNDS_S,
    ),
    row(
        "stenograph_itl_seconds",
        HISTOGRAM,
        "Time between two steps that sampled tokens; streaming engines.",
        TurnReport,
        "itl_s",
        bounds=_TOKEN_BOUNDS_S,
    ),
    GRAMMAR,
    PROMPT_TOKENS,
    COMPLETION_TOKENS,
    row(
        "stenograph_kept_prompt_tokens_total",
        COUNTER,
        "Prompt tokens that were in the session's line before the turn; an engine need not compute them again.",
        TurnReport,
        "num_kept",
    ),
    row(
        "stenograph_cached_tokens_total",
        COUNTER,
        "Prompt tokens that the engine did not compute again.",
        TurnReport,
        "num_cached",
    ),
    ABORTED_TOKENS,
    WASTED_TOKENS,
    REWRITES,
    row(
        "stenograph_discarded_turns_total",
        COUNTER,
        "Committed turns that a later turn of their session replaced.",
        TurnReport,
        "num_discarded_turns",
    ),
    row(
        "stenograph_discarded_tokens_total",
        COUNTER,
        "Sampled tokens of the committed turns that a later turn replaced.",
        TurnReport,
        "num_discarded_tokens",
    ),
    ERRORS,
    LIMITS,
    RETRIES,
    row(
        "stenograph_sessions_ended_total",
        COUNTER,
        "Sessions that ended, by reason.",
        SessionReport,
        "end",
        label=("end", SessionEnd),
    ),
    row(
        "stenograph_session_outcomes_total",
        COUNTER,
        "Sessions that ended, by the verdict of their outcome; none: they ended without one.",
        SessionReport,
        lambda session: session.verdict or NO_VERDICT,
        label=("verdict", [*RolloutVerdict, NO_VERDICT]),
    ),
    row(
        "stenograph_ended_session_tokens_total",
        COUNTER,
        "Sampled tokens of sessions that ended, each once, by what became of them.",
        SessionReport,
        "num_tokens",
        label=("fate", TokenFate),
    ),
    DRIFT,
    row(
        "stenograph_unasked_replay_total",
        COUNTER,
        "Replay payloads in replies to turns that did not request them; they are not recorded.",
        TurnReport,
        "unasked_replay",
        label=("payload", ["routed_experts", "indexer_topk"]),
    ),
    LOOP_LAG,
    row(
        "stenograph_sessions",
        GAUGE,
        "Sessions held now, including those being deleted.",
        Serving,
        lambda server: server.manager.sessions.num_sessions,
    ),
    row(
        "stenograph_turns_in_flight", GAUGE, "Turns running now.", Serving, lambda server: server.manager.num_in_flight
    ),
    row(
        "stenograph_engine_ready",
        GAUGE,
        "1 if the engine takes turns now, else 0.",
        Serving,
        lambda server: server.engine.health().state is EngineState.READY,
    ),
    row(
        "stenograph_engine_up",
        GAUGE,
        "1 if this engine takes turns now, else 0.",
        EngineStatus,
        lambda engine: engine.health.state is EngineState.READY,
    ),
    row(
        "stenograph_engine_turns_in_flight",
        GAUGE,
        "This server's turns that the engine is running now.",
        EngineStatus,
        lambda engine: engine.num_running,
    ),
    row(
        "stenograph_turns_waiting",
        GAUGE,
        "Turns that wait here until an engine of a fleet has memory for them.",
        Serving,
        lambda server: server.engine.num_waiting,
    ),
    row(
        "stenograph_engine_kv_usage",
        GAUGE,
        "Share of its keys and values, 0 to 1, that the running requests of this engine of a fleet hold, by its word.",
        EngineStatus,
        _of_load(lambda load: load.kv_usage),
    ),
    row(
        "stenograph_engine_requests_waiting",
        GAUGE,
        "Requests in the queue of this engine of a fleet, whoever sent them, by its word.",
        EngineStatus,
        _of_load(lambda load: load.num_waiting),
    ),
    row(
        "stenograph_engine_preemptions_total",
        COUNTER,
        "Requests that this engine of a fleet computed again for want of memory, by its word; vLLM says so.",
        EngineStatus,
        _of_load(lambda load: load.num_preemptions),
    ),
    row(
        "stenograph_engine_requests_total",
        COUNTER,
        "Turns given to this engine of a fleet, by how they ended; moved turns went on to another engine.",
        EngineStatus,
        _of_fleet(lambda counts: {outcome: counts.outcomes.get(outcome, 0) for outcome in Outcome}),
        label=("outcome", Outcome),
    ),
    row(
        "stenograph_engine_expected_cached_tokens_total",
        COUNTER,
        "Prompt tokens that the session's last turn had left in the cache of this engine of a fleet.",
        EngineStatus,
        _of_fleet(lambda counts: counts.num_expected_cached),
    ),
    row(
        "stenograph_engine_cached_tokens_total",
        COUNTER,
        "Prompt tokens of the same turns that this engine of a fleet did not compute again.",
        EngineStatus,
        _of_fleet(lambda counts: counts.num_cached),
    ),
    row(
        "stenograph_build_info",
        GAUGE,
        "Always 1; the label is the running version.",
        object,
        lambda _: {__version__: 1},
        label=("version", ()),
        is_open=True,
    ),
)
"""Every metric, in the order of the exposition."""

WEIGHT_METRICS = (
    row(
        "stenograph_weight_updates_total",
        COUNTER,
        "Updates of weights, by outcome: taken by all engines, by some (partial), or by none (refused).",
        Weights,
        lambda weights: {outcome: weights.outcomes[outcome] for outcome in UpdateOutcome},
        label=("outcome", UpdateOutcome),
    ),
    row(
        "stenograph_generation_paused",
        GAUGE,
        "1 while new turns wait, because generation is paused or new weights come.",
        Weights,
        lambda weights: weights.is_held,
    ),
    row(
        "stenograph_mixed_version_turns_total",
        COUNTER,
        "Turns over a change of weights whose engine does not say which weights sampled which token.",
        Weights,
        lambda weights: weights.num_mixed,
    ),
)
"""Updates of weights, whether turns wait, and turns of mixed versions."""
