"""Files of samples are read whatever bytes they have, and what differs from the turns is a fault."""

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.core.json_pieces import json_pieces
from stenograph.core.kinds import HistoryKind, StrandKind
from stenograph.core.support import SupportColumns, SupportWriter
from stenograph.export.arrow import to_arrow
from stenograph.export.custody import DigestChain
from stenograph.export.safetensors import to_safetensors
from stenograph.export.sample_check import KeptTurns, Trained, sample_faults
from stenograph.export.sample_files import FiledSample, NoSampleFile, sample_file
from stenograph.export.samples import Sample, make_samples, to_json
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts

NewSession = Callable[[], Any]
FORMATS = ("safetensors", "json", "arrow")

DRAWN = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(min_value=-50, max_value=0)), max_size=6)
LINE = st.lists(st.tuples(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), DRAWN), min_size=1, max_size=4)


def made_of(session: Any) -> tuple[Sample, ...]:
    facts = SessionFacts(
        session_id="a" * 32,
        options=SessionOptions(history=HistoryKind.TREE),
        strands=[StrandFacts(number=0, kind=StrandKind.MAIN, nodes=session.nodes)],
    )
    made = make_samples(session.nodes, decode=lambda ids: "", max_trim_tokens=1, session=facts)
    return made.samples


def turns_of(session: Any) -> KeptTurns:
    ids = [node.id for node in session.nodes]
    return KeptTurns(
        nodes={node.id: node for node in session.nodes},
        rows={id_: id_ + 1 for id_ in ids},
        standing=frozenset(ids),
        chain=DigestChain("a" * 32),
    )


def written(samples: tuple[Sample, ...], kind: str) -> bytes:
    if kind == "json":
        whole = {"samples": [to_json(one) for one in samples], "session_metadata": {}, "empty_reason": None}
        return b"".join(json_pieces(whole))
    write = to_arrow if kind == "arrow" else to_safetensors
    return b"".join(write(samples, session_metadata={}, empty_reason=None))


def faults_of(filed: list[FiledSample], kept: KeptTurns) -> list[str]:
    trained = Trained()
    return [fault for i, one in enumerate(filed) for fault in sample_faults(one, kept, trained, name=f"{i}")]


def session_of(new_session: NewSession, lines: list[Any]) -> Any:
    session = new_session()
    for line in lines:
        parent = None
        for prompt, drawn in line:
            parent = session.add(parent, prompt, drawn, versions=[("v", 0, len(drawn))] if drawn else [])
    return session


@pytest.mark.parametrize("kind", FORMATS)
@given(lines=st.lists(LINE, min_size=1, max_size=3))
@settings(max_examples=25)
def test_what_is_written_is_read_and_is_what_the_turns_say(
    new_session: NewSession, kind: str, lines: list[Any]
) -> None:
    session = session_of(new_session, lines)
    samples = made_of(session)
    filed = list(sample_file(memoryview(written(samples, kind))).samples)
    assert len(filed) == len(samples)
    for one, sample in zip(filed, samples, strict=True):
        assert one.tokens.tolist() == sample.tokens.tolist()
        assert one.loss_mask.tobytes() == sample.loss_mask
        assert one.rollout_log_probs.tobytes() == sample.rollout_log_probs.tobytes()
        assert one.custody is not None
        assert one.custody.digests == sample.metadata["custody"]["digests"]  # type: ignore[index]
    assert faults_of(filed, turns_of(session)) == []


SESSION = [
    [([5, 6], [(7, -0.5), (8, -0.25)]), ([9], [(10, -1.5)])],
    [([5, 6, 7], [(300, -0.125)])],
]


@pytest.mark.parametrize("kind", FORMATS)
@given(places=st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), min_size=1, max_size=3))
@settings(max_examples=60)
def test_changed_bytes_are_no_file_or_a_fault_or_of_no_number(
    new_session: NewSession, kind: str, places: list[tuple[int, int]]
) -> None:
    session = session_of(new_session, SESSION)
    whole = written(made_of(session), kind)
    changed = bytearray(whole)
    for at, bits in places:
        changed[at % len(whole)] ^= bits
    before = list(sample_file(memoryview(whole)).samples)
    try:
        after = list(sample_file(memoryview(bytes(changed))).samples)
    except NoSampleFile:
        return
    if not faults_of(after, turns_of(session)):
        for one, other in zip(after, before, strict=False):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.loss_mask.tolist() == other.loss_mask.tolist()
            assert one.rollout_log_probs.tobytes() == other.rollout_log_probs.tobytes()


@given(st.one_of(st.binary(), st.binary().map(lambda b: len(b).to_bytes(8, "little") + b)))
def test_bytes_that_are_no_samples_are_refused(content: bytes) -> None:
    with pytest.raises(NoSampleFile):
        list(sample_file(memoryview(content)).samples)


def test_a_digest_depends_on_each_thing_that_is_recorded_and_on_the_turns_before(new_session: NewSession) -> None:
    def last(*lines: Any, session_id: str = "a") -> str:
        session = session_of(new_session, list(lines))
        return DigestChain(session_id).digest(session.nodes[-1]).hex()

    turn, then = ([5, 6], [(7, -0.5)]), ([9], [(10, -1.5)])
    digests = [
        last([turn, then]),
        last([turn, then], session_id="b"),
        last([turn, ([9], [(11, -1.5)])]),
        last([turn, ([9], [(10, -1.25)])]),
        last([turn, ([9, 10], [(10, -1.5)])]),
        last([([5, 6], [(7, float(np.nextafter(-0.5, 0)))]), then]),
        last([([5], [(6, -0.5), (7, -0.5)]), then]),
        last([then]),
        last([turn], [then]),
    ]
    assert len(set(digests)) == len(digests)
    assert last([turn, then]) == digests[0]


def supports_of(ids: list[int], rows: list[list[int]]) -> bytes:
    columns = SupportColumns(320)
    columns.extend(SupportWriter(320).write_rows(ids, rows), len(ids))
    return columns.whole()


DRAWN_BESIDE = [(7, -0.5), (8, -0.25)]
KEPT = supports_of([7, 8], [[7, 9], list(range(100))])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (KEPT, None),
        (supports_of([7, 8], [[7, 10], list(range(100))]), "the support of token 2 is not what the store has"),
        (supports_of([7, 8], [[7, 9], list(range(101))]), "the support of token 3 is not what the store has"),
        (None, "it lacks the supports that the store has"),
        (KEPT[:-1], "its supports cannot be read: "),
        (b"", "its supports cannot be read: "),
    ],
)
def test_a_support_that_is_not_the_store_s_is_found(
    new_session: NewSession, kind: str, found: bytes | None, fault: str | None
) -> None:
    session = new_session()
    first = session.add(None, [5, 6], DRAWN_BESIDE, support=KEPT)
    session.add(first, [9], [(10, -1.5)])
    samples = made_of(session)
    for turns in (sample.turns for sample in samples):
        if found is None:
            del turns[0]["support"]
        else:
            turns[0]["support"] = b64encode(found).decode()
    filed = list(sample_file(memoryview(written(samples, kind))).samples)
    faults = faults_of(filed, turns_of(session))
    assert len(faults) == (fault is not None)
    if fault is not None:
        assert fault in faults[0]


def test_supports_that_the_store_lacks_are_found(new_session: NewSession) -> None:
    session = new_session()
    session.add(None, [5, 6], DRAWN_BESIDE)
    samples = made_of(session)
    samples[0].turns[0]["support"] = b64encode(KEPT).decode()
    (filed,) = sample_file(memoryview(written(samples, "json"))).samples
    assert faults_of([filed], turns_of(session)) == ["turn 0 (row 1): it has supports, the store has none"]
