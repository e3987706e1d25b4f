"""The table of `bench responsiveness`: figures beside their goals, the ceiling, and the server before."""

from collections.abc import Sequence

from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.figures import NO_WORSE, Goal, better, spread, values_of
from benchmarks.kit.report import figure_rows, keeps_up, name_in, ratios_of, spread_cell, table
from benchmarks.kit.verdicts import compare_values


def responsiveness_table(artifact: Artifact) -> str:
    """Every figure of every scenario: median (least … most), its goal, the same straight at the engine and before.

    `server / before` is the ratio of the two of each round: it holds on a machine whose speed changes.
    """
    has_before = any("before" in result.figures for result in artifact.scenarios)
    head = ["scenario", "figure", "server", "goal", "reached", "direct"]
    rows = [[*head, "before", "server / before", "goal", "reached", "against before"] if has_before else head]
    for result in artifact.scenarios:
        rows += figure_rows(name_in(artifact, result), _Cells(result, has_before=has_before).of)
    return table(rows)


class _Cells:
    """The cells of one scenario."""

    def __init__(self, result: ScenarioResult, *, has_before: bool) -> None:
        self._result = result
        self._has_before = has_before
        self._goals, self._before_goals = dict(result.goals), dict(result.before_goals)

    def of(self, figure: str) -> Sequence[str] | None:
        """A figure's; None where it was neither measured nor asked for."""
        values, direct = self._values("server", figure), self._values("direct", figure)
        value = self._goals.get(figure)
        if not values and value is None:
            return None
        goal = None if value is None else Goal(figure=figure, value=value)
        reached = "" if goal is None else "not measured" if not values else _yes(goal.is_reached(spread(values).median))
        cells = [spread_cell(values), "" if goal is None else goal.shown, reached, spread_cell(direct)]
        return [*cells, *self._before(figure, values)] if self._has_before else cells

    def _before(self, figure: str, values: list[float]) -> Sequence[str]:
        old = self._values("before", figure)
        ratios = ratios_of(figure, self._result.figures.get("server", []), self._result.figures.get("before", []))
        asked = self._before_goals.get(figure)
        goal, reached = "", ""
        if asked is not None:
            goal = "no worse" if asked == NO_WORSE else f"{Goal(figure=figure, value=asked).shown} ×"
            reached = _yes(keeps_up(self._result, figure, asked)) if ratios else "not measured"
        verdict = compare_values(old, values, better(figure)).verdict if old and values else ""
        return spread_cell(old), spread_cell(ratios), goal, reached, verdict

    def _values(self, target: str, figure: str) -> list[float]:
        return values_of(self._result.figures.get(target, []), figure)


def _yes(is_reached: bool) -> str:
    return "yes" if is_reached else "NO"
