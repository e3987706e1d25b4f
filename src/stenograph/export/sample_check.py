"""Checks the samples of a file against a store: ids, mask, log-probabilities, supports, weights, turns. Pure.

Computed from the turns themselves, not by making the samples again: an error of the export is a fault here.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stenograph.core.logprobs import Logprobs, known_logprobs
from stenograph.core.media import effective_ids, ranges
from stenograph.core.messages import Expansion
from stenograph.core.support import supports
from stenograph.core.types import LogprobsKind
from stenograph.export.custody import DigestChain
from stenograph.export.sample_files import FiledMedium, FiledSample, FiledTurn
from stenograph.trajectory.turn import Node

Values = NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTurns:
    """A session as a store has it: every turn ever committed and the number of its row, by its node's id.

    `standing` are the ids of the turns not replaced by a later one.
    """

    nodes: Mapping[int, Node]
    rows: Mapping[int, int]
    standing: frozenset[int]
    chain: DigestChain


@dataclass(slots=True, kw_only=True)
class Trained:
    """The turns trained so far by the samples of files, by session and node id, each with the first such sample."""

    by_turn: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One turn of a sample, beside its turn in the store. Places are in the sample's tokens."""

    row: FiledTurn
    digest: str
    is_trained: bool
    node: Node

    @property
    def num_sampled(self) -> int:
        return self.row.end - self.row.start


def sample_faults(sample: FiledSample, kept: KeptTurns, trained: Trained, *, name: str) -> Iterator[str]:
    """The differences between a sample and the turns it names; none if it agrees with the store.

    `name` is the sample's, for the report on another sample of the same turn.
    """
    misfit = _misfit(sample)
    if misfit is not None:
        yield misfit
        return
    assert sample.custody is not None, "one without is a misfit"
    parent: Node | None = None
    places: list[_Place] = []
    for index, (row, digest) in enumerate(zip(sample.turns, sample.custody.digests, strict=True)):
        node = kept.nodes.get(row.node_id)
        if node is None:
            yield f"turn {row.node_id} is not in the session"
            return
        if row.node_id not in kept.standing:
            yield f"turn {node.id} (row {kept.rows[node.id]}) was replaced by a later turn: no sample has it any more"
        if node.parent is not parent:
            yield f"turn {node.id} {_stands(node.parent)} in the store, and {_stands(parent)} in the sample"
            return
        is_trained = row.node_id in sample.custody.trained
        places.append(_Place(row=row, digest=digest, is_trained=is_trained, node=node))
        yield from _length_faults(places[-1], sample.turns[index + 1 :], kept)
        parent = node
    for place in places:
        for fault in _turn_faults(sample, place, kept.chain):
            yield f"turn {place.node.id} (row {kept.rows[place.node.id]}): {fault}"
        yield from _taken(place, trained, sample.custody.session_id, name)
    yield from _media_faults(sample, places)


def _misfit(sample: FiledSample) -> str | None:
    """The reason a sample cannot be laid beside turns, None if it can."""
    num_tokens, num_shown = len(sample.tokens), sample.response_length
    lengths = {len(sample.loss_mask), len(sample.rollout_log_probs)}
    lengths.update(len(row) for row in (sample.raw_log_probs, sample.sampling_log_probs) if row is not None)
    if lengths != {num_shown} or not 0 <= num_shown <= num_tokens:
        return f"its lengths disagree: {num_tokens} tokens, a response of {num_shown}, and {sorted(lengths)} over it"
    if sample.custody is None:
        return "it does not say which session and turns it is made of (metadata.custody)"
    if not sample.turns or len(sample.turns) != len(sample.custody.digests):
        return f"it has {len(sample.turns)} turns, and digests of {len(sample.custody.digests)}"
    end = 0
    for row in sample.turns:
        if not end == row.prompt_start <= row.start <= row.end:
            return f"turn {row.node_id} begins at token {row.prompt_start}, the one before it ends at {end}"
        end = row.end
    if end != num_tokens or sample.turns[0].start != num_tokens - num_shown:
        return f"its turns end at token {end} and the first prompt at {sample.turns[0].start}, of {num_tokens} tokens"
    return None


def _stands(parent: Node | None) -> str:
    return "is the first" if parent is None else f"follows turn {parent.id}"


def _length_faults(place: _Place, later: Sequence[FiledTurn], kept: KeptTurns) -> Iterator[str]:
    """A turn is in its line whole, but for ids replaced by the next one; the last may be cut."""
    turn, row = place.node.turn, place.row
    num_sampled, following = len(turn.sampled.ids), kept.nodes.get(later[0].node_id) if later else None
    if following is not None:
        num_sampled -= following.turn.num_trimmed
    found, num_new = row.start - row.prompt_start, len(_new_ids(place.node))
    if found != num_new:
        yield f"turn {place.node.id}: it adds {found} prompt tokens, the store has {num_new}"
    if place.num_sampled > num_sampled or (following is not None and place.num_sampled != num_sampled):
        yield f"turn {place.node.id}: it has {place.num_sampled} sampled tokens, the store {num_sampled}"


def _new_ids(node: Node) -> "array[int]":
    """The new prompt ids of a turn, effective ones."""
    return effective_ids(node.turn.new_prompt_ids, _expansions(node))


def _expansions(node: Node) -> list[Expansion]:
    """The expansions of a turn's media, at their positions among its new prompt ids."""
    turn = node.turn
    first = node.num_tokens - len(turn.sampled.ids) - len(turn.new_prompt_ids)
    return [replace(one, position=one.position - first) for one in turn.media]


def _media_faults(sample: FiledSample, places: Sequence[_Place]) -> Iterator[str]:
    """The first row of a medium to differ from the store's."""
    kept: list[FiledMedium] = []
    for place in places:
        media, first = _expansions(place.node), place.row.prompt_start
        kept += [
            FiledMedium(one.ref.sha256, one.ref.kind, first + placed.start, placed.length)
            for one, placed in zip(media, ranges(media), strict=True)
        ]
    for number, (found, wanted) in enumerate(zip_longest(sample.media, kept)):
        if found != wanted:
            yield f"media row {number} is {_shown(found)}, the store has {_shown(wanted)}"
            return


def _shown(row: FiledMedium | None) -> str:
    if row is None:
        return "absent"
    return f"{row.kind[:16]} {row.sha256[:64]} at [{row.start}, {row.start + row.length})"


def _turn_faults(sample: FiledSample, place: _Place, chain: DigestChain) -> Iterator[str]:
    row, turn, is_trained = place.row, place.node.turn, place.is_trained
    first = len(sample.tokens) - sample.response_length
    digest = chain.digest(place.node).hex()
    if place.digest != digest:
        yield f"its digest is {place.digest}, that of the store's turn {digest}"
    sampled = _ids(turn.sampled.ids)[: place.num_sampled]
    yield from _differences("token", sample.tokens, 0, row.prompt_start, _ids(_new_ids(place.node)))
    yield from _differences("token", sample.tokens, 0, row.start, sampled)
    known = known_logprobs(turn.sampled, turn.params)
    rows: list[tuple[str, Values | None, Values | None]] = [
        ("loss_mask", sample.loss_mask, _own(np.ones(place.num_sampled, np.uint8), place)),
        ("rollout_log_probs", sample.rollout_log_probs, _of_kind(known, row.logprobs_kind, place)),
        ("raw_log_probs", sample.raw_log_probs, _of_kind(known, LogprobsKind.RAW, place)),
        ("sampling_log_probs", sample.sampling_log_probs, _of_kind(known, LogprobsKind.SAMPLING, place)),
    ]
    for name, found, expected in rows:
        if found is None:
            continue
        if is_trained and expected is None:
            yield f"the store has no log-probabilities of the kind of its {name}"
            continue
        start = max(row.prompt_start, first)
        wanted = expected if is_trained and expected is not None else np.zeros(place.num_sampled, found.dtype)
        yield from _differences(f"{name} of token", found, first, start, np.zeros(row.start - start, found.dtype))
        yield from _differences(f"{name} of token", found, first, row.start, wanted)
    yield from _support_faults(place)
    yield from _weight_faults(sample, place)


def _of_kind(known: Logprobs, kind: str, place: _Place) -> Values | None:
    values = next((values for name, values in known.items() if name == kind), None)
    return None if values is None else _own(np.frombuffer(values, np.float64)[: place.num_sampled].copy(), place)


def _own(values: Values, place: _Place) -> Values:
    """Values of a turn's sampled tokens: 0 for those of the session before its fork."""
    values[: place.node.turn.num_inherited] = 0
    return values


def _ids(values: "array[int]") -> Values:
    return np.frombuffer(values, np.int32).astype(np.int64)


def _differences(what: str, values: Values, first: int, start: int, wanted: Values) -> Iterator[str]:
    """The first number of a turn to differ from the wanted one, bit for bit, and how many more differ.

    `values` begin with token number `first`, and `wanted` are those from token `start` on.
    """
    found = values[start - first : start - first + len(wanted)]
    if len(wanted) != len(found):
        return  # the turn's length is a fault already
    bits = f"u{found.dtype.itemsize}"
    places = np.flatnonzero(np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(wanted).view(bits))
    if len(places):
        at = int(places[0])
        more = f"; {len(places) - 1} more differ" if len(places) > 1 else ""
        yield f"{what} {start + at} is {found[at].item()!r}, the store has {wanted[at].item()!r}{more}"


def _support_faults(place: _Place) -> Iterator[str]:
    """Beside each sampled token stand the ids open to sampling, if the store has them."""
    kept, found = place.node.turn.sampled.support, place.row.support
    if not place.num_sampled:
        return
    if kept is None or found is None:
        if kept is not None or found is not None:
            yield "it has supports, the store has none" if kept is None else "it lacks the supports that the store has"
        return
    ids = place.node.turn.sampled.ids
    try:
        read = list(supports(found, ids[: place.num_sampled]))
    except ValueError as error:
        yield f"its supports cannot be read: {error}"
        return
    for at, (one, other) in enumerate(zip(read, supports(kept, ids), strict=False)):
        if not np.array_equal(_every(one), _every(other)):
            yield f"the support of token {place.row.start + at} is not what the store has"
            return


def _every(support: Values | None) -> Values:
    """A support as values, different from those of every other support."""
    return np.array([-1]) if support is None else support


def _weight_faults(sample: FiledSample, place: _Place) -> Iterator[str]:
    """Each sampled token is in a span of the version that sampled it."""
    for span in place.node.turn.sampled.weights:
        start, end = place.row.start + span.start, min(place.row.start + span.end, place.row.end)
        spans = (one for one in sample.weight_spans if one.version == span.version)
        if start < end and not any(one.start <= start and end <= one.end for one in spans):
            yield f"tokens {start} to {end} were sampled by weights {span.version!r}, which weight_spans does not say"


def _taken(place: _Place, trained: Trained, session_id: str, name: str) -> Iterator[str]:
    """Note a turn as trained. A turn trained twice counts double."""
    if not place.is_trained:
        return
    trained.num_tokens += max(0, place.num_sampled - place.node.turn.num_inherited)
    other = trained.by_turn.setdefault((session_id, place.node.id), name)
    if other != name:
        yield f"turn {place.node.id} is trained by {other} too"
