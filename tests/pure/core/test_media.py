"""Logical and effective ids: one makes the other, and a report that does not is refused."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.media import (
    effective_ids,
    new_expansions,
    ranges,
    runs_of,
)
from stenograph.core.messages import Expansion, MediaItem, MediaKind, MediaRef, Message, PlacedMedia, Role
from stenograph.core.types import EffectivePrompt, MediaRange, Prompt, PromptMedia, token_ids

PLACEHOLDER = 7
REF = MediaRef(sha256="ab" * 32, kind=MediaKind.IMAGE, media_type="image/png", num_bytes=3)
TEXT = st.lists(st.integers(0, 6), max_size=5)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
LINES = st.tuples(TEXT, st.lists(st.tuples(IDS, TEXT), max_size=5))
"""A line: its text before the first medium, then each medium's expansion and the text after it."""


def logical_and_effective(
    line: tuple[list[int], list[tuple[list[int], list[int]]]],
) -> "tuple[array[int], array[int], tuple[Expansion, ...]]":
    first, others = line
    logical, effective = token_ids(first), token_ids(first)
    expansions: list[Expansion] = []
    for ids, after in others:
        expansions.append(Expansion(position=len(logical), ref=REF, ids=token_ids(ids)))
        logical.extend([PLACEHOLDER, *after])
        effective.extend([*ids, *after])
    return logical, effective, tuple(expansions)


def prompt_of(logical: "array[int]", expansions: tuple[Expansion, ...], num_recorded: int = 0) -> Prompt:
    item = MediaItem(ref=REF, base64=b"AAAA")
    media = [
        PromptMedia(position=one.position, item=item, recorded=one.ids if number < num_recorded else None)
        for number, one in enumerate(expansions)
    ]
    return replace(Prompt.of(logical), media=tuple(media))


@given(LINES)
def test_effective_ids_are_the_logical_ones_with_each_placeholder_replaced(
    line: tuple[list[int], list[tuple[list[int], list[int]]]],
) -> None:
    logical, effective, expansions = logical_and_effective(line)
    assert effective_ids(logical, expansions) == effective
    found = ranges(expansions)
    assert [effective[one.start : one.start + one.length] for one in found] == [one.ids for one in expansions]


@given(LINES, st.integers(0, 5))
def test_a_report_that_collapses_to_the_logical_prompt_gives_the_new_expansions(
    line: tuple[list[int], list[tuple[list[int], list[int]]]], num_recorded: int
) -> None:
    logical, effective, expansions = logical_and_effective(line)
    report = EffectivePrompt(ids=effective, ranges=ranges(expansions))
    assert new_expansions(prompt_of(logical, expansions, num_recorded), report) == expansions[num_recorded:]


@given(LINES.filter(lambda line: bool(line[1])), st.data())
def test_a_report_with_any_other_id_or_range_is_refused(
    line: tuple[list[int], list[tuple[list[int], list[int]]]], data: st.DataObject
) -> None:
    logical, effective, expansions = logical_and_effective(line)
    prompt = prompt_of(logical, expansions, len(expansions))
    true = EffectivePrompt(ids=effective, ranges=ranges(expansions))
    ids = token_ids(effective)
    at = data.draw(st.integers(0, len(ids) - 1))
    ids[at] += 1
    number = data.draw(st.integers(0, len(expansions) - 1))
    one = true.ranges[number]
    change = data.draw(st.sampled_from([(-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (1, -1)]))
    shifted = list(true.ranges)
    shifted[number] = MediaRange(start=one.start + change[0], length=one.length + change[1])
    for false in (
        replace(true, ids=ids),
        replace(true, ids=effective[:-1]),
        replace(true, ids=effective + effective[:1]),
        replace(true, ranges=tuple(shifted)),
        replace(true, ranges=true.ranges[1:]),
        replace(true, ranges=(*true.ranges, true.ranges[-1])),
    ):
        with pytest.raises(UpstreamInvalid, match="prompt_agrees"):
            new_expansions(prompt, false)


def test_runs_of_a_placeholder_are_the_ranges_of_a_model_that_repeats_it() -> None:
    assert runs_of(token_ids([1, 7, 7, 2, 7, 3, 7, 7, 7]), 7) == (
        MediaRange(start=1, length=2),
        MediaRange(start=4, length=1),
        MediaRange(start=6, length=3),
    )
    assert runs_of(token_ids(), 7) == ()


def test_media_stand_in_a_users_or_a_tools_message_in_order_and_within_its_content() -> None:
    both = (PlacedMedia(at=0, ref=REF), PlacedMedia(at=3, ref=REF))
    assert Message(role=Role.USER, content="two", media=both).media == both
    assert Message(role=Role.TOOL, content=None, media=both[:1], tool_call_id="a").media == both[:1]
    with pytest.raises(ValueError, match="a assistant message has no media"):
        Message(role=Role.ASSISTANT, content="two", media=both)
    for media in (both[::-1], (PlacedMedia(at=4, ref=REF),), (PlacedMedia(at=-1, ref=REF),)):
        with pytest.raises(ValueError, match="of a content of 3 characters"):
            Message(role=Role.USER, content="two", media=media)
