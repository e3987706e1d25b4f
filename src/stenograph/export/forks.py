"""Samples of a fork: the tokens that it has from the session before it are trained there, and not here. Pure."""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from stenograph.export.custody import CUSTODY, Custody
from stenograph.export.samples import Sample, SampleSet
from stenograph.export.turn_rows import TurnRow
from stenograph.trajectory.strand_facts import SessionFacts


def of_fork(made: SampleSet, facts: SessionFacts) -> SampleSet:
    """Samples with the mask 0, and 0.0 for log-probabilities, on each inherited token; its turn says how many."""
    inherited = {node.id: node.turn.num_inherited for node in facts.nodes if node.turn.num_inherited}
    num_trained = {node: max(0, num - inherited.get(node, 0)) for node, num in made.num_trained.items()}
    samples = tuple(_sample(one, inherited) for one in made.samples)
    return replace(made, samples=samples, num_trained=num_trained)


def _sample(sample: Sample, inherited: Mapping[int, int]) -> Sample:
    first = len(sample.tokens) - sample.response_length
    rows: list[TurnRow] = []
    gone, spans = set[int](), list[tuple[int, int]]()
    for row in sample.turns:
        num = min(inherited.get(row["node_id"], 0), row["end"] - row["start"])
        if num:
            spans.append((row["start"] - first, row["start"] + num - first))
            if row["start"] + num == row["end"]:
                gone.add(row["node_id"])
        rows.append(cast("TurnRow", {**row, "inherited": num}) if num else row)
    mask = bytearray(sample.loss_mask)
    for start, end in spans:
        mask[start:end] = bytes(end - start)
    metadata = dict(sample.metadata)
    if CUSTODY in metadata:
        custody = cast("Custody", metadata[CUSTODY])
        metadata[CUSTODY] = {**custody, "trained": [node for node in custody["trained"] if node not in gone]}
    return replace(
        sample,
        loss_mask=bytes(mask),
        rollout_log_probs=_without(sample.rollout_log_probs, spans),
        raw_log_probs=None if sample.raw_log_probs is None else _without(sample.raw_log_probs, spans),
        sampling_log_probs=None if sample.sampling_log_probs is None else _without(sample.sampling_log_probs, spans),
        turns=rows,
        metadata=metadata,
    )


def _without(values: "array[float]", spans: list[tuple[int, int]]) -> "array[float]":
    """Values with 0.0 in these spans."""
    values = values[:]
    for start, end in spans:
        values[start:end] = array("d", bytes(8 * (end - start)))
    return values
