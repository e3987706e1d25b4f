"""Logical and effective ids of a line with media. Pure; loaded by turns with media alone.

A line's logical ids have one placeholder for each medium; its effective ids are those of the model's forward pass, with
each placeholder replaced by the expansion that the engine reported. Owns the way from one to the other and the laws
between them. Knows neither an engine nor how a placeholder is spelled.
"""

from array import array
from collections.abc import Sequence

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.messages import Expansion
from stenograph.core.types import EffectivePrompt, MediaRange, Prompt, token_ids


def effective_ids(logical: "array[int]", expansions: Sequence[Expansion]) -> "array[int]":
    """The ids [T'] of logical ids [T], each placeholder replaced. `expansions` are in order of their positions."""
    ids, before = token_ids(), 0
    for one in expansions:
        ids.extend(logical[before : one.position])
        ids.extend(one.ids)
        before = one.position + 1
    ids.extend(logical[before:])
    return ids


def ranges(expansions: Sequence[Expansion]) -> tuple[MediaRange, ...]:
    """The places of the expansions among the effective ids."""
    found: list[MediaRange] = []
    added = 0
    for one in expansions:
        found.append(MediaRange(start=one.position + added, length=len(one.ids)))
        added += len(one.ids) - 1
    return tuple(found)


def runs_of(effective: "array[int]", placeholder: int) -> tuple[MediaRange, ...]:
    """The ranges where the placeholder's id repeats: those of a model whose expansions are nothing else, apart by at
    least one other id."""
    found: list[MediaRange] = []
    start = None
    for index, id_ in enumerate(effective):
        if id_ == placeholder:
            start = index if start is None else start
        elif start is not None:
            found.append(MediaRange(start=start, length=index - start))
            start = None
    if start is not None:
        found.append(MediaRange(start=start, length=len(effective) - start))
    return tuple(found)


def new_expansions(prompt: Prompt, effective: EffectivePrompt) -> tuple[Expansion, ...]:
    """The expansions of the media that a prompt brings to its line, of its engine's report.

    Raises UpstreamInvalid (`prompt_agrees`): the report, its ranges collapsed, is not the logical prompt, or a medium
    of the kept line has another expansion than it had.
    """
    media = prompt.media
    if len(effective.ranges) != len(media):
        raise _disagrees(f"the engine replaced {len(effective.ranges)} placeholders of {len(media)}")
    logical, ids = prompt.ids, token_ids(effective.ids)
    before = at = 0
    found: list[Expansion] = []
    for number, (one, placed) in enumerate(zip(media, effective.ranges, strict=True)):
        end = placed.start + placed.length
        if not at <= placed.start < end <= len(ids):
            raise _disagrees(f"range {number} is [{placed.start}, {end}), after {at} and within {len(ids)} ids")
        if ids[at : placed.start] != logical[before : one.position]:
            raise _disagrees(f"the ids before placeholder {number}, at {one.position}, are not those that were sent")
        expansion = ids[placed.start : end]
        if one.recorded is None:
            found.append(Expansion(position=one.position, ref=one.item.ref, ids=expansion))
        elif one.recorded != expansion:
            raise _disagrees(
                f"placeholder {number} stands for {len(expansion)} ids, not for the {len(one.recorded)} recorded"
            )
        before, at = one.position + 1, end
    if ids[at:] != logical[before:]:
        raise _disagrees("the ids after the last placeholder are not those that were sent")
    return tuple(found)


def _disagrees(what: str) -> UpstreamInvalid:
    return UpstreamInvalid("prompt_agrees", what)
