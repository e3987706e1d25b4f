"""Rewards of single turns and tokens: checked against a session's turns, and placed in its samples. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from stenograph.core.errors import InvalidRequest, SamplesInconsistent
from stenograph.core.outcome import SessionOutcome
from stenograph.export.samples import Sample, SampleSet
from stenograph.trajectory.strand_facts import SessionFacts, leaves_of
from stenograph.trajectory.turn import Node


def check_credit(outcome: SessionOutcome, nodes: Sequence[Node]) -> None:
    """Raise InvalidRequest for a reward of a turn that is not there, or of other tokens than it sampled."""
    sizes = {node.id: len(node.turn.sampled.ids) for node in nodes}
    for turn in (*outcome.turns, *outcome.tokens):
        if turn not in sizes:
            raise InvalidRequest(f"The session has no turn {turn}: its turns are {sorted(sizes)[:50]}.")
    for turn, rewards in outcome.tokens.items():
        if len(rewards) != sizes[turn]:
            raise InvalidRequest(
                f"A turn has a reward for each sampled token: {turn} has {sizes[turn]}, not {len(rewards)}."
            )


def with_credit(made: SampleSet, outcome: SessionOutcome, facts: SessionFacts) -> SampleSet:
    """Samples with the reward of each trained token: its own, and on a turn's last one in the sample the turn's too.

    Raises SamplesInconsistent for a reward of a turn in no line: a later turn has replaced it."""
    ends = leaves_of(facts.nodes, facts.options.history)
    if gone := sorted({*outcome.turns, *outcome.tokens} - {node.id for end in ends for node in end.line()}):
        raise SamplesInconsistent(
            f"The outcome has rewards of turns that later turns replaced: {gone[:50]}. Set it again, without them."
        )
    return replace(made, samples=tuple(replace(one, token_rewards=_credit(one, outcome)) for one in made.samples))


def _credit(sample: Sample, outcome: SessionOutcome) -> "array[float]":
    first = len(sample.tokens) - sample.response_length
    found = array("d", bytes(8 * sample.response_length))
    for row in sample.turns:
        start, end, node = row["start"] - first, row["end"] - first, row["node_id"]
        own = start + row.get("inherited", 0)
        if own == end or not sample.loss_mask[own]:
            continue
        if node in outcome.tokens:
            found[own:end] = outcome.tokens[node][own - start : end - start]
        found[end - 1] += outcome.turns.get(node, 0.0)
    return found
