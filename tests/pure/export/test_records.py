"""Records: the whole request in each, or only what its turn added; joined pieces say what the line says."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from stenograph.export.records import encoded_records
from stenograph.session.history import line_ids

NewSession = Callable[[], Any]


@pytest.mark.parametrize("delta", [False, True])
def test_each_record_has_its_prompt_whole_or_what_it_adds(new_session: NewSession, delta: bool) -> None:
    session = new_session()
    root = session.add(None, [1, 2], [(10, -0.5), (90, -1.5)])
    middle = session.add(root, [91, 3], [(11, -2.0)], trimmed=1)
    leaf = session.add(middle, [4], [(12, -1.0), (13, -1.0)])
    line = leaf.line()
    records = [json.loads(record) for record in encoded_records(line, delta=delta)]
    for node, record in zip(line, records, strict=True):
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
    assert list(encoded_records([], delta=False)) == []
