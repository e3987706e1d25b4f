"""Messages to a template's text, in one model family: the one place where a family and its template meet.

`Writer` owns the family's rules for its template's input: the form of messages, and the arguments that no request
changes. `Frame` is the text around the new messages of a bridge, the same for all turns with the same tools and
arguments; `FrameCache` owns the choice of kept frames, and for how long, bounded in entries and in the size of each.
Knows nothing of lines, and of ids only a turn's closing ones.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.day import STRFTIME_NOW
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.family import Family
from stenograph.text.template.input import Sealer, client_strings, message_dicts, tool_values
from stenograph.text.template.template import ChatTemplate, Template

MAX_FRAMES = 64
MAX_FRAME_CHARS = 65_536
"""Longer tools and arguments are rendered anew at each turn. Frames are a few times as large: at most tens of MB."""

Shown: TypeAlias = Sequence[Mapping[str, object]]
LARGE_CHARS = 1 << 20
"""Longer conversations are written by jinja2, which joins Python's strings. minijinja takes a tenth of its time for a
short message, but holds the GIL for a copy of each text in and of the whole out: 146 ms for 23 MB not in ASCII."""
_OPENING = Message(role=Role.USER, content="u")
"""Stands for a line's history in a bridge: its text does not matter, the bridge is a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """A template's input beside the messages: the same for all turns with the same tools and arguments."""

    tools: Sequence[object] | None
    arguments: Mapping[str, object]


class Writer:
    """A template with its family's rules. Pure; may be called from any thread.

    `allows_special`: in a client's text, a control token's spelling is the token.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, family: Family, *, allows_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._allows_special = allows_special
        self._template = template
        self._for_large = template.for_large if isinstance(template, ChatTemplate) else template
        self.reads_date = STRFTIME_NOW in template.names
        """Whether the template asks for the date."""
        self.form = family.form
        """Its form of messages."""
        self._fixed = dict(family.fixed_kwargs)

    def read_by_template(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """The arguments with an effect on the text. Not the date: it is another for each session."""
        names = self._template.names - {STRFTIME_NOW}
        return {name: value for name, value in kwargs.items() if name in names}

    def sealer(
        self,
        messages: Iterable[Message] = (),
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        avoid: Iterable[str] = (),
    ) -> Sealer:
        """A sealer for these strings of clients; its mark also occurs in none of `avoid`."""
        texts = (*client_strings(tuple(messages), tools, kwargs or {}), *avoid)
        return Sealer(self._tokenizer, texts, is_open=self._allows_special)

    def text(
        self,
        sealer: Sealer,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        prompt: bool,
    ) -> str:
        """The conversation's text, sealed; with `prompt`, that of the next turn at its end.

        Raises UnrenderableMessage: the template refuses, or the family fixes an argument.
        """
        frame = self.around(sealer, tools, kwargs)
        shown = message_dicts(messages, sealer, self.form)
        return self.within(frame, shown, prompt=prompt, is_large=is_large(messages))

    def around(
        self, sealer: Sealer, tools: Sequence[Tool] = (), kwargs: Mapping[str, object] | None = None
    ) -> "Surroundings":
        """The template's input beside the messages, sealed. Raises UnrenderableMessage as `text`."""
        arguments = {name: sealer.seal_value(value) for name, value in kwargs.items()} if kwargs else {}
        for name, value in self._fixed.items():
            if name in arguments and arguments[name] != value:
                raise UnrenderableMessage(
                    f"The template argument {name!r} is always {value!r} here: with another value the model's chat"
                    " template rewrites earlier turns.",
                    blame=Blame(RequestPart.TEMPLATE_KWARGS, path=(name,)),
                )
            arguments[name] = value
        return Surroundings(tools=tool_values(tools, sealer), arguments=arguments)

    def within(self, around: "Surroundings", shown: Shown, *, prompt: bool, is_large: bool = False) -> str:
        """The text of messages as `message_dicts` gives them. Raises UnrenderableMessage: the template refuses."""
        template = self._for_large if is_large else self._template
        return template.render(shown, around.tools, prompt, around.arguments)


def is_large(messages: Iterable[Message]) -> bool:
    """Whether the template's faster engine would hold the GIL for long."""
    num_chars = 0
    for message in messages:
        texts = (message.content or "", message.reasoning or "", *(call.arguments for call in message.tool_calls))
        num_chars += sum(map(len, texts))
    return num_chars > LARGE_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameKey:
    """All that a frame depends on. `kwargs_text` tells apart arguments of equal value: True, 1 and 1.0.

    `num_chars` is about how long it is.
    """

    tools: tuple[Tool, ...]
    kwargs: Mapping[str, object] = field(compare=False)
    kwargs_text: str = field(init=False, repr=False)
    num_chars: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = repr(dict(self.kwargs)) if self.kwargs else ""
        object.__setattr__(self, "kwargs_text", text)
        num_chars = len(text) + sum(len(tool.json) + len(tool.parameters_json) for tool in self.tools)
        object.__setattr__(self, "num_chars", num_chars)


BARE = FrameKey(tools=(), kwargs={})
"""The key of most bridges."""


class Frame:
    """The template's text around new messages. Immutable; `avoid` are strings in which its seals' mark must not occur.

    `closing` is the template's text after an assistant's: all after a mark put in its place.
    """

    def __init__(self, tokenizer: Tokenizer, writer: Writer, key: FrameKey, avoid: Iterable[str] = ()) -> None:
        self._writer = writer
        self.sealer = writer.sealer((), key.tools, key.kwargs, avoid=avoid)
        self._around = writer.around(self.sealer, key.tools, key.kwargs)
        reply = Message(role=Role.ASSISTANT, content=self.sealer.mark)
        shown = message_dicts((_OPENING, reply), self.sealer, writer.form)
        _, mark, self.closing = writer.within(self._around, shown, prompt=False).rpartition(self.sealer.mark)
        if not mark:
            raise UnrenderableMessage("The model's chat template does not show an assistant's text.")
        self.closing_ids: array[int] = tokenizer.encode(self.closing)
        self._past_without_calls = self._past(())
        self._before_without_calls = writer.within(self._around, self._past_without_calls, prompt=False)

    def new_text(self, calls: Sequence[ToolCall], new: Sequence[Message]) -> str | None:
        """The text appended by the template for `new` and the prompt, after a reply with `calls`; sealed.

        None where it rewrites earlier text. Raises UnrenderableMessage: it refuses.
        """
        past, before, large = self._past_without_calls, self._before_without_calls, is_large(new)
        if calls or large:  # one engine writes both texts
            past = self._past(calls)
            before = self._writer.within(self._around, past, prompt=False, is_large=large)
        shown = message_dicts(new, self.sealer, self._writer.form)
        after = self._writer.within(self._around, [*past, *shown], prompt=True, is_large=large)
        return after[len(before) :] if after.startswith(before) else None

    def _past(self, calls: Sequence[ToolCall]) -> list[dict[str, object]]:
        reply = Message(role=Role.ASSISTANT, content="a", tool_calls=tuple(calls))
        return message_dicts((_OPENING, reply), self.sealer, self._writer.form)


class FrameCache:
    """The frames of one tokenizer and template, the least recently used forgotten first. For any thread."""

    def __init__(self, tokenizer: Tokenizer, writer: Writer) -> None:
        self._tokenizer = tokenizer
        self._writer = writer
        self._cached = lru_cache(maxsize=MAX_FRAMES)(self.make)

    def __repr__(self) -> str:
        return f"<FrameCache {self._cached.cache_info().currsize} of {MAX_FRAMES}>"

    def get(self, key: FrameKey) -> Frame:
        """The frame, as it was when it was made: a template may write the date. Raises UnrenderableMessage."""
        return self._cached(key) if key.num_chars <= MAX_FRAME_CHARS else self.make(key)

    def make(self, key: FrameKey, avoid: Iterable[str] = ()) -> Frame:
        """A new frame, not kept."""
        return Frame(self._tokenizer, self._writer, key, avoid)

    def clear(self) -> None:
        """Forget every frame."""
        self._cached.cache_clear()
