"""DeepSeek V3.2 and V4: conversations to text, by an encoder, because the models' files bring no chat template.

Owns the published frames of messages, calls and results; the words around the tools are given (`words`). Two
differences, to be append-only: with `thinking`, reasoning stays wherever it was sampled, not only after the last user
message; and V4's results are put in the order of the calls of the reply before them, not of an earlier one's if that
has none. A system message comes first or not at all: the published format has no frame for a later one. Client strings
come sealed and are copied. Knows nothing of tokens.
Source: the encoders published with the models (encoding_dsv32.py, encoding_dsv4.py).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import UnrenderableMessage
from stenograph.families.deepseek.dsml import MARK
from stenograph.families.deepseek.words import THINK_CLOSE, THINK_OPEN, Words, published_words

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

_Dict = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A piece of a conversation. `asking` opens a reply to it, save the reasoning's tag; None: it is one."""

    text: str
    asking: str | None


Asking = Callable[[Sequence[_Dict], Mapping[object, int]], Iterator[_Piece]]
"""The turns of messages between two replies, given the places of the earlier one's calls, by their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DsmlEncoder:
    """A Template. `block` is the element around a reply's calls; `names` the arguments read."""

    block: str
    asking: Asking
    names: frozenset[str]
    words: Words

    def in_words_of(self, source: str) -> "DsmlEncoder":
        """The same in the words of an encoder's source, or in its own where they are not found there."""
        return replace(self, words=published_words(source) or self.words)

    def render(
        self, messages: Sequence[_Dict], tools: Sequence[object] | None, add_generation_prompt: bool, kwargs: _Dict
    ) -> str:
        """The conversation's text; with `thinking` every reply begins with its reasoning.

        Raises UnrenderableMessage: a late system message, or an argument that the format or this encoder has not.
        """
        thinks = kwargs.get("thinking", False)
        if not isinstance(thinks, bool):
            raise UnrenderableMessage(
                "thinking must be true or false.", blame=Blame(RequestPart.TEMPLATE_KWARGS, path=("thinking",))
            )
        is_most = thinks and "reasoning_effort" in self.names and kwargs.get("reasoning_effort") == "max"
        if is_most and self.words.max_effort is None:
            raise UnrenderableMessage(
                "The reasoning effort 'max' is not supported: the words that ask for it are not in the model's files.",
                blame=Blame(RequestPart.TEMPLATE_KWARGS, path=("reasoning_effort",)),
            )
        num_system = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
        system = [_content(one) for one in messages[:num_system]] or [""]
        if tools:
            described = "\n".join(_json(cast("_Dict", tool)["function"]) for tool in tools)
            system[0] += f"\n\n{self.words.before_tools}{described}{self.words.after_tools}"
        turns = list(self._turns(messages, num_system, thinks=thinks))
        pieces = [_BOS, *([self.words.max_effort or ""] if is_most else []), *system]
        for turn, following in zip(turns, (*turns[1:], None), strict=True):
            pieces.append(turn.text)
            if turn.asking is None or (following is None and not add_generation_prompt):
                continue
            is_replied = following is None or following.asking is None
            pieces.append(turn.asking + (THINK_OPEN if thinks and is_replied else THINK_CLOSE))
        return "".join(pieces)

    def _turns(self, messages: Sequence[_Dict], first: int, *, thinks: bool) -> Iterator[_Piece]:
        late = next((i for i, one in enumerate(messages[first:], first) if one["role"] == "system"), None)
        if late is not None:
            raise UnrenderableMessage(
                "The model's format has no frame for a system message after the first turn.",
                blame=Blame(RequestPart.MESSAGES, late, ("role",)),
            )
        places: dict[object, int] = {}
        for is_reply, group in groupby(messages[first:], key=lambda one: one["role"] == "assistant"):
            if not is_reply:
                yield from self.asking(list(group), places)
                continue
            for one in group:
                calls = cast("Sequence[_Dict]", one.get("tool_calls") or ())
                places = {call["id"]: place for place, call in enumerate(calls)}
                reasoning = f"{one.get('reasoning_content') or ''}{THINK_CLOSE}" if thinks else ""
                yield _Piece(text=f"{reasoning}{_content(one)}{self._block(calls)}{_EOS}", asking=None)

    def _block(self, calls: Sequence[_Dict]) -> str:
        if not calls:
            return ""
        invoked = "\n".join(_invocation(cast("_Dict", call["function"])) for call in calls)
        return f"\n\n<{MARK}{self.block}>\n{invoked}\n</{MARK}{self.block}>"


def asking_v3_2(run: Sequence[_Dict], places: Mapping[object, int]) -> Iterator[_Piece]:
    """A user's message each; results, as they come, in a block of their own."""
    del places
    for is_result, group in groupby(run, key=lambda one: one["role"] == "tool"):
        texts = [_content(one) for one in group]
        if is_result:
            results = "".join(f"\n<result>{text}</result>" for text in texts)
            yield _Piece(text=f"\n\n<function_results>{results}\n</function_results>", asking="\n\n")
        else:
            yield from (_Piece(text=f"{_USER}{text}", asking=_ASSISTANT) for text in texts)


def asking_v4(run: Sequence[_Dict], places: Mapping[object, int]) -> Iterator[_Piece]:
    """One user's message of it all; the results among it in the order of the calls."""
    results = (one for one in run if one["role"] == "tool")
    in_order = iter(sorted(results, key=lambda one: places.get(one.get("tool_call_id"), 0)))
    parts = [
        f"<tool_result>{_content(next(in_order))}</tool_result>" if one["role"] == "tool" else _content(one)
        for one in run
    ]
    joined = "\n\n".join(parts)
    yield _Piece(text=f"{_USER}{joined}", asking=_ASSISTANT)


def _invocation(function: _Dict) -> str:
    """A call. Arguments other than a JSON object are shown as the one argument `arguments`, as text."""
    given = function["arguments"]
    arguments = cast("_Dict", given) if isinstance(given, Mapping) else {"arguments": given}
    elements = "\n".join(
        f'<{MARK}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}</{MARK}parameter>"
        for name, value in arguments.items()
    )
    return f'<{MARK}invoke name="{function["name"]}">\n{elements}\n</{MARK}invoke>'


def _content(message: _Dict) -> str:
    return str(message["content"] or "")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
