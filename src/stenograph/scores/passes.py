"""The passes over a session's lines, and the annotation made of their results. Pure.

A turn in several lines is scored once, in the line with most of its sampled ids. Another prompt stands in place of the
line's first one; everything after it is as it was recorded.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stenograph.core.outcome import TurnScores
from stenograph.core.types import token_ids
from stenograph.engine.scoring import Scores
from stenograph.export.lines import SampleLine


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPart:
    """The sampled tokens `[start, end)` of a pass's ids are those of turn `node`."""

    node: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePass:
    """One pass over `ids` [T], scored from `start` on. `parts` are the turns that get their scores of it, in order;
    `token` is the named token at its end, "" where turns are scored."""

    ids: "array[int]"
    start: int
    parts: tuple[ScoredPart, ...] = ()
    token: str = ""


def turn_passes(lines: Sequence[SampleLine], prompts: "Sequence[array[int] | None]") -> list[ScorePass]:
    """The passes to score the sampled tokens of these lines, each with its prompt in place of its first one."""
    best: dict[int, tuple[int, int]] = {}
    for index, line in enumerate(lines):
        for part in line.parts:
            if part.num_sampled > best.get(part.node.id, (0, 0))[0]:
                best[part.node.id] = (part.num_sampled, index)
    passes: list[ScorePass] = []
    for index, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        ids, shift = with_prompt(line, prompt)
        parts: list[ScoredPart] = []
        end = shift
        for part in line.parts:
            start, end = end + part.num_prompt, end + part.num_tokens
            if best.get(part.node.id, (0, -1))[1] == index:
                parts.append(ScoredPart(node=part.node.id, start=start, end=end))
        if parts:
            passes.append(ScorePass(ids=ids[: parts[-1].end], start=parts[0].start, parts=tuple(parts)))
    return passes


def token_passes(before: "array[int]", tokens: Mapping[str, int]) -> list[ScorePass]:
    """The passes to score each of `tokens`, by its text, after the ids `before`, at least one."""
    return [ScorePass(ids=before + token_ids([id_]), start=len(before), token=text) for text, id_ in tokens.items()]


def digest_of(passes: Sequence[ScorePass], facts: Mapping[str, object]) -> str:
    """The digest of passes, and of the facts their results depend on."""
    found = hashlib.sha256(msgspec.json.encode(facts, order="sorted"))
    for one in passes:
        parts = [(part.node, part.start, part.end) for part in one.parts]
        found.update(msgspec.json.encode((len(one.ids), one.start, one.token, parts)) + one.ids.tobytes())
    return found.hexdigest()


def scores_of_turns(passes: Sequence[ScorePass], results: Sequence[Scores]) -> dict[int, TurnScores]:
    """The scores of each turn, by node id."""
    found: dict[int, TurnScores] = {}
    for one, scores in zip(passes, results, strict=True):
        for part in one.parts:
            span = slice(part.start - one.start, part.end - one.start)
            num_top = len(scores.top.ids) // len(scores.logprobs)
            best = slice(num_top * span.start, num_top * span.stop)
            found[part.node] = TurnScores(
                logprobs=scores.logprobs[span],
                top_ids=scores.top.ids[best],
                top_logprobs=scores.top.logprobs[best],
            )
    return found


def with_prompt(line: SampleLine, prompt: "array[int] | None") -> "tuple[array[int], int]":
    """The ids of a line, and how much later its tokens stand than they were recorded."""
    if prompt is None:
        return line.ids, 0
    num_first = line.parts[0].num_prompt
    return prompt + line.ids[num_first:], len(prompt) - num_first
