"""Values of the client as a person sees them: a line, a table of a notebook, and nothing that an agent's text does."""

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.client import (
    DecodedSample,
    DecodedSamples,
    Rollout,
    RolloutBatch,
    RolloutGroup,
)
from stenograph.client.batch import agent_traceback

ANY_TEXT = st.text(max_size=400) | st.sampled_from(
    [
        "<script>alert(1)</script>",
        "\x1b[2J\x1b]0;title\x07",
        "a\nb\r\n\u2028c",
        "</pre><img src=x onerror=y>",
        "\u202e",
        "",
    ]
)
TAGS = {"p", "table", "thead", "tbody", "tr", "th", "td", "pre"}


class Hostile:
    """A task whose repr is somebody else's text, or fails."""

    def __init__(self, text: str, *, fails: bool) -> None:
        self.text, self.fails = text, fails

    def __repr__(self) -> str:
        if self.fails:
            raise RuntimeError(self.text)
        return self.text


class HostileError(Exception):
    """An error whose message fails."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def sample_of(text: str) -> DecodedSample:
    return DecodedSample(
        tokens=np.arange(5),
        loss_mask=np.array([1, 0, 1], np.uint8),
        log_probs=np.array([-1.0, 0.0, -1.0]),
        status="completed",
        response=text,
        reward={text: 0.5},
        turns=({"node_id": 1, "start": 2, "end": 5, "temperature": text},),
        weight_versions=("3", "3"),
        metadata={"kind": text},
    )


def batch_of(text: str, *, fails: bool) -> RolloutBatch[Hostile]:
    task = Hostile(text, fails=fails)
    samples = DecodedSamples(samples=(sample_of(text),), session_metadata={})
    good: Rollout[Hostile] = Rollout(
        task=task, group="g", session_id=text, end="ok", reward={text: 1.0}, error=None, samples=samples, seconds=1.0,
        num_tries=1,
    )  # fmt: skip
    error = HostileError() if fails else ValueError(text)
    bad = dataclasses.replace(good, end="agent_failed", error=error, samples=None)
    group = RolloutGroup(index=0, name="g", task=task, is_whole=False, rollouts=(good,), others=(bad,))
    return RolloutBatch(groups=(), others=(group,), is_complete=False, seconds=1.0)


class Tags(HTMLParser):
    """The tags of a page, which must be ours, without attributes."""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in TAGS
        assert not attrs


@given(ANY_TEXT, st.booleans())
def test_reprs_are_one_printable_line_and_pages_have_no_tag_of_somebody_else_s(text: str, fails: bool) -> None:
    batch = batch_of(text, fails=fails)
    (group,) = batch.others
    good, bad = group.rollouts[0], group.others[0]
    assert good.samples is not None
    for value in (batch, group, good, bad, good.samples, good.samples[0], *batch.errors()):
        line = repr(value)
        assert line.isprintable()
        assert len(line) < 600
        if hasattr(value, "_repr_html_"):
            page = value._repr_html_()
            assert all(one.isprintable() or one in "\n\t" for one in page)
            Tags().feed(page)


def test_a_repr_says_what_there_is() -> None:
    sample = sample_of("x")
    assert repr(sample) == "<DecodedSample completed: 2 + 3 tokens, 2 trained, 1 turns, reward x 0.5, weights 3>"
    assert repr(DecodedSamples(samples=(), session_metadata={}, empty_reason="no_records")) == (
        "<DecodedSamples 0 of 0 tokens, 0 trained, no_records>"
    )
    batch = batch_of("it broke", fails=False)
    assert repr(batch) == (
        "<RolloutBatch 0 of 1 groups whole, 1 ok, 1 agent_failed, 1.0 s; RolloutError 1 times ValueError: it broke"
        " (see .errors())>"
    )
    assert repr(batch.others[0].rollouts[0]) == (
        "<Rollout of it broke: ok, reward it broke 1, 1 samples, 2 trained tokens, 1.0 s>"
    )
    assert repr(batch.others[0]) == (
        "<RolloutGroup 0 of it broke: not whole, 1 rollouts and 1 others, rewards it broke 1>"
    )


def test_failures_of_one_line_are_one_error_however_they_are_worded() -> None:
    def fail(text: str, *, elsewhere: bool) -> BaseException:
        try:
            if elsewhere:
                raise ValueError(text)
            raise ValueError(text)
        except ValueError as error:
            return error

    (group,) = batch_of("t", fails=False).others
    texts = [("a", False), ("b", True), ("c", True)]
    others = tuple(dataclasses.replace(group.others[0], error=fail(text, elsewhere=at)) for text, at in texts)
    cancelled = dataclasses.replace(group.others[0], end="aborted")
    whole = RolloutBatch(
        groups=(dataclasses.replace(group, others=(*others, cancelled)),), others=(), is_complete=True, seconds=0.0
    )
    errors = whole.errors()
    assert [(str(one.error), one.count) for one in errors] == [("b", 2), ("a", 1)]
    assert re.search(r"in fail\n.*raise ValueError\(text\)\n", errors[0].traceback, re.DOTALL)


def test_a_traceback_is_shown_without_its_control_characters() -> None:
    with pytest.raises(ValueError, match="red") as caught:
        raise ValueError("\x1b[31mred")
    assert "\x1b" not in agent_traceback(caught.value)
    assert r"\x1b[31mred" in agent_traceback(caught.value)
