"""A line's ids as text: joined from what was written before, and never another line's."""

import json
from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stenograph.core.chat import ParsedReply
from stenograph.core.ids_json import encode_ids, join_ids
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, Prompt, RequestId, SampledTurn, token_ids
from stenograph.trajectory.latest import MOST_FRAGMENTS, LatestLine, merged_fragments
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus, line_ids

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)


def node_of(parent: Node | None, new: Sequence[int], drawn: Sequence[int], id_: int) -> Node:
    sampled = SampledTurn(
        ids=token_ids(drawn),
        logprobs=array("d", [-1.0] * len(drawn)),
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=FinishReason.STOP),
        weights=(),
        num_cached_tokens=0,
        times=None,
    )
    turn = CommittedTurn(
        request_id=RequestId("r"),
        new_prompt_ids=token_ids(new),
        sampled=sampled,
        status=TurnStatus.COMPLETED,
        messages=(Message(role=Role.USER, content="x"),),
        reply=ParsedReply(message=Message(role=Role.ASSISTANT, content="y")),
        context=PromptContext(),
    )
    return Node(id_=id_, turn=turn, parent=parent)


@given(st.lists(st.integers(0, 9999), max_size=80))
def test_fragments_are_merged_to_few_of_the_same_text(sizes: list[int]) -> None:
    texts = [b"1," * size + b"1" for size in sizes]
    kept: tuple[bytes, ...] = ()
    for text in texts:
        kept = merged_fragments((*kept, text))
        assert len(kept) <= 2 * MOST_FRAGMENTS
    assert join_ids(kept) == join_ids(texts)


@given(st.lists(st.tuples(st.integers(0, 3), IDS.filter(bool), IDS), min_size=1, max_size=8))
def test_what_is_at_hand_is_the_line(turns: list[tuple[int, list[int], list[int]]]) -> None:
    lines, nodes = LatestLine(), list[Node]()
    for back, new, drawn in turns:  # each extends one of the last nodes, or begins a line
        parent = nodes[-back] if 0 < back <= len(nodes) else None
        kept = line_ids(parent)
        at_hand = lines.text_of(parent)
        if at_hand is not None:
            written, unwritten = at_hand
            assert whole(written, unwritten) == list(kept)
            fragments = (*written, encode_ids(unwritten + token_ids(new)))
        else:
            fragments = (encode_ids(kept + token_ids(new)),)
        prompt = replace(Prompt.of(kept + token_ids(new), num_kept=len(kept)), json_fragments=fragments)
        node = node_of(parent, new, drawn, len(nodes))
        lines.extend(node, prompt, None)
        nodes.append(node)
        for num_trimmed in range(len(drawn) + 1):
            found = lines.text_of(node, num_trimmed)
            assert found is not None
            ids = list(line_ids(node))
            assert whole(*found) == ids[: len(ids) - num_trimmed]
        assert lines.text_of(node, len(drawn) + 1) is None
        assert all(lines.text_of(other) is None for other in nodes[:-1])


def whole(written: tuple[bytes, ...], unwritten: "array[int]") -> list[int]:
    ids: list[int] = json.loads(b"[" + join_ids((*written, encode_ids(unwritten))) + b"]")
    return ids
