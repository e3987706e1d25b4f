"""docs/parameters.md: every parameter of the official SDKs is sent, and what the page says of it holds."""

from typing import Any

import pytest

from stenograph.core.types import SamplingParams
from stenograph.dialects.common.sampling_fields import Rule

from ..parameters import COUNT, PAGE, ROUTES, Route, page, words
from .conftest import Live

SAMPLED = {
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "stop_sequences"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "top_logprobs"),
    *("response_format", "text", "output_config"),
}
"""Honoured parameters that change what the engine is asked for."""
EVERY = [(route, name) for route in ROUTES for name in route.names]
NAMED = [f"{route.call} {name}" for route, name in EVERY]


def rule_of(route: Route, name: str) -> Rule:
    return route.rules.rule_of(name)


async def sampled_by(live: Live, path: str, body: dict[str, Any]) -> SamplingParams:
    live.says("one")
    answer = await live.call("POST", path, body)
    assert answer.status == 200, answer.body
    return live.engine.requests[-1].params


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == page(), "python -m tests.parameters writes it anew"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.call)
def test_every_parameter_that_an_sdk_names_is_known_and_has_a_value(route: Route) -> None:
    assert len(route.names) > 10
    assert set(route.names) <= set(route.rules.names)
    assert set(route.names) == route.values.keys()


@pytest.mark.parametrize(("route", "name"), EVERY, ids=NAMED)
async def test_a_parameter_is_honoured_recorded_or_refused_as_the_page_says(
    live: Live, route: Route, name: str
) -> None:
    session = await live.open()
    path, body = f"/sessions/{session}{route.path}", route.body(name, route.values[name])
    rule = rule_of(route, name)
    if rule is Rule.REFUSED:
        await check_refused(live, path, route, name, body)
        return
    if route is COUNT:
        assert (await live.call("POST", path, body)).status == 200
        return
    asked = await sampled_by(live, path, body)
    without = await sampled_by(live, route.path, {**route.base, **route.company.get(name, {})})
    assert asked != without or name not in SAMPLED
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    if rule is Rule.RECORDED:
        assert record["request"]["parameters"]["recorded"][name] == route.values[name]


OTHERS = [(route, name) for route in ROUTES for name in route.others]


@pytest.mark.parametrize(("route", "name"), OTHERS, ids=[f"{route.call} {name}" for route, name in OTHERS])
async def test_a_value_that_is_not_done_is_refused_in_the_words_of_the_page(
    live: Live, route: Route, name: str
) -> None:
    value = route.others[name]
    assert words(route, name, value) is not None
    await check_refused(live, route.path, route, name, route.body(name, value))


async def check_refused(live: Live, path: str, route: Route, name: str, body: dict[str, Any]) -> None:
    answer = await live.call("POST", path, body)
    error = answer.json()["error"]
    assert (answer.status, error["message"]) == (400, words(route, name, body[name]))
    assert error["param"].split("/")[1] == name
    listed = error["message"].replace("|", "\\|")
    if rule_of(route, name) is Rule.REFUSED:
        listed = route.rules.refused[name]
        assert error["message"] == f"Field '{name}' is refused: {listed}."
    assert f" | {listed} |\n" in PAGE.read_text()
    assert live.engine.requests == []
