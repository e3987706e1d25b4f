"""Every artifact that a benchmark writes can be drawn, whatever of it was measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.plots import PLOTS


def result(name: str, at_once: int, *figures: dict[str, float], **fields: Any) -> ScenarioResult:
    repeats = {"server": list(figures), "direct": [{"chats_per_s": 900.0}]}
    return ScenarioResult(
        **{"name": name, "title": "", "sessions": at_once, "turns": 9, "message_bytes": 9, "goals": []}
        | {"figures": repeats, **fields}
    )


def of_load(name: str, *, rate: float | None, concurrency: int, **figures: float) -> ScenarioResult:
    raw = {"server": [{"load": {"rate": rate, "concurrency": concurrency}}]}
    return result(name, concurrency, figures, raw=raw)


def responsiveness() -> list[ScenarioResult]:
    levels = [(1, 3.0), (64, 40.0), (8, 9.0)]
    goals = [("health_p99_ms", 25.0)]
    many = [result("A", n, {"health_p99_ms": ms}, {"health_p99_ms": 2 * ms}, goals=goals) for n, ms in levels]
    return [*many, result("D", 1, {"chat_p50_ms": 0.5, "chat_p99_ms": 2.0})]


def serving() -> list[ScenarioResult]:
    return [
        of_load("open 2/s", rate=2.0, concurrency=1, ttft_p50_ms=9.0, ttft_p99_ms=30.0, completion_tokens_per_s=99.0),
        of_load("open 0.5/s", rate=0.5, concurrency=1, ttft_p50_ms=7.0, ttft_p99_ms=20.0, completion_tokens_per_s=40.0),
        of_load("closed", rate=None, concurrency=4, ttft_p50_ms=12.0, chats_per_s=3.0),
    ]


def soak() -> list[ScenarioResult]:
    moments = [[second, 70 * second, 180_000 + second % 3, 40] for second in range(30)]
    figures = {"rss_early_mib": 175.8, "rss_growth_mib": 0.1}
    goals = [("rss_growth_mib", 8.8)]
    return [result("soak", 32, figures, goals=goals, raw={"server": [{"moments": moments}]})]


@pytest.mark.parametrize("scenarios", [responsiveness, serving, soak], ids=lambda made: made.__name__)
def test_what_was_measured_is_drawn(scenarios: Callable[[], list[ScenarioResult]], tmp_path: Path) -> None:
    artifact = Artifact(bench=scenarios.__name__, scenarios=scenarios())
    PLOTS[artifact.bench](artifact, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_is_0_is_left_out_of_a_logarithmic_axis(tmp_path: Path) -> None:
    artifact = Artifact(bench="responsiveness", scenarios=[result("A", n, {"health_p99_ms": 0.0}) for n in (1, 2)])
    PLOTS["responsiveness"](artifact, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
