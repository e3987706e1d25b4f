"""Sessions by hand: what a test says of a turn is its parent, its prompt ids, and what was drawn with which logprob."""

import base64
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from stenograph.core.chat import ParsedReply
from stenograph.core.messages import Message, Role
from stenograph.core.replay import PackedInts, Replay, int32_of_base64
from stenograph.core.types import (
    Finish,
    FinishReason,
    LogprobsKind,
    RequestId,
    SampledTurn,
    SamplingParams,
    WeightSpan,
    token_ids,
)
from stenograph.trajectory.turn import STATUS_OF, CommittedTurn, Node, PromptContext

Drawn = Sequence[tuple[int, float]]


class Session:
    """Committed turns, oldest first, in `nodes`; `add` commits one more."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(
        self,
        parent: Node | None,
        prompt: Sequence[int],
        drawn: Drawn,
        *,
        trimmed: int = 0,
        reason: FinishReason = FinishReason.STOP,
        versions: Sequence[tuple[str, int, int]] = (),
        sampling: Sequence[float] | None = None,
        experts: str | None = None,
        indexer: str | None = None,
        first_row: int = 0,
        reply_id: str = "",
        cached: int = 0,
        params: SamplingParams = SamplingParams(),
        kind: LogprobsKind = LogprobsKind.RAW,
        tempered: Sequence[float] | None = None,
        forced: Sequence[bool] | None = None,
        support: bytes | None = None,
    ) -> Node:
        turn = CommittedTurn(
            request_id=RequestId("r"),
            new_prompt_ids=token_ids(prompt),
            num_trimmed=trimmed,
            sampled=SampledTurn(
                ids=token_ids(id_ for id_, _ in drawn),
                logprobs=array("d", [logprob for _, logprob in drawn]),
                sampling_logprobs=None if sampling is None else array("d", sampling),
                top_logprobs=None,
                finish=Finish(reason=reason),
                weights=tuple(WeightSpan(version=v, start=start, end=end) for v, start, end in versions),
                num_cached_tokens=cached,
                times=None,
                logprobs_kind=kind,
                tempered_logprobs=None if tempered is None else array("d", tempered),
                forced=None if forced is None else bytes(forced),
                support=support,
                replay=None
                if experts is indexer is None
                else Replay(
                    routed_experts=None if experts is None else PackedInts.of(int32_of_base64(experts)),
                    indexer_topk=None if indexer is None else PackedInts.of(int32_of_base64(indexer)),
                    first_row=first_row,
                ),
            ),
            status=STATUS_OF[reason],
            params=params,
            messages=(Message(role=Role.USER, content="x"),),
            reply=ParsedReply(message=Message(role=Role.ASSISTANT, content="y")),
            context=PromptContext(),
            reply_id=reply_id,
            committed_at=1.5,
        )
        node = Node(id_=len(self.nodes), turn=turn, parent=parent)
        self.nodes.append(node)
        return node


@pytest.fixture(scope="session")
def new_session() -> Callable[[], Session]:
    """Makes an empty session."""
    return Session


@pytest.fixture(scope="session")
def replay_text() -> Callable[[int], str]:
    """Makes the base64 of the int32 values 0, 1, … n - 1, as an engine sends them."""
    return lambda num: base64.b64encode(np.arange(num, dtype="<i4").tobytes()).decode()
