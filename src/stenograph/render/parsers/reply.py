"""A reply's ids to a message, as they come: reasoning, text and Hermes tool calls.

Owns what counts as what. Text is held back only while a marker could still complete, and a tool call until it is
whole, because a malformed one is text. Any ids are accepted: malformed output is an outcome, never an exception.
"""

import enum
from collections.abc import Iterable, Sequence

from stenograph.core.chat import ParsedReply, ParseProblem, ReplyDelta, ToolCallDelta
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.types import Finish
from stenograph.render.families.family import ReplySyntax
from stenograph.render.parsers.stop_strings import StopStrings, len_of_overlap
from stenograph.render.parsers.tool_call import CallScanner, CallText, read_call
from stenograph.render.tokenizer import Tokenizer


class _State(enum.Enum):
    START = "start"
    REASONING_START = "reasoning_start"
    REASONING = "reasoning"
    AFTER_REASONING = "after_reasoning"
    CONTENT = "content"
    CALL = "call"


_REASONING_STATES = (_State.REASONING_START, _State.REASONING)
_COUNTED_STATES = (_State.START, *_REASONING_STATES)


class ReplyParser:
    """The parser of one reply; owned by its turn. `feed` as ids come, `finish` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        syntax: ReplySyntax,
        *,
        stop: tuple[str, ...],
        parse_calls: bool,
        id_prefix: str,
    ) -> None:
        self._stream = tokenizer.text_stream(skip_special=True)
        self._stops = StopStrings(stop)
        self._syntax = syntax
        self._parse_calls = parse_calls
        self._id_prefix = id_prefix
        self._state = _State.START
        self._pending = ""
        self._scanner = CallScanner(syntax.call_close)
        self._between = ""  # white space before a call that is dropped if the call turns out well
        self._is_blank = True  # nothing but white space since the start, or since the last call
        self._problem = ParseProblem.NONE
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._num_ids = 0
        self._num_reasoning_tokens = 0
        self._new_content: list[str] = []
        self._new_reasoning: list[str] = []
        self._num_calls_told = 0

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; what became certain by them. Feeding in other portions gives the same message."""
        at = 0
        while at < len(ids) and self._state in _COUNTED_STATES:
            self._push_counted(ids[at])
            at += 1
        self._push(self._stops.push("".join(map(self._stream.push, ids[at:]))))
        return self._take_delta()

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end of the reply: what was still held back, and the whole message."""
        self._push(self._stops.push(self._stream.flush()))
        self._push(self._stops.finish(finish))
        self._end()
        delta = self._take_delta()
        content = "".join(self._content)
        message = Message(
            role=Role.ASSISTANT,
            content=None if self._calls and not content else content,
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._calls),
        )
        parsed = ParsedReply(message=message, problem=self._problem, num_reasoning_tokens=self._num_reasoning_tokens)
        return delta, parsed

    def _push_counted(self, token_id: int) -> None:
        """Read one id, and count it if it is of the reasoning or of its markers."""
        self._num_ids += 1
        was_reasoning = self._state in _REASONING_STATES
        self._push(self._stops.push(self._stream.push(token_id)))
        if was_reasoning or self._state in _REASONING_STATES:
            self._num_reasoning_tokens = self._num_ids

    def _push(self, text: str) -> None:
        self._pending += text
        while self._pending and self._step():
            pass

    def _step(self) -> bool:
        """Read on in the pending text; False when more of it is needed."""
        match self._state:
            case _State.START:
                return self._step_start()
            case _State.REASONING_START:
                self._pending = self._pending.removeprefix("\n")
                self._state = _State.REASONING
                return True
            case _State.REASONING:
                return self._step_reasoning()
            case _State.AFTER_REASONING:
                return self._step_after_reasoning()
            case _State.CONTENT:
                return self._step_content()
            case _State.CALL:
                return self._step_call()

    def _step_start(self) -> bool:
        opening = self._syntax.reasoning_open
        if self._pending.startswith(opening):
            self._pending = self._pending[len(opening) :]
            self._state = _State.REASONING_START
        elif opening.startswith(self._pending):
            return False
        else:
            self._state = _State.CONTENT
        return True

    def _step_after_reasoning(self) -> bool:
        """Swallow the empty line that the template puts there, or what the model wrote of it."""
        if self._pending == "\n":
            return False
        self._pending = self._pending.removeprefix("\n").removeprefix("\n")
        self._state = _State.CONTENT
        return True

    def _step_reasoning(self) -> bool:
        close = self._syntax.reasoning_close
        end = self._pending.find(close)
        if end < 0:
            keep = max(len_of_overlap(self._pending, "\n" + close), len_of_overlap(self._pending, close))
            self._add_reasoning(self._pending[: len(self._pending) - keep])
            self._pending = self._pending[len(self._pending) - keep :]
            return False
        self._add_reasoning(self._pending[:end].removesuffix("\n"))
        self._pending = self._pending[end + len(close) :]
        self._state = _State.AFTER_REASONING
        return True

    def _step_content(self) -> bool:
        if not self._parse_calls:
            self._add_content(self._pending)
            self._pending = ""
            return False
        opening = self._syntax.call_open
        start = self._pending.find(opening)
        if start < 0:
            self._release_content()
            return False
        before = self._pending[:start]
        text = "" if self._is_blank and not before.strip() else before.removesuffix("\n")
        self._add_content(text)
        self._between = before[len(text) :]
        self._pending = self._pending[start + len(opening) :]
        self._scanner = CallScanner(self._syntax.call_close)
        self._state = _State.CALL
        return True

    def _release_content(self) -> None:
        """Pass on content, less an end that may begin a call or the white space before one."""
        opening = self._syntax.call_open
        keep = max(len_of_overlap(self._pending, "\n" + opening), len_of_overlap(self._pending, opening))
        free = self._pending[: len(self._pending) - keep]
        if self._is_blank and not free.strip():
            return
        self._add_content(free)
        self._pending = self._pending[len(free) :]

    def _step_call(self) -> bool:
        end = self._scanner.find(self._pending)
        if end is None:
            return False
        body = self._pending[:end]
        self._pending = self._pending[end + len(self._syntax.call_close) :]
        self._state = _State.CONTENT
        call = read_call(body)
        if isinstance(call, CallText):
            call_id = f"call_{self._id_prefix}{len(self._calls)}"
            self._calls.append(ToolCall(id=call_id, name=call.name, arguments=call.arguments))
            self._is_blank = True
        else:
            self._note(call)
            self._add_content(f"{self._between}{self._syntax.call_open}{body}{self._syntax.call_close}")
        return True

    def _end(self) -> None:
        """Place what is still pending when no more text comes."""
        if self._state is _State.CALL:
            self._note(ParseProblem.TOOL_CALL_UNCLOSED)
            self._add_content(f"{self._between}{self._syntax.call_open}{self._pending}")
        elif self._state in _REASONING_STATES:
            self._note(ParseProblem.REASONING_UNCLOSED)
            self._add_reasoning(self._pending)
        elif self._state is not _State.AFTER_REASONING and not self._is_trailing_blank():
            self._add_content(self._pending)
        self._pending = ""

    def _is_trailing_blank(self) -> bool:
        return bool(self._calls) and self._is_blank and not self._pending.strip()

    def _note(self, problem: ParseProblem) -> None:
        """The first problem of a reply is the one that is told."""
        if self._problem is ParseProblem.NONE:
            self._problem = problem

    def _add_content(self, text: str) -> None:
        if text:
            self._is_blank = self._is_blank and not text.strip()
            self._content.append(text)
            self._new_content.append(text)

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._reasoning.append(text)
            self._new_reasoning.append(text)

    def _take_delta(self) -> ReplyDelta:
        told, self._num_calls_told = self._num_calls_told, len(self._calls)
        delta = ReplyDelta(
            content="".join(self._new_content),
            reasoning="".join(self._new_reasoning),
            tool_calls=tuple(_call_deltas(told, self._calls[told:])),
        )
        self._new_content, self._new_reasoning = [], []
        return delta


def _call_deltas(first: int, calls: Iterable[ToolCall]) -> Iterable[ToolCallDelta]:
    """Whole calls, each as the one piece that it is told in."""
    for index, call in enumerate(calls, start=first):
        yield ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
