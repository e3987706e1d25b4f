"""A reply in harmony to a message, as it comes: several framed messages, distinguished by channel and recipient.

Owns the classification of a reply's ids. Frames are found by their tokens' ids, so a frame spelled out in plain text is
text. Any ids are accepted. A message goes to its end token, and stays unclosed if another begins before it; a frame
outside harmony is shown as text; a header cut short says nothing, unless it is a call's.

Source: the harmony response format as OpenAI publishes it.
"""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParsedReply, ParseFault, ParseProblem
from stenograph.core.messages import Message, ReplyDelta, Role, ToolCall, ToolCallDelta
from stenograph.core.types import Finish, FinishReason, token_ids
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.reading import Inside, PartKind, Reading, ReplyPart
from stenograph.text.reply_text import ShownStream, StopStrings, ends_by_token

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."

_ENDS = (END, CALL, RETURN)
_RECIPIENT = "to="
_BETWEEN = "\n\n"
"""Put between the texts of two messages of one kind: the wire has one field for them."""
_MAX_SEEN_CHARS = 160
_CLOSED = Finish(reason=FinishReason.STOP)


class _Kind(enum.Enum):
    REASONING = PartKind.REASONING
    CONTENT = PartKind.CONTENT
    CALL = PartKind.TOOL_CALL
    FOREIGN = "foreign"
    """A message of another author, or for a recipient other than a function: shown with its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The header before a message's text: its spelling, and the words in it."""

    text: str
    author: str
    channel: str
    recipient: str

    @property
    def is_frame(self) -> bool:
        """Whether it was begun as a frame; else the model wrote the text without any frame."""
        return CHANNEL in self.text or self.text.lstrip().startswith(f"{_RECIPIENT}{FUNCTIONS}")


class HarmonyParser:
    """The parser of one reply; owned by its turn. `feed` as ids come, `finish` once.

    The reply begins within a header: the prompt ends with its author.
    """

    def __init__(self, tokenizer: Tokenizer, reading: Reading) -> None:
        added = tokenizer.added_tokens
        marks = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
        self._marks = {added[mark]: mark for mark in marks if mark in added}
        within = {added[mark] for mark in (START, CHANNEL, CONSTRAIN, MESSAGE) if mark in added}
        self._last_ids = tokenizer.special_ids - within  # what may end a reply
        self._stream = ShownStream(tokenizer, skips_special=reading.text.skips_special)
        self._reading = reading
        shown = () if not reading.text.keeps_stop else reading.stop_token_ids
        self._stop_ids = frozenset(reading.stop_token_ids).difference(self._marks, shown)
        self._held: tuple[int, ...] = ()
        self._tool_names = {tool.name for tool in reading.tools}
        self._ids: array[int] = token_ids()
        self._start = 0  # the id at which the message that is read begins
        self._is_started = False  # whether it had a start token
        self._header: list[str] = []
        self._kind: _Kind | None = None  # None: the header is not whole
        self._body: list[str] = []
        self._stops = self._new_stops()
        self._parts: list[ReplyPart] = []
        self._faults: list[ParseFault] = []
        self._texts: dict[_Kind, list[str]] = {_Kind.CONTENT: [], _Kind.REASONING: []}
        self._new: dict[_Kind, list[str]] = {_Kind.CONTENT: [], _Kind.REASONING: []}
        self._calls: list[ToolCall] = []
        self._num_calls_sent = 0
        self._num_reasoning_tokens = 0

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; return everything made certain by them. Feeding in other portions gives the same message."""
        for token_id in ids:
            self._read_held()
            if token_id in self._stop_ids:
                self._held = (token_id,)  # no text, if it ends the reply
            else:
                self._read(token_id)
        return self._take_delta()

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end of the reply: the rest, held back until now, and the whole message."""
        is_closed = ends_by_token(finish)
        if is_closed and self._held:
            self._add_text(self._stream.flush())
            self._ids.extend(self._held)
        else:
            self._read_held()
        self._add_text(self._stream.flush(is_ended=is_closed))
        self._close(len(self._ids), finish, is_closed=is_closed)
        delta = self._take_delta()
        content, reasoning = ("".join(self._texts[kind]) for kind in (_Kind.CONTENT, _Kind.REASONING))
        message = Message(
            role=Role.ASSISTANT,
            content=None if self._calls and not content else content,
            reasoning=reasoning or None,
            tool_calls=tuple(self._calls),
        )
        return delta, ParsedReply(
            message=message, faults=tuple(self._faults), num_reasoning_tokens=self._num_reasoning_tokens
        )

    def ends_inside(self, finish: Finish) -> Inside | None:
        """In the place of `finish`. A message to the user can be closed; a reply still to begin one cannot."""
        del finish  # held-back text does not show whose it is
        self._read_held()
        self._add_text(self._stream.flush())
        match self._kind:
            case _Kind.CONTENT:
                return Inside.FRAME if self._calls else None  # a call's end closes what has calls
            case _Kind.REASONING:
                return Inside.REASONING
            case _Kind.CALL:
                return Inside.CALL
            case _:
                is_after = not self._header and not self._is_started and self._kind is None
                last = self._parts[-1].kind if self._parts else None
                is_whole = is_after and last in (PartKind.CONTENT, PartKind.TOOL_CALL)
                return None if is_whole else Inside.FRAME

    def parts(self) -> tuple[ReplyPart, ...]:
        """The reply's parts in order, once it is finished: together they are all of its ids."""
        num_ids = len(self._ids)
        if not num_ids or self._ids[-1] not in self._last_ids:
            return tuple(self._parts)
        *before, last = self._parts
        end = ReplyPart(kind=PartKind.END, start=num_ids - 1, end=num_ids)
        if last.start == end.start:
            return (*before, end)
        return (*before, ReplyPart(kind=last.kind, start=last.start, end=end.start), end)

    def _read_held(self) -> None:
        """Read a held-back stop token: the reply goes on after it."""
        for token_id in self._held:
            self._read(token_id)
        self._held = ()

    def _read(self, token_id: int) -> None:
        mark = self._marks.get(token_id)
        if mark is None:
            self._ids.append(token_id)
            self._add_text(self._stream.push(token_id))
            return
        self._add_text(self._stream.flush())
        if self._is_next(mark):
            self._close(len(self._ids), _CLOSED, is_closed=False)
        self._ids.append(token_id)
        if mark == START:
            self._is_started = True
            self._header.clear()
        elif mark in _ENDS:
            self._close(len(self._ids), _CLOSED, is_closed=True)
        elif self._kind is None and mark == MESSAGE:
            self._kind = self._kind_of(self._read_header())
        elif self._kind is None:
            self._header.append(mark)

    def _is_next(self, mark: str) -> bool:
        """Whether it begins another message, though the current one has not ended."""
        if self._kind is None:
            return mark == START and bool("".join(self._header).strip())
        return mark in (START, CHANNEL)

    def _new_stops(self) -> StopStrings:
        return StopStrings(self._reading.stop, keeps_last=self._reading.text.keeps_stop)

    def _read_header(self) -> _Header:
        text = "".join(self._header)
        before, _, after = text.replace(CONSTRAIN, " ").partition(CHANNEL)
        authors, channels = before.split(), after.split()
        recipients = [word for word in (*authors, *channels) if word.startswith(_RECIPIENT)]
        named = [word for word in authors if not word.startswith(_RECIPIENT)]
        return _Header(
            text=text,
            author=named[0] if named else Role.ASSISTANT.value,
            channel=next((word for word in channels if not word.startswith(_RECIPIENT)), FINAL),
            recipient=recipients[0].removeprefix(_RECIPIENT) if recipients else "",
        )

    def _kind_of(self, header: _Header) -> _Kind:
        if header.author != Role.ASSISTANT:
            return _Kind.FOREIGN
        if header.recipient:
            is_function = header.recipient.startswith(FUNCTIONS) or header.recipient in self._tool_names
            return _Kind.CALL if is_function and self._tool_names else _Kind.FOREIGN
        return _Kind.REASONING if header.channel == ANALYSIS else _Kind.CONTENT

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._kind is None:
            self._header.append(text)
        elif len(self._ids) <= self._reading.min_tokens:
            self._say(self._stops.pass_over(text))
        else:
            self._say(self._stops.push(text))

    def _say(self, text: str) -> None:
        """Pass on text of the current message, or keep it until the message is whole."""
        if not text:
            return
        is_first = not self._body
        self._body.append(text)
        if self._kind is _Kind.CONTENT or self._kind is _Kind.REASONING:
            self._show(self._kind, text, is_first=is_first)

    def _show(self, kind: _Kind, text: str, *, is_first: bool) -> None:
        if is_first and self._texts[kind]:
            text = _BETWEEN + text
        self._texts[kind].append(text)
        self._new[kind].append(text)

    def _close(self, end: int, finish: Finish, *, is_closed: bool) -> None:
        """Place the message up to the id before `end`; the next begins there."""
        header = self._read_header()
        if self._kind is not None:
            self._say(self._stops.finish(finish))
            kind = self._place(self._kind, f"{header.text}{MESSAGE}", header, end, is_closed=is_closed)
        elif self._is_started or header.is_frame:
            kind = self._kind_of(header)
            if kind in (_Kind.REASONING, _Kind.CALL):
                kind = self._place(kind, header.text, header, end, is_closed=is_closed)
        else:
            kind = _Kind.CONTENT
            if header.text.strip() and (text := self._stops.push(header.text) + self._stops.finish(finish)):
                self._show(kind, text, is_first=True)
        if end > self._start:
            self._note_part(kind, end)
        self._start, self._is_started, self._kind = end, False, None
        self._header.clear()
        self._body.clear()
        self._stops = self._new_stops()

    def _place(self, kind: _Kind, begun: str, header: _Header, end: int, *, is_closed: bool) -> _Kind:
        """Record a message, with `begun` before its text, and any fault of it; return the kind it turns out to be."""
        body = "".join(self._body)
        problem: ParseProblem | None = None
        shown = f"{begun}{body}"
        if kind is _Kind.REASONING:
            self._num_reasoning_tokens += end - self._start
            problem = None if is_closed else ParseProblem.REASONING_UNCLOSED
        elif kind is _Kind.CALL:
            problem = _problem_of(body) if is_closed else ParseProblem.TOOL_CALL_UNCLOSED
            if problem is None:
                name = header.recipient.removeprefix(FUNCTIONS)
                call_id = f"call_{self._reading.id_prefix}{len(self._calls)}"
                self._calls.append(ToolCall(id=call_id, name=name, arguments=body))
                return kind
            kind = _Kind.FOREIGN
        if kind is _Kind.FOREIGN:
            self._show(_Kind.CONTENT, shown, is_first=True)
        if problem is not None:
            last = end - (self._marks.get(self._ids[end - 1]) in _ENDS)
            self._faults.append(ParseFault(problem=problem, seen=shown[:_MAX_SEEN_CHARS], start=self._start, end=last))
        return kind

    def _note_part(self, kind: _Kind, end: int) -> None:
        part_kind = PartKind.CONTENT if kind is _Kind.FOREIGN else PartKind(kind.value)
        start = self._start
        if self._parts and self._parts[-1].kind is part_kind:
            start = self._parts.pop().start
        self._parts.append(ReplyPart(kind=part_kind, start=start, end=end))

    def _take_delta(self) -> ReplyDelta:
        sent, self._num_calls_sent = self._num_calls_sent, len(self._calls)
        delta = ReplyDelta(
            content="".join(self._new[_Kind.CONTENT]),
            reasoning="".join(self._new[_Kind.REASONING]),
            tool_calls=tuple(
                ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
                for index, call in enumerate(self._calls[sent:], start=sent)
            ),
        )
        for new in self._new.values():
            new.clear()
        return delta


def _problem_of(arguments: str) -> ParseProblem | None:
    """The fault of a call's text; None for a JSON object."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ParseProblem.TOOL_CALL_NOT_JSON
    return None if isinstance(value, dict) else ParseProblem.TOOL_CALL_WRONG_SHAPE
