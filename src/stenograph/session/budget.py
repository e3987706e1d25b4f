"""The number of tokens that a turn may sample: of its client, of the model's context, of its session. Pure."""

from stenograph.core.blame import Blame
from stenograph.core.chat import Remaining, TurnRequest
from stenograph.core.errors import ContextLengthExceeded, Limit, LimitExceeded
from stenograph.core.types import Prompt
from stenograph.session.settings import OverBudget


def max_tokens(
    request: TurnRequest, prompt: Prompt, remaining: Remaining, over_budget: OverBudget, *, part: Blame
) -> int | None:
    """The most tokens that the engine may sample; None leaves it to the engine. `remaining` counts the prompt, which
    is the `part` of the request.

    Without a `max_tokens`, it is what context and session both leave. A `max_tokens` above what the context leaves is
    refused or clamped, as the server is set; one above what the session leaves is always clamped, since its limit is
    not the caller's. Raises ContextLengthExceeded, or LimitExceeded if the session leaves nothing.
    """
    wanted, room = request.params.max_tokens, remaining.context_tokens
    if room is not None and (room < 1 or (over_budget is OverBudget.REFUSE and (wanted or 1) > room)):
        raise ContextLengthExceeded(
            num_prompt_tokens=prompt.num_tokens,
            max_tokens=wanted,
            max_context_tokens=room + prompt.num_tokens,
            prompt=part,
        )
    if remaining.session_tokens is not None and remaining.session_tokens < 1:
        raise LimitExceeded(
            Limit.SESSION_TOKENS,
            f"a prompt of {prompt.num_tokens} tokens leaves nothing of what this session may have (max_total_tokens)",
        )
    limits = [limit for limit in (wanted, room, remaining.session_tokens) if limit is not None]
    return min(limits, default=None)
