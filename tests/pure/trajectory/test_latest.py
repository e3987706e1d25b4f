"""A line's ids as text: joined from what was written before, and never another line's."""

import json
from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import ParsedReply
from stenograph.core.ids_json import encode_ids, join_ids
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, Prompt, RequestId, SampledTurn, token_ids
from stenograph.trajectory.latest import LineJson
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


@given(st.lists(st.tuples(st.integers(0, 3), IDS.filter(bool), IDS), min_size=1, max_size=8))
def test_what_is_at_hand_is_the_line(turns: list[tuple[int, list[int], list[int]]]) -> None:
    lines, nodes = LineJson(), list[Node]()
    for back, new, drawn in turns:  # each extends one of the last nodes, or begins a line
        parent = nodes[-back] if 0 < back <= len(nodes) else None
        kept = line_ids(parent)
        at_hand = lines.of(parent)
        if at_hand is not None:
            assert json.loads(b"[" + join_ids(at_hand) + b"]") == list(kept)
        prompt = Prompt(
            ids=kept + token_ids(new),
            num_kept=len(kept),
            ids_json=join_ids((*([encode_ids(kept)] if at_hand is None else at_hand), encode_ids(token_ids(new)))),
        )
        node = node_of(parent, new, drawn, len(nodes))
        lines.extend(prompt, node.turn.sampled, node)
        nodes.append(node)
        fragments = lines.of(node)
        assert fragments is not None
        assert json.loads(b"[" + join_ids(fragments) + b"]") == list(line_ids(node))
        assert all(lines.of(other) is None for other in nodes[:-1])
