"""A reply without a sampled token: the end of a line once more, or the end of a session's budget. Pure."""

from array import array
from collections.abc import Mapping
from functools import partial

from stenograph.core.chat import ChatReply, ParsedReply
from stenograph.core.messages import Message, Role
from stenograph.core.stages import Stage
from stenograph.core.types import Finish, FinishReason, Prompt, SampledTurn, SamplingParams, Usage, token_ids
from stenograph.trajectory.turn import Node, line_ids


def empty_reply(
    reply_id: str,
    *,
    created: float,
    model: str,
    params: SamplingParams,
    stages_s: Mapping[Stage, float],
    last: Node | None = None,
) -> ChatReply:
    """A reply without a token after the line down to `last`; None: after nothing."""
    num_prompt = 0 if last is None else last.num_tokens
    of_kept = None if last is None else partial(line_ids, last)
    empty = SampledTurn(
        ids=token_ids(),
        logprobs=array("d"),
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=FinishReason.STOP),
        weights=(),
        num_cached_tokens=num_prompt,
        times=None,
    )
    return ChatReply(
        id=reply_id,
        created=int(created),
        model=model,
        prompt=Prompt(new_ids=token_ids(), num_kept=num_prompt, of_kept=of_kept),
        params=params,
        parsed=ParsedReply(message=Message(role=Role.ASSISTANT)),
        sampled=empty,
        usage=Usage(num_prompt=num_prompt, num_completion=0, num_cached=num_prompt),
        stages_s=stages_s,
    )
