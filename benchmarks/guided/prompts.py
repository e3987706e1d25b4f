"""The prompts of `bench guided`: built in, of a file, or of a data set.

Owns how a file of prompts is read. Fewer prompts than were asked for are no error.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.kit.datasets import JSON_LINES, AskedAndAnswered
from benchmarks.streaming.prompts import PromptKind, make_prompts
from stenograph.core.errors import CallerError
from stenograph.core.messages import Message, Role
from stenograph.dialects.openai.chat import decode_chat
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.renderer import Renderer

_TRADES = ("nurse", "software engineer", "carpenter", "teacher", "pilot", "chemist", "gardener", "accountant")
_PLACES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Prague", "Hanoi", "Toronto")
_ASK = (
    "Invent a {trade} from {place} and write their profile as one JSON object with the keys name, age, city,"
    " is_remote, level (junior, senior or lead) and skills (two to four short words). Write nothing else."
)


Conversation = tuple[Message, ...]


def built_in(num: int) -> list[Conversation]:
    """The first `num` of 64 prompts, which ask for the record that the built-in schema describes."""
    texts = [
        _ASK.format(trade=trade, place=_PLACES[(row + column) % len(_PLACES)])
        for row in range(len(_PLACES))
        for column, trade in enumerate(_TRADES)
    ]
    return [_question(text) for text in texts[:num]]


def read_prompts(path: Path, num: int) -> list[Conversation]:
    """The first `num` of a file: a prompt a line; of a `.jsonl` file a text, `{"prompt": …}` or `{"messages": […]}`.

    Empty lines are none. Raises OSError, and ValueError, which names the line.
    """
    lines = [(number, line) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no prompts")
    if path.suffix != JSON_LINES:
        return [_question(line) for _, line in lines[:num]]
    return list(_decoded(path, lines[:num]))


def sharegpt_prompts(
    conversations: Sequence[Sequence[AskedAndAnswered]], renderer: Renderer, *, num: int, most_tokens: int
) -> list[Conversation]:
    """The first questions of the first `num` conversations whose prompt has at most `most_tokens` tokens."""
    asked = (_question(exchanges[0].asked) for exchanges in conversations)
    fitting = (messages for messages in asked if len(renderer.render(messages, (), {})) <= most_tokens)
    found = list(islice(fitting, num))
    if not found:
        raise ValueError(f"no conversation begins with a question of at most {most_tokens} tokens")
    return found


def random_prompts(tokenizer: Tokenizer, *, num: int, num_tokens: int) -> list[Conversation]:
    """`num` different texts of words of English and of code, of `num_tokens` tokens each, or nearly."""
    texts = make_prompts(tokenizer, PromptKind.UNIQUE, num=num, num_tokens=num_tokens)
    return [_question(prompt.text) for prompt in texts]


def _question(text: str) -> Conversation:
    return (Message(role=Role.USER, content=text),)


def _decoded(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[Conversation]:
    for number, line in lines:
        try:
            yield _conversation(msgspec.json.decode(line))
        except (msgspec.DecodeError, CallerError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error


def _conversation(value: object) -> Conversation:
    match value:
        case str(text) | {"prompt": str(text)}:
            return _question(text)
        case {"messages": list(messages)}:  # pyright: ignore[reportUnknownVariableType]  # decode_chat reads it
            return tuple(decode_chat(msgspec.json.encode({"messages": messages})).messages)
        case _:
            raise ValueError('a prompt is a text, {"prompt": …} or {"messages": […]}')
