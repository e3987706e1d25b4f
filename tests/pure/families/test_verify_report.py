"""What `stenograph verify` prints of a real model: that it holds, or why it does not."""

import io
from collections.abc import Callable
from typing import Any

import pytest

from stenograph.cli.verify_command import verify_files
from stenograph.families.load import Loaded
from stenograph.http.settings import Settings
from stenograph.model.progress import StreamProgress

LoadReal = Callable[..., Any]


def report(model: Any, **settings: Any) -> tuple[bool, str]:
    out, progress = io.StringIO(), io.StringIO()
    loaded = Loaded(renderer=model.renderer, notes=())
    holds = verify_files(model.files, loaded, Settings(**settings), out=out, progress=StreamProgress(progress))
    assert "rendering conversations: 100 %" in progress.getvalue()
    return holds, out.getvalue()


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=["default", "not_thinking"])
def test_a_family_that_holds_is_told_so_in_a_table(real: LoadReal, kwargs: dict[str, object]) -> None:
    holds, text = report(real("qwen3"), chat_template_kwargs=kwargs)
    assert holds, text
    assert text.endswith("TITO is exact for this model.\n")
    rows = {line[:16].strip(): line[16:].split() for line in text.splitlines()}
    assert rows["append-only"][0] == rows["injection"][0] == "holds"
    assert rows["conversations"] == ["history", "bridge", "parse", "parts", "boundary", "retry"]
    for kind in ("system", "several users", "reasoning", "parallel calls", "tool results", "unicode", "empty content"):
        assert int(rows[kind][0]) > 0, kind
    assert rows["long"] == ["-", "1", "-", "-", "-", "1"]
    assert "FAIL" not in text


def test_the_stock_template_of_qwen3_fails_because_it_drops_reasoning(real: LoadReal) -> None:
    holds, text = report(real("qwen3", "template"))
    assert not holds
    lines = text.splitlines()
    assert "append-only" in text
    assert "BROKEN" in text
    assert any("it drops the reasoning of an earlier reply; at character" in line for line in lines)
    assert any(line.startswith("  before: ") and "<think>" in line for line in lines)
    assert any(line.startswith("  after: ") and "<think>" not in line for line in lines)
    pointed = [line for line in lines if line.startswith("->")]
    assert pointed, "the first difference is shown by ids"
    assert "<think>" in pointed[0]
    assert lines[-2] == (
        "TITO is not exact for this model: it is not append-only: it drops the reasoning of an earlier reply"
    )
    assert lines[-1] == "--family qwen3 is made for it."
