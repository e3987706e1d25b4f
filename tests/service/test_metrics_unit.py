"""http/metrics.py alone: what is reported comes out of the exposition, as Prometheus' own parser reads it."""

import math
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from standins.clock import ManualClock
from standins.scripted_engine import ScriptedEngine
from stenograph import __version__
from stenograph.core.errors import Limit
from stenograph.core.outcome import TokenFate
from stenograph.core.stages import Stage, StageTimes
from stenograph.core.telemetry import SessionEnd, SessionReport, Telemetry, TurnEnd, TurnReport
from stenograph.engine.base import EngineCounts, EngineHealth, EngineState, EngineStatus, Outcome
from stenograph.http.metric_table import BODY_BYTES, DRIFT_CLASSES, METRICS, MetricType, Serving, row
from stenograph.http.metrics import Metrics
from stenograph.offload.pool import CpuPool
from stenograph.session.admission import Admission, Limits
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import SessionOptions

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(metrics: Metrics) -> Samples:
    body, content_type = metrics.exposition()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    lines = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    samples = {(line.name, tuple(sorted(line.labels.items()))): line.value for line in lines}
    assert len(samples) == len(lines), "a series is shown once"
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"stenograph_{name}", tuple(sorted(labels.items()))]


class FixedStatuses(ScriptedEngine):
    """Shows these engines behind it."""

    shown: Sequence[EngineStatus] = ()

    def statuses(self) -> Sequence[EngineStatus]:
        return self.shown


@pytest.fixture
def serving(renderer: Renderer) -> Serving:
    """A server without a socket: its manager and its engine."""
    engine = FixedStatuses(vocab_size=renderer.tokenizer.vocab_size)
    services = TurnServices(engine=engine, renderer=renderer, pool=CpuPool(1), clock=ManualClock(), timeout_s=None)
    return Serving(
        manager=SessionManager(services=services, limits=Limits(max_sessions=1, max_in_flight=1)), engine=engine
    )


def bound(serving: Serving) -> Metrics:
    metrics = Metrics()
    metrics.bind(serving)
    return metrics


def test_a_committed_turn_is_counted_with_its_tokens_and_times() -> None:
    metrics = Metrics()
    metrics.turn_ended(
        TurnReport(
            end=TurnEnd.COMMITTED,
            stages_s={Stage.RENDER: 0.002, Stage.QUEUE: 0.5, Stage.PREFILL: 0.25},
            num_prompt=10,
            num_completion=4,
            num_kept=5,
            num_cached=7,
            ttft_s=0.752,
            tpot_s=0.02,
            itl_s=(0.01, 0.03),
        )
    )
    samples = scrape(metrics)
    assert value(samples, "turns_total", end="committed") == 1
    assert value(samples, "turns_total", end="failed") == 0
    assert value(samples, "prompt_tokens_total") == 10
    assert value(samples, "completion_tokens_total") == 4
    assert value(samples, "cached_tokens_total") == 7
    assert value(samples, "wasted_tokens_total") == 0
    assert value(samples, "stage_seconds_sum", stage="queue") == 0.5
    assert value(samples, "stage_seconds_count", stage="queue") == 1
    assert value(samples, "stage_seconds_count", stage="commit") == 0
    assert value(samples, "kept_prompt_tokens_total") == 5
    assert value(samples, "ttft_seconds_sum") == 0.752
    assert value(samples, "tpot_seconds_sum") == 0.02
    assert value(samples, "itl_seconds_count") == 2
    assert math.isclose(value(samples, "itl_seconds_sum"), 0.04)


def test_a_bucket_holds_its_upper_bound_and_counts_those_below() -> None:
    metrics = Metrics()
    metrics.turn_ended(TurnReport(end=TurnEnd.COMMITTED, itl_s=(0.00005, 0.01, 0.0101, 700.0)))
    samples = scrape(metrics)
    at_most = {
        float(dict(labels)["le"]): count
        for (name, labels), count in samples.items()
        if name == "stenograph_itl_seconds_bucket"
    }
    assert [at_most[bound] for bound in (0.0001, 0.0075, 0.01, 0.015, 600.0, math.inf)] == [1, 1, 2, 3, 3, 4]


def test_durations_add_up_over_turns() -> None:
    metrics = Metrics()
    for itl_s in ((0.25, 0.5), (), (0.25,)):
        metrics.turn_ended(TurnReport(end=TurnEnd.COMMITTED, num_completion=2, itl_s=itl_s))
    samples = scrape(metrics)
    assert value(samples, "itl_seconds_sum") == 1.0
    assert value(samples, "itl_seconds_count") == 3
    assert value(samples, "completion_tokens_total") == 6


def test_a_failed_turn_is_counted_by_code_and_law_and_its_tokens_are_wasted() -> None:
    metrics = Metrics()
    for law in ("logprob_is_finite", "a law that nobody knew", "a law that nobody knew"):
        metrics.turn_ended(TurnReport(end=TurnEnd.FAILED, code="upstream_invalid", law=law, num_completion=5))
    metrics.turn_ended(TurnReport(end=TurnEnd.FAILED, code='a "new"\ncode'))
    samples = scrape(metrics)
    assert value(samples, "turns_total", end="failed") == 4
    assert value(samples, "turn_failures_total", code="upstream_invalid") == 3
    assert value(samples, "turn_failures_total", code="upstream_timeout") == 0
    assert value(samples, "turn_failures_total", code='a "new"\ncode') == 1
    assert value(samples, "upstream_invalid_total", law="logprob_is_finite") == 1
    assert value(samples, "upstream_invalid_total", law="a law that nobody knew") == 2
    assert value(samples, "wasted_tokens_total") == 15
    assert value(samples, "ttft_seconds_count") == 0


def test_an_aborted_turn_is_counted_beside_its_end() -> None:
    metrics = Metrics()
    metrics.turn_ended(TurnReport(end=TurnEnd.COMMITTED, was_aborted=True))
    metrics.turn_ended(TurnReport(end=TurnEnd.ABANDONED))
    samples = scrape(metrics)
    assert value(samples, "turns_aborted_total") == 1
    assert value(samples, "turns_total", end="abandoned") == 1


def test_a_reply_is_counted_once_whether_or_not_the_turn_knew_of_it() -> None:
    metrics = Metrics()
    metrics.turn_ended(TurnReport(end=TurnEnd.COMMITTED, stages_s={Stage.REPLY: 0.5}))
    metrics.reply_delivered(0.5)
    assert value(scrape(metrics), "stage_seconds_count", stage="reply") == 1


def test_answers_limits_retries_sessions_and_drift_are_counted() -> None:
    metrics = Metrics()
    metrics.error_sent("session_busy")
    metrics.limit_hit(Limit.SESSIONS)
    metrics.limit_hit(BODY_BYTES)
    metrics.retry_answered(joined=True)
    metrics.retry_answered(joined=False)
    metrics.retry_answered(joined=False)
    metrics.session_ended(SessionReport(end=SessionEnd.EXPIRED, num_tokens={TokenFate.DISCARDED: 7}))
    metrics.drift_found({"assistant_text": 2, "special_token_count": 0})
    samples = scrape(metrics)
    assert value(samples, "errors_total", code="session_busy") == 1
    assert value(samples, "limits_total", limit="sessions") == 1
    assert value(samples, "limits_total", limit="body_bytes") == 1
    assert value(samples, "retries_total", answer="joined") == 1
    assert value(samples, "retries_total", answer="redelivered") == 2
    assert value(samples, "sessions_ended_total", end="expired") == 1
    assert value(samples, "sessions_ended_total", end="deleted") == 0
    assert {kind: value(samples, "drift_total", **{"class": kind}) for kind in DRIFT_CLASSES} == {
        "special_token_count": 0,
        "special_token_type": 0,
        "non_assistant_text": 0,
        "assistant_text": 2,
    }


def test_gauges_are_read_at_each_scrape_and_absent_before_they_are_bound(serving: Serving) -> None:
    metrics = Metrics()
    names = {name for name, _ in scrape(metrics)}
    assert not names & {"stenograph_sessions", "stenograph_turns_in_flight", "stenograph_engine_ready"}
    metrics.bind(serving)
    first = scrape(metrics)
    session = serving.manager.sessions.create(SessionOptions())
    place = serving.manager.admit(session, stages=StageTimes(start=0.0))
    second = scrape(metrics)
    assert [value(samples, "sessions") for samples in (first, second)] == [0, 1]
    assert [value(samples, "turns_in_flight") for samples in (first, second)] == [0, 1]
    assert isinstance(place, Admission)
    with place:
        pass
    assert value(scrape(metrics), "turns_in_flight") == 0
    assert value(second, "build_info", version=__version__) == 1


def test_each_engine_is_shown_by_name_and_what_a_fleet_counts_of_a_fleet_alone(serving: Serving) -> None:
    down = EngineHealth(state=EngineState.DOWN, detail="gone")
    counts = EngineCounts(outcomes={Outcome.MOVED: 2}, num_expected_cached=70, num_cached=64)
    shown = [
        EngineStatus(name="http://a", engine="e", health=EngineHealth(state=EngineState.READY), num_running=3),
        EngineStatus(name="http://b", engine="e", health=down, num_running=0, counts=counts),
        EngineStatus(name="embedded", engine="e", health=down, num_running=0),
    ]
    assert isinstance(serving.engine, FixedStatuses)
    serving.engine.shown = shown
    samples = scrape(bound(serving))
    assert [value(samples, "engine_up", engine=one.name) for one in shown] == [1, 0, 0]
    running = "engine_turns_in_flight"
    assert [value(samples, running, engine=one.name) for one in shown] == [3, 0, 0]
    assert value(samples, "engine_requests_total", engine="http://b", outcome="moved") == 2
    assert value(samples, "engine_requests_total", engine="http://b", outcome="answered") == 0
    assert value(samples, "engine_expected_cached_tokens_total", engine="http://b") == 70
    assert value(samples, "engine_cached_tokens_total", engine="http://b") == 64
    assert ("stenograph_engine_cached_tokens_total", (("engine", "http://a"),)) not in samples


def test_two_apps_in_one_process_share_nothing(serving: Serving) -> None:
    one, other = bound(serving), bound(serving)
    one.turn_ended(TurnReport(end=TurnEnd.FAILED, law="only_here", itl_s=(0.1,)))
    samples = scrape(other)
    assert value(samples, "turns_total", end="failed") == 0
    assert value(samples, "itl_seconds_count") == 0
    assert ("stenograph_upstream_invalid_total", (("law", "only_here"),)) not in samples


def test_every_known_label_value_is_shown_from_the_start() -> None:
    shown = scrape(Metrics())
    for metric in METRICS:
        if metric.by_engine:
            continue
        name = metric.name + ("_count" if metric.type is MetricType.HISTOGRAM else "")
        for label_value in metric.values:
            assert shown[name, ((str(metric.label), label_value),)] == 0
    assert {metric.values for metric in METRICS if metric.label == "stage"} == {tuple(Stage)}
    assert {metric.values for metric in METRICS if metric.label == "limit"} == {(*Limit, BODY_BYTES)}


def test_what_is_shown_is_the_table_and_the_process(serving: Serving) -> None:
    body, _ = bound(serving).exposition()
    headers = [line.split(" ")[2:] for line in body.decode().splitlines() if line.startswith("# TYPE ")]
    ours = [(name, kind) for name, kind in headers if not name.startswith("process_")]
    assert ours == [(metric.name, metric.type) for metric in METRICS]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_and_buckets_keep_prometheus_conventions(metric) -> None:
    assert metric.name.startswith("stenograph_")
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert metric.name.endswith("_seconds") == (metric.type is MetricType.HISTOGRAM)
    assert list(metric.bounds) == sorted(set(metric.bounds))


def test_it_is_a_telemetry_and_says_what_it_holds_in_a_line() -> None:
    metrics: Telemetry = Metrics()
    metrics.turn_ended(TurnReport(end=TurnEnd.UNRECORDED))
    assert repr(metrics) == "<Metrics 1 turns, 0 errors>"


def test_a_row_that_names_a_field_which_its_source_has_not_is_no_metric() -> None:
    with pytest.raises(ValueError, match="no num_nothing"):
        row("stenograph_nothing_total", MetricType.COUNTER, "Nothing.", TurnReport, "num_nothing")
