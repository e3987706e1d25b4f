"""Drift: where a line's ids are not what the chat template would make of its messages.

Owns what counts as drift and in which class it falls. The line is the record: nothing here changes an id. Pure, and
may be called from any thread; renders a whole line, so it belongs on the pool. docs/drift.md says how to read a report.
"""

import enum
import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import token_ids
from stenograph.render.renderer import Renderer
from stenograph.render.tokenizer import Tokenizer

_TAIL_TOKENS = 64
"""Ids of a line's end that are shown to a bridge; more than any family's closing has."""

_LEAD_CHARS = 24
_MAX_CHARS = 160
_MAX_IDS = 12


class DriftClass(enum.StrEnum):
    """What kind of difference. The values are those of miles' `tito_session_mismatch`."""

    SPECIAL_TOKEN_COUNT = "special_token_count"
    """There are more or fewer control tokens."""
    SPECIAL_TOKEN_TYPE = "special_token_type"
    """A control token in the place of another."""
    NON_ASSISTANT_TEXT = "non_assistant_text"
    """Other tokens between two control tokens, and not because of what was sampled there."""
    ASSISTANT_TEXT = "assistant_text"
    """The model wrote its reply with other tokens than the template writes it with. Tolerated."""


FORBIDDEN = frozenset(DriftClass) - {DriftClass.ASSISTANT_TEXT}
"""What only a bug, or a template that is not append-only, makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One difference. Ids `[start, end)` of the line are concerned; of none if the line lacks what the template writes.

    `segment_index` counts texts and control tokens in turn, as the template writes them: 2k is the text before control
    token k (it may be empty), 2k + 1 the token. The texts are cut, around the difference.
    """

    type: DriftClass
    segment_index: int
    expected_text: str
    actual_text: str
    detail: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """The drift of one line, in its order. `unrenderable` is why nothing could be compared, if so."""

    drifts: tuple[Drift, ...] = ()
    unrenderable: str | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the line is the template's, id by id."""
        return not self.drifts and self.unrenderable is None

    @property
    def is_forbidden(self) -> bool:
        """Whether there is drift that no model can be blamed for."""
        return any(drift.type in FORBIDDEN for drift in self.drifts)


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

    `sampled_spans` are the sampled tokens, half-open over `ids`, ascending. Both sides are compared as they stand
    with the next turn opened: what the bridge would add to close the last reply is no drift, be it a newline or the
    end token of a reply that was cut off. Raises ValueError for spans that are not in `ids`, and nothing for
    messages: what the template refuses is an outcome.
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
        num_recorded=num_kept,
    )
    return DriftReport(drifts=tuple(comparison.drifts()))


def to_json(report: DriftReport) -> list[dict[str, object]] | None:
    """The report as plain values: `[]` is clean, None is not compared."""
    if report.unrenderable is not None:
        return None
    return [
        {
            "type": drift.type.value,
            "segment_index": drift.segment_index,
            "expected_text": drift.expected_text,
            "actual_text": drift.actual_text,
            "detail": drift.detail,
            "start": drift.start,
            "end": drift.end,
        }
        for drift in report.drifts
    ]


def num_by_class(report: DriftReport) -> dict[DriftClass, int]:
    """How many drifts of each class, those of which there are none included."""
    return {kind: sum(drift.type is kind for drift in report.drifts) for kind in DriftClass}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Two id sequences that differ. `is_sampled` has a byte for each id of `line`, of which `num_recorded` are real."""

    tokenizer: Tokenizer
    line: "array[int]"
    expected: "array[int]"
    is_sampled: bytes
    num_recorded: int

    def drifts(self) -> list[Drift]:
        """All drifts in order; where the numbers of control tokens differ, that one alone: nothing else is aligned."""
        pairs = self._pairs()
        if pairs is None:
            return [self._count_drift()]
        found: list[Drift | None] = []
        at, expected_at = 0, 0
        for index, (end, expected_end) in enumerate([*pairs, (len(self.line), len(self.expected))]):
            found.append(self._text_drift(2 * index, (at, end), (expected_at, expected_end)))
            if index < len(pairs):
                found.append(self._type_drift(2 * index + 1, end, expected_end))
            at, expected_at = end + 1, expected_end + 1
        return [drift for drift in found if drift is not None]

    def _pairs(self) -> list[tuple[int, int]] | None:
        """Positions of the control tokens that stand for each other, or None if their numbers differ.

        A sampled control token that the template has no place for is part of the reply's text, not of the frame.
        """
        line, expected = self._controls(self.line), self._controls(self.expected)
        places = _placed(
            [self.line[i] for i in line], [self.expected[i] for i in expected], [self.is_sampled[i] for i in line]
        )
        if places is not None:
            return [(line[place], i) for place, i in zip(places, expected, strict=True)]
        return list(zip(line, expected, strict=True)) if len(line) == len(expected) else None

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
        """Whether `expected_text` differs from the line's by replies only: all that was not sampled is in it, in order.

        A reply of which nothing but its control token was sampled is an empty one before that token.
        """
        start, end = span
        if not any(self.is_sampled[start : end + 1]):
            return False
        runs = [[*run] for _, run in itertools.groupby(range(start, end), key=self.is_sampled.__getitem__)]
        at = 0
        for run in runs:
            if self.is_sampled[run[0]]:
                continue
            text = self.tokenizer.decode(self.line[run[0] : run[-1] + 1])
            if run[0] == start:
                found = 0 if expected_text.startswith(text) else -1
            elif run[-1] == end - 1:
                found = len(expected_text) - len(text) if expected_text.endswith(text) else -1
            else:
                found = expected_text.find(text, at)
            if found < at:
                return False
            at = found + len(text)
        return True

    def _lacks_prompt(self, span: tuple[int, int], expected_text: str) -> bool:
        """Whether the first reply here, written by the template as it was sampled, stands after less than its prompt.

        The prompt is the one that opens the next turn, after its last control token. Without this, what a prompt lacks
        would pass for something that the template adds to the reply.
        """
        prompt_at = len(self.line)
        while prompt_at > self.num_recorded and self.line[prompt_at - 1] not in self.tokenizer.special_ids:
            prompt_at -= 1
        prompt = self.tokenizer.decode(self.line[prompt_at:])
        first = self.is_sampled.index(1, span[0])
        before, rest = (self.tokenizer.decode(self.line[slice(*part)]) for part in ((span[0], first), (first, span[1])))
        return expected_text.endswith(rest) and not before.endswith(prompt)

    def _texts(self, span: tuple[int, int], expected_span: tuple[int, int], differs_at: int) -> tuple[str, str]:
        """Expected and actual text of the spans, cut around the first token that differs."""
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

    A last stop token that is the opener of a message which has not come is left out: it is another message's.
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


def _placed(line: Sequence[int], expected: Sequence[int], may_skip: Sequence[int]) -> list[int] | None:
    """Where in `line` each of `expected` is found, if only ids that may be skipped are left over; the last such places.

    Bit j of a state is set where the line so far can be read as the first j of `expected`.
    """
    if list(line) == list(expected):
        return list(range(len(line)))
    places: dict[int, int] = {}
    for position, id_ in enumerate(expected):
        places[id_] = places.get(id_, 0) | 1 << position
    states = [1]
    for id_, skip in zip(line, may_skip, strict=True):
        state = states[-1]
        states.append((state & places.get(id_, 0)) << 1 | (state if skip else 0))
    at = len(expected)
    if not states[-1] >> at & 1:
        return None
    found: list[int] = []
    for position in range(len(line) - 1, -1, -1):
        if at and line[position] == expected[at - 1] and states[position] >> (at - 1) & 1:
            at -= 1
            found.append(position)
    found.reverse()
    return found


def _difference(a: "array[int]", b: "array[int]") -> tuple[int, int, int, int]:
    """What is left of two sequences without what they begin and end with alike: [start, end) in each."""
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
