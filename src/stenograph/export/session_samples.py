"""A session's samples and its metadata for a trainer, whoever asks: a server's client, or `stenograph export`. Pure;
work for the CPU pool."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, cast

from stenograph.core.drift import DriftReport, drift_json
from stenograph.core.json_pieces import as_list
from stenograph.core.kinds import TRAINED_KINDS, HistoryKind, StrandKind
from stenograph.core.loaded import entry
from stenograph.core.types import LogprobsKind
from stenograph.export.lines import left_out, strand_row, tree_metadata
from stenograph.export.records import SessionMetadata, discarded_json, outcome_json
from stenograph.export.replay import ReplayShape
from stenograph.export.samples import Decode, EmptyReason, JsonSample, SampleSet, make_samples, to_json
from stenograph.trajectory.strand_facts import SessionFacts
from stenograph.trajectory.turn import Node, line_ids


class JsonSamples(TypedDict):
    """A session's samples; `empty_reason` is set only if there are none."""

    samples: Sequence[JsonSample]
    session_metadata: Mapping[str, object]
    empty_reason: EmptyReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWishes:
    """The wanted samples: the kinds of strands, the longest length, and the metadata beside a session's.

    `required`: each trained token must have a log-probability of that kind. `scores` are names of annotations.
    `end`: none of a turn with this node id, or a later one.
    """

    kinds: Sequence[StrandKind] = TRAINED_KINDS
    max_seq_len: int | None = None
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    include_failed: bool = False
    required: LogprobsKind | None = None
    scores: Sequence[str] = ()
    end: int | None = None


def session_samples(
    facts: SessionFacts,
    reports: Mapping[int, DriftReport],
    *,
    wishes: SampleWishes,
    decode: Decode,
    max_trim_tokens: int,
    replay_shape: ReplayShape | None,
) -> tuple[SampleSet, SessionMetadata]:
    """The samples of a session, and its metadata. `reports` has the drift of each line by its last node's id.

    Touches no session: it runs on a worker. Raises SamplesInconsistent.
    """
    told = {leaf_id: drift_json(report) for leaf_id, report in reports.items()}
    made = make_samples(
        facts.nodes if (end := wishes.end) is None else [node for node in facts.nodes if node.id < end],
        decode=decode,
        max_seq_len=wishes.max_seq_len,
        max_trim_tokens=max_trim_tokens,
        replay_shape=replay_shape,
        metadata={**facts.options.metadata, **wishes.metadata},
        mismatches={leaf_id: mismatches for leaf_id, mismatches in told.items() if mismatches is not None},
        discarded=discarded_json(facts.discarded),
        session=facts,
        kinds=wishes.kinds,
        required=wishes.required,
        include_failed=wishes.include_failed,
    )
    if facts.options.fork is not None:
        made = entry("stenograph.export.forks:of_fork")(made, facts)
    if wishes.end is None and facts.outcome is not None and (facts.outcome.turns or facts.outcome.tokens):
        made = entry("stenograph.export.credit:with_credit")(made, facts.outcome, facts)
    if wishes.scores:
        made = entry("stenograph.export.scores:with_scores")(made, facts.annotations, wishes.scores)
    report = None if (latest := facts.latest) is None else reports[latest.id]
    metadata = session_metadata(facts, latest, report, max_trim_tokens=max_trim_tokens)
    metadata["left_out"] = left_out(facts, made.left_out, made.failed)
    return made, metadata


def session_metadata(
    facts: SessionFacts, latest: Node | None, report: DriftReport | None, *, max_trim_tokens: int
) -> SessionMetadata:
    """The session's own metadata, overridden by the server's keys for the line to `latest` and for all strands."""
    metadata: SessionMetadata = {
        "accumulated_token_ids": line_ids(latest),
        "max_trim_tokens": max_trim_tokens,
        "discarded": discarded_json(facts.discarded),
        "strands": [strand_row(strand) for strand in facts.strands],
        "rewrites": Counter(one.rule for node in facts.nodes for one in node.turn.rewrites),
    }
    if facts.outcome is not None:
        metadata["outcome"] = outcome_json(facts.outcome)
    cast("dict[str, object]", metadata).update(facts.options.stated.beside_budgets())
    mismatches = [] if report is None else drift_json(report)
    if mismatches is not None:  # a line that the template cannot show was not compared
        metadata["tito_session_mismatch"] = mismatches
    if facts.options.history is not HistoryKind.LINEAR:
        metadata["tree"] = tree_metadata(facts.nodes)
    return cast("SessionMetadata", {**facts.options.metadata, **metadata})


def json_samples(
    made: SampleSet,
    metadata: SessionMetadata,
    *,
    token_text: Callable[[int], str] | None = None,
    with_masks: bool = False,
) -> JsonSamples:
    """The samples as they are written in JSON; with `token_text`, each token as text too, `with_masks` the ids of each
    support."""
    return {
        "samples": as_list(to_json(sample, token_text=token_text, with_masks=with_masks) for sample in made.samples),
        "session_metadata": metadata,
        "empty_reason": made.empty_reason,
    }
