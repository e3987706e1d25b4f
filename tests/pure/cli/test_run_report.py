"""The report of a run says what it found, and no more."""

import pytest

from stenograph.cli.run_report import drift_line
from stenograph.core.drift import DriftClass

NONE = {str(kind): 0 for kind in DriftClass}
"""A line's counts as a server tells them: each class, found or not."""


def told(*counts: dict[str, int], unrenderable: str | None = None) -> str:
    return drift_line({"lines": [{"counts": {**NONE, **one}, "unrenderable": unrenderable} for one in counts]})


def test_replies_in_other_tokens_alone_are_harmless() -> None:
    assert told({"assistant_text": 2}, {}) == (
        "drift: 2 x assistant_text (the model spelled a reply in other tokens than the template would; harmless, its"
        " own tokens are kept)"
    )


@pytest.mark.parametrize("other", sorted(set(NONE) - {"assistant_text"}))
def test_any_other_class_is_looked_up(other: str) -> None:
    assert told({"assistant_text": 2, other: 1}).endswith(" (docs/drift.md has what each means)")
    assert told({"assistant_text": 2}, {other: 1}).endswith(" (docs/drift.md has what each means)")
    assert told({other: 1}) == f"drift: 1 x {other} (docs/drift.md has what each means)"


def test_a_line_that_cannot_be_compared_is_not_called_harmless() -> None:
    assert told({}, unrenderable="why") == ("drift: 1 line that cannot be compared (docs/drift.md has what each means)")
    assert "harmless" not in told({"assistant_text": 1}, unrenderable="why")


def test_no_drift_is_none() -> None:
    assert told({}, {}) == told() == "drift: none"
