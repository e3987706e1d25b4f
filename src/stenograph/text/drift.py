"""Drift: where a line's ids are not those of its messages by the chat template.

Owns the definition of drift and its classes. The line is the record: nothing here changes an id. Pure, and may be
called from any thread; renders a whole line, so it belongs on the pool. docs/drift.md says how to read a report.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.drift import Drift, DriftClass, DriftReport
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import token_ids
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.renderer import Renderer
from stenograph.text.reply_syntax import ReasoningMarks

_TAIL_TOKENS = 64
"""Number of ids of a line's end shown to a bridge; more than any family's closing has."""

_LEAD_CHARS = 24
_MAX_CHARS = 160
_MAX_IDS = 12


def find_drift(
    renderer: Renderer,
    *,
    ids: Sequence[int],
    sampled_spans: Sequence[tuple[int, int]],
    messages: Sequence[Message],
    tools: Sequence[Tool],
    kwargs: Mapping[str, object],
) -> DriftReport:
    """Compare a line's ids [T] with the template's rendering of its messages, replies included.

    `sampled_spans` are the sampled tokens, half-open over `ids`, ascending. Both sides are compared as they stand with
    the next turn opened: the bridge's own close of the last reply is no drift, be it a newline or the end token of a
    reply cut off. A line ends with a reply, as committed lines do: of one that ends with a question, a reply with
    reasoning although its prompt closed the reasoning may count as forbidden. Raises ValueError for spans outside
    `ids`, and nothing for messages: a template's refusal is an outcome.
    """
    is_sampled = _mask(len(ids), sampled_spans)
    try:
        expected = renderer.render(messages, tools, kwargs)
        line, num_kept = _opened(renderer, ids, messages, tools, kwargs)
    except UnrenderableMessage as error:
        return DriftReport(unrenderable=str(error))
    except RecursionError:
        return DriftReport(unrenderable="A tool call's arguments are nested too deeply to be shown.")
    if line == expected:
        return DriftReport()
    comparison = _Comparison(
        tokenizer=renderer.tokenizer,
        line=line,
        expected=expected,
        is_sampled=is_sampled[:num_kept].ljust(len(line), b"\0"),
        replies_at=tuple(min(start, num_kept) for start, _ in sampled_spans),
        num_recorded=num_kept,
        marks=renderer.family.syntax.reasoning,
        reply_frame=tuple(renderer.tokenizer.added_tokens[token] for token in renderer.family.reply_frame),
    )
    return DriftReport(drifts=tuple(comparison.drifts()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Two different id sequences. `is_sampled` has a byte for each id of `line`; the first `num_recorded` are real.

    `replies_at` is where each reply begins, including replies with nothing left. `marks` stand around reasoning; a
    reply may lack control tokens of the `reply_frame`.
    """

    tokenizer: Tokenizer
    line: "array[int]"
    expected: "array[int]"
    is_sampled: bytes
    replies_at: tuple[int, ...]
    num_recorded: int
    marks: ReasoningMarks | None
    reply_frame: tuple[int, ...]

    def drifts(self) -> list[Drift]:
        """All drifts in order; if the numbers of control tokens differ, this drift alone: nothing else is aligned."""
        pairs = self._pairs()
        if pairs is None:
            return [self._count_drift()]
        found: list[Drift | None] = []
        at, expected_at = 0, 0
        segment = 0
        for end, expected_end, control in [*pairs, (len(self.line), len(self.expected), -1)]:
            found.append(self._text_drift(segment, (at, end), (expected_at, expected_end)))
            if control >= 0:
                found.append(self._type_drift(2 * control + 1, end, expected_end))
            at, expected_at, segment = end + 1, expected_end + 1, 2 * control + 2
        return [drift for drift in found if drift is not None]

    def _pairs(self) -> list[tuple[int, int, int]] | None:
        """Positions of matching control tokens, and the number of each among the template's; None if there are more or
        fewer than there may be.

        A sampled control token without a place in the template is part of the reply's text, not of the frame.
        """
        line, expected = self._controls(self.line), self._controls(self.expected)
        ids, expected_ids = [self.line[i] for i in line], [self.expected[i] for i in expected]
        may_skip = [self.is_sampled[i] for i in line]
        places = _placed(ids, expected_ids, may_skip)
        if places is None and self.reply_frame:
            may_lack = sum(1 << i for i, id_ in enumerate(expected_ids) if id_ in self.reply_frame)
            places = _placed(ids, expected_ids, may_skip, may_lack=may_lack, in_reply=self._in_reply(line))
            lacking = [id_ for id_, at in zip(expected_ids, places or (), strict=False) if at is None]
            if lacking.count(self.reply_frame[0]) != lacking.count(self.reply_frame[-1]):
                places = None  # whole messages may be lacking, not the end of one
        if places is not None:
            return [(line[at], expected[i], i) for i, at in enumerate(places) if at is not None]
        return list(zip(line, expected, range(len(line)), strict=True)) if len(line) == len(expected) else None

    def _in_reply(self, controls: Sequence[int]) -> list[bool]:
        """For each control token of the line, and for its end, whether a reply stands between it and the one before."""
        found: list[bool] = []
        before = -1
        for at in [*controls, len(self.line)]:
            begins = self._replies_before(at + 1) > self._replies_before(before + 1)
            found.append(begins or any(self.is_sampled[max(before, 0) : at + 1]))
            before = at
        return found

    def _controls(self, ids: "array[int]") -> list[int]:
        return [position for position, id_ in enumerate(ids) if id_ in self.tokenizer.special_ids]

    def _count_drift(self) -> Drift:
        line, expected = self._controls(self.line), self._controls(self.expected)
        start, end, expected_start, expected_end = _difference(self.line, self.expected)
        num_before = sum(position < expected_start for position in expected)
        detail = f"{len(line)} control tokens where the template writes {len(expected)}"
        texts = self._texts((start, end), (expected_start, expected_end), start)
        return self._drift(
            DriftClass.SPECIAL_TOKEN_COUNT, 2 * num_before + (expected_start in expected), texts, detail, (start, end)
        )

    def _type_drift(self, index: int, at: int, expected_at: int) -> Drift | None:
        actual_id, expected_id = self.line[at], self.expected[expected_at]
        if actual_id == expected_id:
            return None
        texts = (self.tokenizer.token_text(expected_id), self.tokenizer.token_text(actual_id))
        detail = f"token {actual_id} where the template writes {expected_id}"
        return self._drift(DriftClass.SPECIAL_TOKEN_TYPE, index, texts, detail, (at, at + 1))

    def _text_drift(self, index: int, span: tuple[int, int], expected_span: tuple[int, int]) -> Drift | None:
        actual_ids, expected_ids = self.line[slice(*span)], self.expected[slice(*expected_span)]
        if actual_ids == expected_ids:
            return None
        start, end, expected_start, expected_end = _difference(actual_ids, expected_ids)
        where = (span[0] + start, span[0] + end)
        expected_text = self.tokenizer.decode(expected_ids)
        if self.tokenizer.decode(actual_ids) == expected_text:
            # Of the same text, only pieces of a broken character can be missing: they are those of a neighbour.
            touched = where if start < end else (max(span[0], where[0] - 1), where[0] + 1)
            by_model = any(self.is_sampled[slice(*touched)])
            ids, instead = actual_ids[start:end], expected_ids[expected_start:expected_end]
            detail = f"same text, other tokens: {_listed(ids)} where the template has {_listed(instead)}"
        else:
            by_model = self._keeps_frame(span, expected_text) and not self._lacks_prompt(span, expected_text)
            detail = "the template writes the reply otherwise" if by_model else "the template writes another text here"
        kind = DriftClass.ASSISTANT_TEXT if by_model else DriftClass.NON_ASSISTANT_TEXT
        return self._drift(kind, index, self._texts(span, expected_span, where[0]), detail, where)

    def _keeps_frame(self, span: tuple[int, int], expected_text: str) -> bool:
        """Whether `expected_text` differs from the line's by replies only: all other ids' text is in it, in order.

        A reply without a sampled id, or with its control token alone, is an empty one. So is the text of one cut off,
        or ended, after a control token of its own frame.
        """
        start, end = span
        is_in_reply = start > 0 and self.is_sampled[start - 1] and self.line[start - 1] in self.reply_frame[:-1]
        if not is_in_reply and not any(self.is_sampled[start : end + 1]) and self._first_reply(span) is None:
            return False
        at = 0
        for first, last in self._frame_runs(span):
            text = self.tokenizer.decode(self.line[first:last])
            if first == start:
                if self._is_odd(span) and not expected_text.startswith(text):
                    text = text.removesuffix(self._prompt())
                found = 0 if expected_text.startswith(text) else -1
            elif last == end:
                found = len(expected_text) - len(text) if expected_text.endswith(text) else -1
            else:
                found = expected_text.find(text, at)
            if found < at:
                return False
            at = found + len(text)
        return True

    def _frame_runs(self, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Runs of unsampled ids in the span; an empty reply ends one and begins another."""
        start, end = span
        first = start
        cuts = set(self.replies_at[self._replies_before(start) : self._replies_before(end + 1)])
        for at in range(start, end + 1):
            if at > first and (at == end or self.is_sampled[at] or at in cuts):
                yield first, at
                first = at
            if at < end and self.is_sampled[at]:
                first = at + 1

    def _replies_before(self, position: int) -> int:
        return bisect_left(self.replies_at, position)

    def _first_reply(self, span: tuple[int, int]) -> int | None:
        """Where the first reply of the span begins, if one does."""
        number = self._replies_before(span[0])
        at = self.replies_at[number] if number < len(self.replies_at) else span[1] + 1
        return at if at <= span[1] else None

    def _is_odd(self, span: tuple[int, int]) -> bool:
        """Whether a marker of reasoning was sampled in the span: the template may move it, and rewrite its prompt."""
        sampled = [self.line[at] for at in range(*span) if self.is_sampled[at]]
        if self.marks is None or not sampled:
            return False
        text = self.tokenizer.decode(token_ids(sampled))
        return self.marks.open in text or self.marks.close in text

    def _prompt(self) -> str:
        """The template's text after a prompt's last control token, taken from the next turn's prompt."""
        prompt_at = len(self.line)
        while prompt_at > self.num_recorded and self.line[prompt_at - 1] not in self.tokenizer.special_ids:
            prompt_at -= 1
        return self.tokenizer.decode(self.line[prompt_at:])

    def _lacks_prompt(self, span: tuple[int, int], expected_text: str) -> bool:
        """Whether the first reply here, written by the template as it was sampled, stands after less than its prompt.

        The prompt is that of the next turn, after its last control token. Without this check, a gap in a prompt would
        pass for an addition to the reply by the template.
        """
        first = self._first_reply(span)
        if first is None or any(self.is_sampled[span[0] : first]):
            return False  # a reply that began before goes on here
        before, rest = (self.tokenizer.decode(self.line[slice(*part)]) for part in ((span[0], first), (first, span[1])))
        return expected_text.endswith(rest) and not before.endswith(self._prompt())

    def _texts(self, span: tuple[int, int], expected_span: tuple[int, int], differs_at: int) -> tuple[str, str]:
        """Expected and actual text of the spans, cut around the first different token."""
        num_same = len(self.tokenizer.decode(self.line[span[0] : differs_at]))
        expected = self.tokenizer.decode(self.expected[slice(*expected_span)])
        return _cut(expected, num_same), _cut(self.tokenizer.decode(self.line[slice(*span)]), num_same)

    def _drift(
        self, kind: DriftClass, index: int, texts: tuple[str, str], detail: str, where: tuple[int, int]
    ) -> Drift:
        return Drift(
            type=kind,
            segment_index=index,
            expected_text=texts[0],
            actual_text=texts[1],
            detail=detail,
            start=min(where[0], self.num_recorded),
            end=min(where[1], self.num_recorded),
        )


def _mask(num_ids: int, spans: Sequence[tuple[int, int]]) -> bytes:
    mask = bytearray(num_ids)
    before = 0
    for start, end in spans:
        if not before <= start <= end <= num_ids:
            raise ValueError(f"the span [{start}, {end}) is out of order, or not within {num_ids} ids")
        mask[start:end] = b"\1" * (end - start)
        before = end
    return bytes(mask)


def _opened(
    renderer: Renderer,
    ids: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[Tool],
    kwargs: Mapping[str, object],
) -> tuple["array[int]", int]:
    """The line with the prompt of a next turn, as the bridge would write it, and how many of its ids are the line's.

    A last stop token is left out if it opens a message still to come: it belongs to that message.
    """
    line = token_ids(ids)
    if not messages or messages[-1].role is not Role.ASSISTANT:
        return line, len(line)
    stops = {renderer.tokenizer.added_tokens[token] for token in renderer.family.opening_stops}
    if line and line[-1] in stops:
        line.pop()
    bridge = renderer.bridge(line[-_TAIL_TOKENS:], messages[-1], (), tools, kwargs)
    num_kept = len(line) - bridge.num_trimmed
    return line[:num_kept] + bridge.ids, num_kept


def _placed(
    line: Sequence[int],
    expected: Sequence[int],
    may_skip: Sequence[int],
    *,
    may_lack: int = 0,
    in_reply: Sequence[bool] = (),
) -> list[int | None] | None:
    """Places in `line` of each of `expected`, if only ids marked in `may_skip` are left over; the last such places.

    Bit j of a state is set where the line so far can be read as the first j of `expected`. Where `in_reply`, the ids of
    `expected` with their bit set in `may_lack` may be lacking: their place is None.
    """
    if list(line) == list(expected):
        return list(range(len(line)))
    places: dict[int, int] = {}
    for position, id_ in enumerate(expected):
        places[id_] = places.get(id_, 0) | 1 << position

    def lacking(state: int, number: int) -> int:
        while may_lack and in_reply[number] and (more := state | (state & may_lack) << 1) != state:
            state = more
        return state

    read = [1]  # before anything is lacking
    states = [lacking(1, 0)]
    for number, (id_, skip) in enumerate(zip(line, may_skip, strict=True), start=1):
        state = states[-1]
        read.append((state & places.get(id_, 0)) << 1 | (state if skip else 0))
        states.append(lacking(read[-1], number))
    at = len(expected)
    if not states[-1] >> at & 1:
        return None
    found: list[int | None] = [None] * len(expected)
    for position in range(len(line), -1, -1):
        while not read[position] >> at & 1:
            at -= 1
        if position and at and line[position - 1] == expected[at - 1] and states[position - 1] >> (at - 1) & 1:
            at -= 1
            found[at] = position - 1
    return found


def _difference(a: "array[int]", b: "array[int]") -> tuple[int, int, int, int]:
    """The differing middle of two sequences, without their common beginning and end: [start, end) in each."""
    shorter = min(len(a), len(b))
    start = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    num_last = next((i for i in range(shorter - start) if a[-1 - i] != b[-1 - i]), shorter - start)
    return start, len(a) - num_last, start, len(b) - num_last


def _cut(text: str, around: int) -> str:
    start = max(0, around - _LEAD_CHARS)
    end = start + _MAX_CHARS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _listed(ids: "array[int]") -> str:
    shown = ", ".join(map(str, ids[:_MAX_IDS]))
    return f"[{shown}, … {len(ids)} in all]" if len(ids) > _MAX_IDS else f"[{shown}]"
