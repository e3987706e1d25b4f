"""Samples: every token accounted for, masked, cut at the right place, and trained once."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import SamplesInconsistent
from stenograph.core.json_pieces import json_pieces
from stenograph.core.kinds import HistoryKind, StrandKind
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.core.stated_options import StatedOptions
from stenograph.core.types import FinishReason, Grammar, GrammarKind, LogprobsKind, SamplingParams
from stenograph.export.lines import left_out
from stenograph.export.samples import EmptyReason, Sample, SampleSet, make_samples, to_json
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts, kept_leaves
from stenograph.trajectory.turn import TurnStatus, line_ids

NewSession = Callable[[], Any]


def make(session: Any, /, **rest: Any) -> SampleSet:
    return make_samples(session.nodes, decode=lambda ids: f"{len(ids)} ids", **{"max_trim_tokens": 1, **rest})


def masked(sample: Sample) -> tuple[list[int], list[int], list[float]]:
    return sample.tokens.tolist(), list(sample.loss_mask), sample.rollout_log_probs.tolist()


CUT = SamplingParams(top_p=0.5)


def test_a_worked_example(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(
        None, [1, 2, 3], [(10, -0.5), (11, -1.5)], versions=[("a", 0, 2)], sampling=[-0.25, -1.25], cached=1,
        params=CUT,
    )  # fmt: skip
    session.add(
        root, [4], [(12, -2.5)], versions=[("b", 0, 1)], sampling=[-2.0], cached=5, reply_id="chatcmpl-1", params=CUT
    )
    made = make(session, metadata={"k": 1})
    assert made.empty_reason is None
    assert [json.loads(b"".join(json_pieces(to_json(sample)))) for sample in made.samples] == [
        {
            "tokens": [1, 2, 3, 10, 11, 4, 12],
            "response_length": 4,
            "loss_mask": [1, 1, 0, 1],
            "rollout_log_probs": [-0.5, -1.5, 0.0, -2.5],
            "raw_log_probs": [-0.5, -1.5, 0.0, -2.5],
            "sampling_log_probs": [-0.25, -1.25, 0.0, -2.0],
            "rollout_routed_experts": None,
            "rollout_indexer_topk": None,
            "response": "4 ids",
            "status": "completed",
            "weight_versions": ["a", "b"],
            "weight_spans": [{"version": "a", "start": 3, "end": 5}, {"version": "b", "start": 6, "end": 7}],
            "turns": [
                {"node_id": 0, "prompt_start": 0, "start": 3, "end": 5, "temperature": 1.0, "top_p": 0.5},
                {"node_id": 1, "prompt_start": 5, "start": 6, "end": 7, "temperature": 1.0, "top_p": 0.5},
            ],
            "prefix_cache_info": {"cached_tokens": 6, "total_prompt_tokens": 9},
            "reward": None,
            "outcome": None,
            "metadata": {
                "k": 1,
                "leaf": {"node_id": 1, "parent": 0, "path_node_ids": [0, 1], "response_id": "chatcmpl-1"},
                "truncated_turns": 0,
            },
        }
    ]


def test_no_sample_for_two_reasons_is_all_truncated(new_session: NewSession) -> None:
    """`left_out` says that another choice of kinds would give samples; here the main strand would still be too long."""
    session = new_session()
    main = session.add(None, [1, 2, 3], [(10, -0.5)])
    title = session.add(None, [4], [(11, -0.5)])
    facts = SessionFacts(
        options=SessionOptions(history=HistoryKind.STRANDS),
        strands=[
            StrandFacts(number=0, kind=StrandKind.MAIN, nodes=[main]),
            StrandFacts(number=1, kind=StrandKind.TITLE, nodes=[title]),
        ],
    )
    kinds = [StrandKind.MAIN]
    assert make(session, session=facts, kinds=kinds, max_seq_len=3).empty_reason is EmptyReason.ALL_TRUNCATED
    assert make(session, session=facts, kinds=[StrandKind.AGENT], max_seq_len=3).empty_reason is EmptyReason.LEFT_OUT
    assert len(make(session, session=facts, kinds=kinds, max_seq_len=4).samples) == 1


def test_an_opener_that_the_next_turn_replaces_is_not_in_the_line(new_session: NewSession) -> None:
    """As GLM does: 90, a user's opener, ends the first turn, and a tool's opener, 91, stands in its place."""
    session = new_session()
    root = session.add(
        None, [1, 2], [(10, -0.5), (90, -0.1)], versions=[("a", 0, 1), ("b", 1, 2)], sampling=[-0.4, -0.05]
    )
    session.add(root, [91, 3], [(11, -1.5), (90, -0.2)], trimmed=1, versions=[("b", 0, 2)], sampling=[-1.4, -0.15])
    (sample,) = make(session).samples
    assert masked(sample) == ([1, 2, 10, 91, 3, 11, 90], [1, 0, 0, 1, 1], [-0.5, 0.0, 0.0, -1.5, -0.2])
    assert sample.sampling_log_probs is not None
    assert sample.sampling_log_probs.tolist() == [-0.4, 0.0, 0.0, -1.4, -0.15]
    assert [(span.version, span.start, span.end) for span in sample.weight_spans] == [("a", 2, 3), ("b", 5, 7)]


def test_spans_of_one_version_join_over_a_prompt_but_not_over_tokens_of_unknown_version(
    new_session: NewSession,
) -> None:
    session = new_session()
    node = session.add(None, [1], [(10, -1.0)], versions=[("a", 0, 1)])
    node = session.add(node, [2, 3], [(11, -1.0)], versions=[("a", 0, 1)])  # tokens 4..5
    node = session.add(node, [4], [(12, -1.0)])  # nobody told who drew token 6
    session.add(node, [5], [(13, -1.0)], versions=[("a", 0, 1)])  # token 8
    (sample,) = make(session).samples
    assert [(span.version, span.start, span.end) for span in sample.weight_spans] == [("a", 1, 5), ("a", 8, 9)]


THREE_TURNS = [
    # ids of the line 1 2 3 | 10 11 | 4 | 12 | 91 5 | 13 14, the second turn's opener 90 replaced with 91
    *[(n, None) for n in (1, 2, 3)],
    (4, [1, 2, 3, 10]),
    (5, [1, 2, 3, 10, 11]),
    (6, [1, 2, 3, 10, 11]),
    *[(n, [1, 2, 3, 10, 11, 4, 12]) for n in (7, 8, 9)],
    (10, [1, 2, 3, 10, 11, 4, 12, 91, 5, 13]),
    *[(n, [1, 2, 3, 10, 11, 4, 12, 91, 5, 13, 14]) for n in (11, 12)],
]


@pytest.mark.parametrize(("max_seq_len", "tokens"), THREE_TURNS)
def test_max_seq_len_cuts_at_the_last_sampled_token_that_fits(
    new_session: NewSession, max_seq_len: int, tokens: list[int] | None
) -> None:
    session = new_session()
    node = session.add(None, [1, 2, 3], [(10, -0.1), (11, -0.2)], versions=[("a", 0, 2)])
    node = session.add(node, [4], [(12, -0.3), (90, -0.4)], versions=[("a", 0, 2)])
    session.add(node, [91, 5], [(13, -0.5), (14, -0.6)], trimmed=1, versions=[("b", 0, 2)])
    made = make(session, max_seq_len=max_seq_len)
    if tokens is None:
        assert made == SampleSet(samples=(), empty_reason=EmptyReason.ALL_TRUNCATED)
        return
    (sample,) = made.samples
    logprobs = {10: -0.1, 11: -0.2, 12: -0.3, 13: -0.5, 14: -0.6}
    assert masked(sample) == (
        tokens,
        [int(id_ in logprobs) for id_ in tokens[3:]],
        [logprobs.get(id_, 0.0) for id_ in tokens[3:]],
    )
    assert sample.status is (TurnStatus.COMPLETED if len(tokens) == 11 else TurnStatus.TRUNCATED)
    spans = [("a", 3, min(len(tokens), 7))] + ([("b", 9, len(tokens))] if len(tokens) > 9 else [])
    assert [(span.version, span.start, span.end) for span in sample.weight_spans] == spans
    assert sample.response == f"{len(tokens) - 3} ids"


def test_a_turn_with_only_a_replaced_opener_does_not_end_a_cut_sample(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -1.0)])
    node = session.add(root, [2], [(90, -1.0)])
    session.add(node, [91, 3], [(11, -1.0)], trimmed=1)
    (sample,) = make(session, max_seq_len=5).samples
    assert masked(sample) == ([1, 10], [1], [-1.0])


def test_a_completion_that_lines_share_is_trained_by_the_first_of_them(new_session: NewSession) -> None:
    """root ─┬─ a ─┬─ (superseded)
    │     └─ b
    └─ c ─── d        and a side request: kept lines end in b, side, d."""
    session = new_session()
    root = session.add(None, [1, 2], [(10, -0.1), (11, -0.2)], sampling=[-0.1, -0.2])
    a = session.add(root, [3], [(12, -0.3)], sampling=[-0.3])
    c = session.add(root, [4], [(13, -0.4)], sampling=[-0.4])
    session.add(a, [5], [(14, -0.5)], sampling=[-0.5])
    session.add(a, [5], [(15, -0.6)], sampling=[-0.6])
    session.add(None, [9], [(16, -0.7)], sampling=[-0.7])
    session.add(c, [6], [(17, -0.8)], sampling=[-0.8])
    b_line, side, d_line = make(session).samples
    assert masked(b_line) == ([1, 2, 10, 11, 3, 12, 5, 15], [1, 1, 0, 1, 0, 1], [-0.1, -0.2, 0.0, -0.3, 0.0, -0.6])
    assert masked(side) == ([9, 16], [1], [-0.7])
    assert masked(d_line) == ([1, 2, 10, 11, 4, 13, 6, 17], [0, 0, 0, 1, 0, 1], [0.0, 0.0, 0.0, -0.4, 0.0, -0.8])
    for sample in (b_line, side, d_line):
        assert sample.sampling_log_probs == sample.rollout_log_probs
    assert d_line.metadata["leaf"] == {"node_id": 6, "parent": 2, "path_node_ids": [0, 2, 6], "response_id": ""}


def test_the_line_that_holds_all_of_a_shared_completion_trains_it(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -0.1), (90, -0.2)])
    session.add(root, [91], [(11, -0.3)], trimmed=1)  # replaces 90, which the other line keeps
    other = session.add(root, [3], [(12, -0.4)])
    session.add(session.nodes[1], [4], [(13, -0.5)])
    session.add(other, [5], [(14, -0.6)])
    trimmed, whole = make(session).samples
    assert masked(trimmed) == ([1, 10, 91, 11, 4, 13], [0, 0, 1, 0, 1], [0.0, 0.0, -0.3, 0.0, -0.5])
    assert masked(whole) == ([1, 10, 90, 3, 12, 5, 14], [1, 1, 0, 1, 0, 1], [-0.1, -0.2, 0.0, -0.4, 0.0, -0.6])


def test_a_line_that_max_seq_len_drops_owns_nothing(new_session: NewSession) -> None:
    session = new_session()
    session.add(None, [1, 2, 3], [(10, -0.1)])
    session.add(None, [1], [(11, -0.2)])
    (sample,) = make(session, max_seq_len=3).samples
    assert masked(sample) == ([1, 11], [1], [-0.2])


def test_lines_that_are_cut_to_the_same_tokens_train_them_once(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -0.1)])
    for prompt in (2, 3):
        session.add(session.add(root, [prompt], [(11, -0.2)]), [4], [(12, -0.3)])
    first, second = make(session, max_seq_len=3).samples
    assert masked(first) == ([1, 10], [1], [-0.1])
    assert masked(second) == ([1, 10], [0], [0.0])


@pytest.mark.parametrize(
    ("reason", "status"),
    [(FinishReason.STOP, "completed"), (FinishReason.LENGTH, "truncated"), (FinishReason.ABORT, "aborted")],
)
def test_the_status_is_the_last_turns(new_session: NewSession, reason: FinishReason, status: str) -> None:
    session = new_session()
    root = session.add(None, [1], [(2, -1.0)])
    session.add(root, [3], [(4, -1.0)], reason=reason)
    assert [sample.status for sample in make(session).samples] == [status]


def test_a_turn_aborted_before_its_first_token_ends_its_line_with_its_prompt(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -1.0)], sampling=[-0.5])
    session.add(root, [2, 3], [], reason=FinishReason.ABORT)
    (sample,) = make(session).samples
    assert masked(sample) == ([1, 10, 2, 3], [1, 0, 0], [-1.0, 0.0, 0.0])
    assert sample.sampling_log_probs is not None
    assert sample.status is TurnStatus.ABORTED
    (cut,) = make(session, max_seq_len=3).samples
    assert (masked(cut)[0], cut.status) == ([1, 10], TurnStatus.TRUNCATED)


def test_a_first_turn_aborted_before_its_first_token_is_a_sample_without_a_response(new_session: NewSession) -> None:
    session = new_session()
    session.add(None, [1, 2], [], reason=FinishReason.ABORT)
    (sample,) = make(session, max_seq_len=2).samples
    assert (masked(sample), sample.response_length) == (([1, 2], [], []), 0)
    assert make(session, max_seq_len=1).empty_reason == "all_truncated"


def test_without_a_turn_there_is_no_sample_and_a_reason(new_session: NewSession) -> None:
    assert make(new_session()) == SampleSet(samples=(), empty_reason=EmptyReason.NO_RECORDS)
    assert EmptyReason.NO_RECORDS == "no_records"


def test_an_engine_that_does_not_tell_sampling_logprobs_leaves_none(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -1.0)], sampling=[-0.5], params=CUT)
    session.add(root, [2], [(11, -1.0)], params=CUT)
    (sample,) = make(session).samples
    assert sample.sampling_log_probs is None


HOT = SamplingParams(temperature=0.5)
GREEDY = SamplingParams(temperature=0.0)
RAW, TEMPERED, SAMPLING, OTHER = LogprobsKind


def test_tempered_logprobs_are_the_rollouts_where_an_engine_has_them(new_session: NewSession) -> None:
    session = new_session()
    both = {"sampling": [-0.25], "tempered": [-0.5]}
    root = session.add(None, [1], [(10, -1.0)], **both, params=SamplingParams(temperature=0.5, top_k=2))
    root = session.add(root, [2], [(11, -1.5)], sampling=[-0.75], params=HOT)  # nothing cut off: they are tempered
    session.add(root, [3], [(12, -2.0)], kind=TEMPERED, params=HOT)
    (sample,) = make(session, required=TEMPERED).samples
    assert sample.rollout_log_probs.tolist() == [-0.5, 0.0, -0.75, 0.0, -2.0]
    assert (sample.logprobs_kind, sample.raw_log_probs) == (None, None)
    assert sample.sampling_log_probs is not None
    assert sample.sampling_log_probs.tolist() == [-0.25, 0.0, -0.75, 0.0, -2.0]
    assert not any("logprobs_kind" in row for row in sample.turns)


@pytest.mark.parametrize(
    ("turns", "told", "rows"),
    [
        ([(RAW, HOT)], "raw", ["raw"]),
        ([(RAW, SamplingParams()), (RAW, HOT)], "raw", ["raw", "raw"]),
        ([(RAW, GREEDY)], "raw", ["raw"]),
        ([(SAMPLING, CUT)], "sampling", ["sampling"]),
        ([(OTHER, CUT)], "other", ["other"]),
        ([(TEMPERED, HOT), (RAW, GREEDY)], "mixed", [None, "raw"]),
        ([(RAW, HOT), (OTHER, CUT)], "mixed", ["raw", "other"]),
        ([(RAW, SamplingParams()), (TEMPERED, HOT)], None, [None, None]),
    ],
)
def test_logprobs_are_never_under_another_name(
    new_session: NewSession, turns: Any, told: str | None, rows: list[str | None]
) -> None:
    session, node = new_session(), None
    for kind, params in turns:
        node = session.add(node, [1], [(10, -1.0)], kind=kind, params=params)
    (sample,) = make(session).samples
    assert sample.logprobs_kind == told
    assert [row.get("logprobs_kind") for row in sample.turns] == rows
    body = json.loads(b"".join(json_pieces(to_json(sample))))
    assert ("logprobs_kind" in body) == (told is not None)
    if told is None:
        assert make(session, required=TEMPERED).samples == (sample,)
        return
    with pytest.raises(SamplesInconsistent, match=r"Turn \d .*has no tempered log-probabilities, .* at temp"):
        make(session, required=TEMPERED)


def test_a_turn_that_is_trained_elsewhere_decides_no_kind(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -1.0)], kind=OTHER, params=CUT)
    session.add(root, [2], [(11, -1.0)])
    session.add(root, [3], [(12, -1.0)])
    session.add(session.nodes[1], [4], [(13, -1.0)])
    first, second = make(session).samples
    assert (first.logprobs_kind, second.logprobs_kind) == ("mixed", None)  # the first trains the root


def test_a_turn_says_how_it_was_sampled_and_leaves_out_what_was_not_asked_for(new_session: NewSession) -> None:
    session = new_session()
    asked = {"top_p": 0.5, "top_k": 3, "min_p": 0.125, "presence_penalty": 1.0, "frequency_penalty": -1.0}
    asked |= {"repetition_penalty": 1.5, "min_tokens": 2}
    grammar = Grammar(kind=GrammarKind.REGEX, source="a")
    params = SamplingParams(temperature=0.5, logit_bias=((7, 2.0),), grammar=grammar, **asked)  # type: ignore[arg-type]
    drawn = [(n, -1.0) for n in (10, 11, 12, 13, 90)]
    root = session.add(None, [1, 2], drawn, params=params, forced=[1, 0, 1, 1, 1])
    session.add(root, [91, 3], [(14, -1.0)], trimmed=1, params=SamplingParams(grammar=grammar))
    (sample,) = make(session).samples
    assert sample.turns[0] == {
        "node_id": 0, "prompt_start": 0, "start": 2, "end": 6, "temperature": 0.5, **asked,
        "repetition_over": "line",
        "logit_bias": [{"id": 7, "bias": 2.0}], "grammar": True, "forced": [[2, 3], [4, 6]], "logprobs_kind": "raw",
    }  # fmt: skip
    assert sample.turns[1] == {
        "node_id": 1, "prompt_start": 6, "start": 8, "end": 9, "temperature": 1.0, "grammar": True,
        "logprobs_kind": "raw",
    }  # fmt: skip


def test_a_call_over_a_change_of_weights_counts_as_the_older_ones(new_session: NewSession) -> None:
    """As miles reads it: `str(version).isdigit()`, and the least of them is what the sample is as old as."""
    session = new_session()
    root = session.add(None, [1], [(10, -1.0), (11, -1.0)], versions=[("7", 0, 1), ("8", 1, 2)])
    root = session.add(root, [2], [(12, -1.0)])
    session.add(root, [3], [(13, -1.0)], versions=[("8", 0, 1)])
    (sample,) = make(session).samples
    assert sample.weight_versions == ("7", "8")
    assert min(int(version) for version in sample.weight_versions if str(version).isdigit()) == 7


def facts_of(session: Any, group: str | None = None, **rest: Any) -> SessionFacts:
    strands = [StrandFacts(number=0, kind=StrandKind.MAIN, nodes=session.nodes)]
    return SessionFacts(
        options=SessionOptions(history=HistoryKind.LINEAR, stated=StatedOptions(group=group)), strands=strands, **rest
    )


@pytest.mark.parametrize("verdict", RolloutVerdict)
def test_a_failure_of_the_infrastructure_gives_no_sample_unless_it_is_asked_for(
    new_session: NewSession, verdict: RolloutVerdict
) -> None:
    session = new_session()
    session.add(None, [1], [(10, -1.0), (11, -1.0)])
    facts = facts_of(session, outcome=SessionOutcome(verdict=verdict, reward={"a": 0.5}), group="g")
    made, every = make(session, session=facts, include_failed=False), make(session, session=facts)
    (sample,) = every.samples
    body = json.loads(b"".join(json_pieces(to_json(sample))))
    assert (body["reward"], body["outcome"], body["metadata"]["group"]) == ({"a": 0.5}, verdict, "g")
    if verdict is not RolloutVerdict.INFRA_FAILED:
        assert made == every
        return
    assert (made.samples, made.empty_reason) == ((), EmptyReason.INFRA_FAILED)
    assert left_out(facts, made.left_out, made.failed) == {"infra_failed": {"strands": 1, "sampled_tokens": 2}}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), {"a": float("-inf")}])
def test_a_reward_is_finite(reward: Any) -> None:
    with pytest.raises(ValueError, match="finite"):
        SessionOutcome(reward=reward)


def test_a_client_cannot_set_the_servers_own_metadata_of_a_sample(new_session: NewSession) -> None:
    session = new_session()
    first = session.add(None, [1], [(10, -1.0)])
    session.add(None, [2], [(11, -1.0)])
    names = ("leaf", "truncated_turns", "tito_session_mismatch", "accumulated_token_ids")
    spoofed = {**dict.fromkeys(names, "x"), "mine": 1}
    drift = [{"type": "assistant_text", "position": 0}]
    told, untold = make(session, metadata=spoofed, mismatches={first.id: drift}).samples
    leaf = {"node_id": 0, "parent": None, "path_node_ids": [0], "response_id": ""}
    assert told.metadata == {"mine": 1, "leaf": leaf, "truncated_turns": 0, "tito_session_mismatch": drift}
    assert set(untold.metadata) == {"mine", "leaf", "truncated_turns"}
    assert set(spoofed.values()) == {"x", 1}


Row = tuple[int, tuple[int, int] | None, float]
"""A token of a line: its id, which node's how-manieth sampled token it is, and its logprob."""


def random_session(new_session: NewSession, seed: int) -> Any:
    """Branches, retries, side requests, trims, aborts; every sampled token has a logprob of its own."""
    draw = random.Random(seed)
    session = new_session()
    for _ in range(draw.randint(1, 10)):
        open_nodes = [node for node in session.nodes if node.turn.status is TurnStatus.COMPLETED]
        parent = draw.choice([None, *open_nodes, *open_nodes[-2:]])
        reason = draw.choice([FinishReason.STOP] * 4 + [FinishReason.LENGTH, FinishReason.ABORT])
        num_drawn = draw.randint(0 if reason is FinishReason.ABORT else 1, 4)
        num_parent = 0 if parent is None else len(parent.turn.sampled.ids)
        drawn = [(draw.randrange(100), -draw.random() - 0.01) for _ in range(num_drawn)]
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 3))]
        trimmed = min(draw.choice([0, 0, 1, 2]), num_parent)
        session.add(parent, prompt, drawn, reason=reason, trimmed=trimmed, sampling=[lp / 2 for _, lp in drawn])
    return session


def naive_rows(leaf: Any) -> list[Row]:
    rows: list[Row] = []
    for node in leaf.line():
        rows = rows[: len(rows) - node.turn.num_trimmed]
        rows += [(id_, None, 0.0) for id_ in node.turn.new_prompt_ids]
        pairs = zip(node.turn.sampled.ids, node.turn.sampled.logprobs, strict=True)
        rows += [(id_, (node.id, at), logprob) for at, (id_, logprob) in enumerate(pairs)]
    return rows


def naive_cut(rows: list[Row], max_seq_len: int) -> list[Row]:
    if len(rows) <= max_seq_len:
        return rows
    rows = rows[:max_seq_len]
    while rows and rows[-1][1] is None:
        rows = rows[:-1]
    return rows


@given(st.integers(0, 2**32), st.none() | st.integers(1, 40))
def test_every_sampled_token_that_is_in_a_sample_is_trained_exactly_once(
    new_session: NewSession, seed: int, max_seq_len: int | None
) -> None:
    session = random_session(new_session, seed)
    made = make(session, max_trim_tokens=2, max_seq_len=max_seq_len)
    wholes = [naive_rows(leaf) for leaf in kept_leaves(session.nodes)]
    lines = [rows if max_seq_len is None else naive_cut(rows, max_seq_len) for rows in wholes]
    kept = [(whole, rows) for whole, rows in zip(wholes, lines, strict=True) if rows]
    assert len(made.samples) == len(kept)
    trained: list[tuple[int, int]] = []
    for sample, (whole, rows) in zip(made.samples, kept, strict=True):
        assert sample.tokens.tolist() == [id_ for id_, _, _ in rows]
        response = rows[len(rows) - sample.response_length :]
        for (_, place, logprob), bit, raw, sampling in zip(
            response, sample.loss_mask, sample.rollout_log_probs, sample.sampling_log_probs or (), strict=True
        ):
            assert (raw, sampling) == ((logprob, logprob / 2) if bit else (0.0, 0.0))
            assert place is not None or not bit
            trained += [place] if bit and place is not None else []
        for node_id in {place[0] for _, place, _ in rows if place is not None}:  # a turn is trained whole or not
            bits = [
                bit
                for (_, place, _), bit in zip(response, sample.loss_mask, strict=True)
                if place and place[0] == node_id
            ]
            assert len(set(bits)) == 1
        if len(rows) < len(whole):
            assert sample.status is TurnStatus.TRUNCATED
    assert sorted(trained) == sorted({place for _, rows in kept for _, place, _ in rows if place is not None})
    assert len(trained) == len(set(trained))


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_a_cut_sample_is_the_beginning_of_its_line(new_session: NewSession, seed: int, max_seq_len: int) -> None:
    session = random_session(new_session, seed)
    by_id = {node.id: node for node in session.nodes}
    for sample in make(session, max_trim_tokens=2, max_seq_len=max_seq_len).samples:
        leaf = sample.metadata["leaf"]
        assert isinstance(leaf, dict)
        whole = line_ids(by_id[leaf["node_id"]])
        assert len(sample.tokens) <= max_seq_len
        assert sample.tokens == whole[: len(sample.tokens)]
