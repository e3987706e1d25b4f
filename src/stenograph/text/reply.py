"""A reply's ids to a message, as they come: reasoning, text and tool calls between markers.

Owns the classification of a reply's ids. Text is held back only while a marker could still complete, and a block of
calls until it is whole, because a malformed one is text. Any ids are accepted: malformed output is an outcome, never an
exception.
"""

import enum
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, takewhile

from stenograph.core.chat import ParsedReply, ParseFault, ParseProblem
from stenograph.core.messages import Message, ReplyDelta, Role, ToolCall, ToolCallDelta
from stenograph.core.types import Finish, PromptEnd, token_ids
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.call_syntax import BlockScanner, CallText
from stenograph.text.reading import Inside, PartKind, Reading, ReplyPart
from stenograph.text.reply_syntax import ReplySyntax
from stenograph.text.reply_text import ReplyText, ShownStream, StopStrings, len_of_overlap

_MAX_SEEN_CHARS = 160
_PIECE_CHARS = 4096


class _State(enum.Enum):
    START = "start"
    REASONING_START = "reasoning_start"
    REASONING = "reasoning"
    AFTER_REASONING = "after_reasoning"
    CONTENT = "content"
    CALL = "call"


_REASONING_STATES = (_State.REASONING_START, _State.REASONING)
_COUNTED_STATES = (_State.START, *_REASONING_STATES)
_FIRST_STATES = {
    PromptEnd.SILENT: _State.START,
    PromptEnd.OPENS: _State.REASONING_START,
    PromptEnd.OPENED: _State.REASONING,
    PromptEnd.CLOSES: _State.AFTER_REASONING,
    PromptEnd.CLOSED: _State.START,
}


class _IdSpans:
    """Finds the ids of a stretch of a reply's text. Decodes the reply once more, so only where somebody asks."""

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], keep: Collection[int], *, skips_special: bool = True
    ) -> None:
        stream = tokenizer.text_stream(skip_special=skips_special, keep=keep)
        # Where the text ends after each id [T]; the last also has what is left of a broken character.
        self._ends: array[int] = token_ids(accumulate(len(stream.push(token_id)) for token_id in ids))
        if self._ends:
            self._ends[-1] += len(stream.flush())

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Ids [start, end) of the characters [start, end); ids without text before them are included."""
        first = 0
        if start > 0:
            first = bisect_left(self._ends, start)
            first += first < len(self._ends) and self._ends[first] == start
        last = bisect_left(self._ends, end) + 1 if end > start else first
        return first, min(last, len(self._ends))


class ReplyParser:
    """The parser of one reply; owned by its turn. `feed` as ids come, `finish` once."""

    def __init__(self, tokenizer: Tokenizer, syntax: ReplySyntax, reading: Reading) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens
        self._keep = frozenset(added[marker] for marker in syntax.markers if marker in added)
        self._skips_special = reading.text.skips_special
        stream = ShownStream(tokenizer, skips_special=self._skips_special, keep=self._keep)
        stops = StopStrings(reading.stop, keeps_last=reading.text.keeps_stop)
        stop_ids = () if reading.text.keeps_stop else frozenset(reading.stop_token_ids) - self._keep
        self._text = ReplyText(stream, stops, min_tokens=reading.min_tokens, stop_ids=stop_ids)
        self._is_whole = not reading.text.separates_reasoning  # reasoning is content, as it was written
        self._marks = syntax.reasoning
        self._calls_syntax = syntax.calls if reading.tools else None
        self._tools = {tool.name: tool for tool in reading.tools}
        self._id_prefix = reading.id_prefix
        self._state = _State.CONTENT if syntax.reasoning is None else _FIRST_STATES[reading.prompt_end]
        self._pending = ""
        self._num_read = 0  # characters of the reply that came before the pending ones
        self._opener = ""
        self._scanner: BlockScanner | None = None
        self._between = ""  # white space before a block that is dropped if the block turns out well
        self._is_blank = True  # nothing but white space since the start, or since the last call
        self._faults: list[tuple[ParseProblem, str, int, int]] = []
        self._part_ends: list[tuple[PartKind, int]] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._ids: array[int] = token_ids()
        self._num_reasoning_tokens = 0
        self._new_content: list[str] = []
        self._new_reasoning: list[str] = []
        self._num_calls_sent = 0

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; return everything made certain by them. Feeding in other portions gives the same message."""
        at = 0
        while at < len(ids) and self._state in _COUNTED_STATES:
            self._push_counted(ids[at])
            at += 1
        rest = ids[at:]
        self._ids.extend(rest)
        self._push(self._text.push(rest))
        return self._take_delta()

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end of the reply: the rest, held back until now, and the whole message."""
        self._push(self._text.finish(finish))
        self._end()
        delta = self._take_delta()
        content = "".join(self._content)
        message = Message(
            role=Role.ASSISTANT,
            content=None if self._calls and not content else content,
            reasoning=None if self._is_whole else "".join(self._reasoning) or None,
            tool_calls=tuple(self._calls),
        )
        return delta, ParsedReply(
            message=message, faults=self._found_faults(), num_reasoning_tokens=self._num_reasoning_tokens
        )

    def ends_inside(self, finish: Finish) -> Inside | None:
        """In the place of `finish`: whether the reply ends inside its reasoning or a call."""
        self._push(self._text.finish(finish))
        if self._state in _REASONING_STATES:
            return Inside.REASONING
        if self._state is not _State.CALL or self._calls_syntax is None:
            return None
        is_text = self._calls_syntax.read_cut(self._opener, self._pending, self._tools) == ()
        return None if is_text else Inside.CALL

    def parts(self) -> tuple[ReplyPart, ...]:
        """The reply's parts in order, once it is finished: together they are all of its ids."""
        spans = self._spans()
        found: list[ReplyPart] = []
        before = 0
        for kind, end in self._part_ends:
            if end == before:
                continue
            start_id, end_id = spans.span(before, end)
            if found and found[-1].kind is kind:
                start_id = found.pop().start
            found.append(ReplyPart(kind=kind, start=start_id, end=end_id))
            before = end
        num_read = found[-1].end if found else 0
        if num_read < len(self._ids):
            found.append(ReplyPart(kind=PartKind.END, start=num_read, end=len(self._ids)))
        return tuple(found)

    def _push_counted(self, token_id: int) -> None:
        """Read one id, and count it if it is of the reasoning or of its markers."""
        self._ids.append(token_id)
        was_reasoning = self._state in _REASONING_STATES
        self._push(self._text.push((token_id,)))
        if was_reasoning or self._state in _REASONING_STATES:
            self._num_reasoning_tokens = len(self._ids)

    def _push(self, text: str) -> None:
        """Read on. A long text comes in pieces, because each thing read off it copies the rest."""
        for start in range(0, len(text), _PIECE_CHARS):
            self._pending += text[start : start + _PIECE_CHARS]
            while self._pending and self._step():
                pass

    def _take(self, num_chars: int) -> str:
        """Take the next pending characters: they are then read."""
        taken = self._pending[:num_chars]
        self._pending = self._pending[num_chars:]
        self._num_read += len(taken)
        return taken

    def _close_part(self, kind: PartKind) -> None:
        """Note the kind of the text since the last part."""
        self._part_ends.append((kind, self._num_read))

    def _step(self) -> bool:
        """Read on in the pending text; False when more of it is needed."""
        match self._state:
            case _State.START:
                return self._step_start()
            case _State.REASONING_START:
                return self._swallow("" if self._marks is None else self._marks.after_open, _State.REASONING)
            case _State.REASONING:
                return self._step_reasoning()
            case _State.AFTER_REASONING:
                return self._swallow("" if self._marks is None else self._marks.after_close, _State.CONTENT)
            case _State.CONTENT:
                return self._step_content()
            case _State.CALL:
                return self._step_call()

    def _step_start(self) -> bool:
        assert self._marks is not None, "a reply without reasoning starts with its content"
        openings = dict.fromkeys((self._marks.lead + self._marks.open, self._marks.open))
        for opening in openings:
            if self._pending.startswith(opening):
                self._take_mark(len(opening))
                self._state = _State.REASONING_START
                return True
        closings = (self._marks.close,) if self._marks.closes_bare else ()
        if closings and self._pending.startswith(closings):
            self._take(len(self._marks.close))
            self._state = _State.AFTER_REASONING
            return True
        if any(opening.startswith(self._pending) for opening in (*openings, *closings)):
            return False
        self._state = _State.CONTENT
        return True

    def _swallow(self, frame: str, then: _State) -> bool:
        """Read the template's text at this place, or as much as the model wrote of it; then another state."""
        if len(self._pending) < len(frame) and frame.startswith(self._pending):
            return False
        pairs = zip(self._pending, frame, strict=False)
        self._take_mark(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if self._state is _State.AFTER_REASONING:
            self._close_part(PartKind.REASONING)
        self._state = then
        return True

    def _step_reasoning(self) -> bool:
        assert self._marks is not None, "only a family with reasoning gets here"
        close, before_close = self._marks.close, self._marks.before_close
        end = self._pending.find(close)
        if end < 0:
            keep = max(len_of_overlap(self._pending, before_close + close), len_of_overlap(self._pending, close))
            self._add_reasoning(self._take(len(self._pending) - keep))
            return False
        text = self._take(end)
        self._add_reasoning(text.removesuffix(before_close), written=text)
        self._take_mark(len(close))
        self._state = _State.AFTER_REASONING
        return True

    def _step_content(self) -> bool:
        syntax = self._calls_syntax
        if syntax is None:
            self._add_content(self._take(len(self._pending)))
            return False
        found = [(at, opener) for opener in syntax.openers if (at := self._find_opener(opener)) >= 0]
        if not found:
            self._release_content()
            return False
        start, self._opener = min(found)
        before = self._take(start)
        text = "" if self._is_blank and not before.strip() else before.removesuffix(syntax.lead)
        self._add_content(text)
        self._between = before[len(text) :]
        self._close_part(PartKind.CONTENT)
        self._take(len(self._opener))
        self._scanner = syntax.scanner(self._opener)
        self._state = _State.CALL
        return True

    def _find_opener(self, opener: str) -> int:
        at = self._pending.find(opener)
        syntax = self._calls_syntax
        assert syntax is not None, "only where calls are parsed"
        is_held_to_start = syntax.only_at_start and opener not in syntax.markers
        if at >= 0 and is_held_to_start and not (self._is_blank and not self._pending[:at].strip()):
            return -1
        return at

    def _release_content(self) -> None:
        """Pass on content, less a possible beginning of a block, or of the white space before one, at its end."""
        assert self._calls_syntax is not None, "only where calls are parsed"
        lead = self._calls_syntax.lead
        keep = max(
            len_of_overlap(self._pending, marker)
            for opener in self._calls_syntax.openers
            for marker in (lead + opener, opener)
        )
        free = self._pending[: len(self._pending) - keep]
        if self._is_blank and not free.strip():
            return
        self._add_content(self._take(len(free)))

    def _step_call(self) -> bool:
        assert self._scanner is not None, "a block has a scanner"
        assert self._calls_syntax is not None, "only where calls are parsed"
        found = self._scanner.find(self._pending)
        if found is None:
            return False
        body = self._take(found[0])
        close = self._take(found[1] - found[0])
        self._state = _State.CONTENT
        self._add_block(self._calls_syntax.read(self._opener, body, self._tools), body, close)
        return True

    def _add_block(self, calls: tuple[CallText, ...] | ParseProblem, body: str, close: str) -> None:
        """Place a block just read: its calls, or its text where it has none."""
        if isinstance(calls, tuple) and calls:
            for call in calls:
                call_id = call.call_id
                if call_id is None or any(before.id == call_id for before in self._calls):
                    call_id = f"call_{self._id_prefix}{len(self._calls)}"
                self._calls.append(ToolCall(id=call_id, name=call.name, arguments=call.arguments))
            self._is_blank = True
            self._close_part(PartKind.TOOL_CALL)
            return
        text = f"{self._opener}{body}{close}"
        if isinstance(calls, ParseProblem):
            self._note(calls, text)
        self._add_content(self._between + text)
        self._close_part(PartKind.CONTENT)

    def _end(self) -> None:
        """Place the pending rest when no more text comes."""
        if self._state is _State.CALL and self._calls_syntax is not None:
            body = self._take(len(self._pending))
            self._add_block(self._calls_syntax.read_cut(self._opener, body, self._tools), body, "")
            return
        is_blank = self._is_trailing_blank()
        text = self._take(len(self._pending))
        if self._state in _REASONING_STATES:
            self._add_reasoning(text)
            self._note(ParseProblem.REASONING_UNCLOSED, "".join(self._reasoning))
            self._close_part(PartKind.REASONING)
        elif self._state is _State.AFTER_REASONING:
            self._close_part(PartKind.REASONING)
        elif is_blank:
            self._close_part(PartKind.END)
        else:
            self._add_content(text)
            self._close_part(PartKind.CONTENT)

    def _is_trailing_blank(self) -> bool:
        return bool(self._calls) and self._is_blank and not self._pending.strip()

    def _note(self, problem: ParseProblem, seen: str) -> None:
        """Record a fault of the text read last."""
        self._faults.append((problem, seen[:_MAX_SEEN_CHARS], self._num_read - len(seen), self._num_read))

    def _found_faults(self) -> tuple[ParseFault, ...]:
        if not self._faults:
            return ()
        spans = self._spans()
        return tuple(
            ParseFault(problem=problem, seen=seen, start=ids[0], end=ids[1])
            for problem, seen, start, end in self._faults
            for ids in (spans.span(max(0, start), end),)
        )

    def _spans(self) -> _IdSpans:
        return _IdSpans(self._tokenizer, self._ids, self._keep, skips_special=self._skips_special)

    def _add_content(self, text: str) -> None:
        if text:
            self._is_blank = self._is_blank and not text.strip()
            self._content.append(text)
            self._new_content.append(text)

    def _add_reasoning(self, text: str, *, written: str | None = None) -> None:
        """Add reasoning; `written` is its spelling in the reply (None: as it is)."""
        if text:
            self._reasoning.append(text)
        if self._is_whole:
            self._add_written(text if written is None else written)
        elif text:
            self._new_reasoning.append(text)

    def _take_mark(self, num_chars: int) -> None:
        """Read a mark around reasoning; it is content only where the reasoning is."""
        text = self._take(num_chars)
        if self._is_whole:
            self._add_written(text)

    def _add_written(self, text: str) -> None:
        """Add reasoning to the content, without counting it as text before a block."""
        self._content.append(text)
        self._new_content.append(text)

    def _take_delta(self) -> ReplyDelta:
        sent, self._num_calls_sent = self._num_calls_sent, len(self._calls)
        delta = ReplyDelta(
            content="".join(self._new_content),
            reasoning="".join(self._new_reasoning),
            tool_calls=tuple(_call_deltas(sent, self._calls[sent:])),
        )
        self._new_content, self._new_reasoning = [], []
        return delta


def _call_deltas(first: int, calls: Iterable[ToolCall]) -> Iterable[ToolCallDelta]:
    """Whole calls, each as one piece."""
    for index, call in enumerate(calls, start=first):
        yield ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
