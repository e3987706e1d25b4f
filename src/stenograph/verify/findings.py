"""The findings of a verification, as values: the check, the conversation, and the first difference.

Knows nothing of templates, engines or printing.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from stenograph.core.messages import Message, Role
from stenograph.model.tokenizer import Tokenizer

LONG_MESSAGES = 32
_SHOWN_BEFORE, _SHOWN_AFTER = 4, 8


class Check(enum.StrEnum):
    """The checked properties."""

    HISTORY = "history"
    """A render begins with the earlier render of the same conversation: a prompt, or all up to a reply."""
    BRIDGE = "bridge"
    """A bridged line has the ids of a full render."""
    PARSE = "parse"
    """A rendered reply parses to itself, whole or id by id."""
    PARTS = "parts"
    """The parts of a parsed reply are all of its ids, in order."""
    BOUNDARY = "boundary"
    """After a reply without its stop token, the bridge writes all of the template's text there."""
    RETRY = "retry"
    """A turn asked for again has the same prompt as at first."""
    INJECTION = "injection"
    """Control tokens in a client's plain text are text."""
    LIVE = "live"
    """A turn with an engine: its prompt begins with the ids of the turn before, and its logprobs are finite."""


class ConversationKind(enum.StrEnum):
    """A feature of a conversation."""

    SYSTEM = "system"
    USERS = "several users"
    REASONING = "reasoning"
    CALLS = "tool calls"
    PARALLEL = "parallel calls"
    RESULTS = "tool results"
    UNICODE = "unicode"
    EMPTY = "empty content"
    LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two id sequences around the first place where they differ: the id number `at`, from 0.

    Each side is `(id, its text)` from the id number `first` on; it may end there.
    """

    at: int
    first: int
    expected: tuple[tuple[int, str], ...]
    actual: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of one conversation. `problem` is empty where it passed; `difference` where it is one of ids."""

    check: Check
    conversation: str
    kinds: frozenset[ConversationKind] = field(default_factory=frozenset[ConversationKind])
    problem: str = ""
    difference: Difference | None = None


def first_difference(tokenizer: Tokenizer, *, expected: Sequence[int], actual: Sequence[int]) -> Difference:
    """The first difference of two unequal id sequences."""
    shorter = min(len(expected), len(actual))
    at = next((i for i in range(shorter) if expected[i] != actual[i]), shorter)
    shown = slice(max(0, at - _SHOWN_BEFORE), at + _SHOWN_AFTER)
    sides = [tuple((id_, tokenizer.token_text(id_)) for id_ in side[shown]) for side in (expected, actual)]
    return Difference(at=at, first=shown.start, expected=sides[0], actual=sides[1])


def kinds_of(messages: Sequence[Message]) -> frozenset[ConversationKind]:
    """The features of these messages."""
    there = {
        ConversationKind.SYSTEM: any(message.role in (Role.SYSTEM, Role.DEVELOPER) for message in messages),
        ConversationKind.USERS: sum(message.role is Role.USER for message in messages) > 1,
        ConversationKind.REASONING: any(message.reasoning for message in messages),
        ConversationKind.CALLS: any(message.tool_calls for message in messages),
        ConversationKind.PARALLEL: any(len(message.tool_calls) > 1 for message in messages),
        ConversationKind.RESULTS: any(message.role is Role.TOOL for message in messages),
        ConversationKind.UNICODE: any(not text.isascii() for message in messages for text in _texts(message)),
        ConversationKind.EMPTY: any(not message.content for message in messages),
        ConversationKind.LONG: len(messages) >= LONG_MESSAGES,
    }
    return frozenset(kind for kind, is_there in there.items() if is_there)


def describe(messages: Sequence[Message]) -> str:
    """A conversation in a few words."""
    return ", ".join(
        f"{message.role.value}"
        + (" with reasoning" if message.reasoning else "")
        + (f" with {len(message.tool_calls)} calls" if message.tool_calls else "")
        for message in messages
    )


def _texts(message: Message) -> list[str]:
    return [message.content or "", message.reasoning or "", *(call.arguments for call in message.tool_calls)]
