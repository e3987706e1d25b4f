"""Annotations in samples: the scores of each trained token, by the name of the annotation. Pure."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stenograph.core.errors import InvalidRequest, SamplesInconsistent
from stenograph.core.outcome import Annotation
from stenograph.export.samples import Sample, SampleSet


def with_scores(made: SampleSet, annotations: Mapping[str, Annotation], names: Sequence[str]) -> SampleSet:
    """Samples with the scores of these annotations. Raises InvalidRequest for an unknown one, and SamplesInconsistent
    where it lacks a trained token."""
    for name in names:
        if name not in annotations:
            known = ", ".join(sorted(annotations)) or "none"
            raise InvalidRequest(
                f"The session has no annotation {name[:80]!r} (it has: {known}): make it by POST"
                " /sessions/{id}/scores."
            )
    chosen = {name: annotations[name] for name in names}
    samples = [
        replace(sample, scores={name: _of_sample(sample, one) for name, one in chosen.items()})
        for sample in made.samples
    ]
    return replace(made, samples=tuple(samples))


def _of_sample(sample: Sample, annotation: Annotation) -> "array[float]":
    """Scores [R] of a sample's last tokens: 0.0 where its mask is 0."""
    first = len(sample.tokens) - sample.response_length
    found = array("d", bytes(8 * sample.response_length))
    for row in sample.turns:
        start, end = row["start"] - first, row["end"] - first
        own = start + row.get("inherited", 0)
        if own == end or not sample.loss_mask[own]:
            continue
        turn = annotation.turns.get(row["node_id"])
        if turn is None or len(turn.logprobs) < end - start:
            raise SamplesInconsistent(
                f"The annotation {annotation.name!r} does not score turn {row['node_id']}: it was made before that"
                " turn, or of other tokens. Score the session again."
            )
        found[own:end] = turn.logprobs[own - start : end - start]
    return found
