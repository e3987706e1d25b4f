"""How much a turn may draw: what its client asks, what the model's context leaves, what its session leaves. Pure."""

from stenograph.core.chat import Remaining, TurnRequest
from stenograph.core.errors import ContextLengthExceeded, Limit, LimitExceeded
from stenograph.core.settings import OverBudget
from stenograph.core.types import Prompt


def max_tokens(
    request: TurnRequest, prompt: Prompt, remaining: Remaining, over_budget: OverBudget, *, prompt_param: str
) -> int | None:
    """How many tokens the engine is to draw at most; None leaves it to the engine. `remaining` counts the prompt.

    What the client did not ask for is what both leave. More than the context leaves is refused or taken as that much,
    as the server is set; more than the session leaves always is taken as that much: whoever set that limit is not who
    asks. Raises ContextLengthExceeded, or LimitExceeded if the session leaves nothing.
    """
    wanted, room = request.params.max_tokens, remaining.context_tokens
    if room is not None and (room < 1 or (over_budget is OverBudget.REFUSE and (wanted or 1) > room)):
        raise ContextLengthExceeded(
            num_prompt_tokens=len(prompt.ids),
            max_tokens=wanted,
            max_context_tokens=room + len(prompt.ids),
            prompt_param=prompt_param,
            max_tokens_param=request.max_tokens_param,
        )
    if remaining.session_tokens is not None and remaining.session_tokens < 1:
        raise LimitExceeded(
            Limit.SESSION_TOKENS,
            f"a prompt of {len(prompt.ids)} tokens leaves nothing of what this session may have (max_total_tokens)",
        )
    limits = [limit for limit in (wanted, room, remaining.session_tokens) if limit is not None]
    return min(limits, default=None)
