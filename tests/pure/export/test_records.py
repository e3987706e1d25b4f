"""Records: the whole request in each, or only what its turn added; joined pieces say what the line says."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from stenograph.core.json_pieces import json_pieces
from stenograph.export.records import records
from stenograph.trajectory.turn import Node, line_ids

NewSession = Callable[[], Any]


def written_of(line: list[Node], *, delta: bool) -> list[Any]:
    made: list[Any] = json.loads(b"".join(json_pieces(records(line, delta=delta))))
    return made


@pytest.mark.parametrize("delta", [False, True])
def test_each_record_has_its_prompt_whole_or_what_it_adds(new_session: NewSession, delta: bool) -> None:
    session = new_session()
    root = session.add(None, [1, 2], [(10, -0.5), (90, -1.5)])
    middle = session.add(root, [91, 3], [(11, -2.0)], trimmed=1)
    leaf = session.add(middle, [4], [(12, -1.0), (13, -1.0)])
    line = leaf.line()
    written = written_of(line, delta=delta)
    for node, record in zip(line, written, strict=True):
        request = record["request"]
        prompt = list(line_ids(node))[: node.num_tokens - len(node.turn.sampled.ids)]
        num_kept = request.get("num_kept_ids", 0)
        assert request["input_ids"] == prompt[num_kept:]
        assert num_kept == (len(prompt) - len(node.turn.new_prompt_ids) if delta else 0)
        assert len(request["messages"]) + request.get("num_kept_messages", 0) == node.num_messages - 1
        rows = record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]
        assert [row[1] for row in rows] == list(node.turn.sampled.ids)
        assert record["response"]["usage"]["prompt_tokens"] == len(prompt)


def test_a_line_without_turns_has_no_records() -> None:
    assert written_of([], delta=False) == []


def test_no_piece_of_a_long_record_holds_more_than_a_millisecond_of_writing(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, range(100_000), [(7, -0.5)] * 50_000, experts="A" * 10**6)
    leaf = session.add(root, range(100_000), [(7, -0.5)] * 50_000, experts="A" * 10**6)
    assert max(map(len, json_pieces(records(leaf.line(), delta=False)))) < 2**18
