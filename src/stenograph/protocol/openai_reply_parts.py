"""What the replies of OpenAI's chat and completions routes have in common. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from stenograph.core.json_pieces import PIECE_VALUES, joined, json_pieces
from stenograph.core.types import TopLogprob, Usage

TokenText = Callable[[int], str]
"""One token as text, for a person; bytes that are no UTF-8 by themselves are U+FFFD."""


class Drawn(Protocol):
    """What logprobs are written from: a chunk or a whole turn."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def top_logprobs(self) -> tuple[tuple[TopLogprob, ...], ...] | None: ...


def reply_text(body: dict[str, object], *, num_ids: int) -> bytes | Iterator[bytes]:
    """A reply's body as JSON, in pieces if so many ids are in it. Arrays are lists."""
    return whole_or_pieces(json_pieces(body), num_ids=num_ids)


def whole_or_pieces(fragments: Iterator[bytes], *, num_ids: int) -> bytes | Iterator[bytes]:
    """What is sent, made now, or, if so many ids are in it, a piece at a time as it is taken."""
    return joined(fragments) if num_ids > PIECE_VALUES else b"".join(fragments)


def usage_body(usages: Sequence[Usage]) -> dict[str, object]:
    """The tokens of a reply's turns."""
    num_prompt = sum(usage.num_prompt for usage in usages)
    num_completion = sum(usage.num_completion for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached for usage in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.num_reasoning for usage in usages)},
    }
