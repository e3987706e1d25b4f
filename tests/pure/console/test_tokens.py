"""Pages of tokens: of any line and any span, nine bytes a token that say what samples say."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.console.groups import num_common
from stenograph.console.tokens import (
    MAX_VERSIONS,
    SOURCE_SHIFT,
    TRAINED,
    VERSION_SHIFT,
    LineTurns,
    TokenLook,
    TokenSource,
    kept_lines,
    token_page,
    trained_tokens,
)
from stenograph.core.kinds import TRAINED_KINDS, HistoryKind, StrandKind
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.core.types import SamplingParams
from stenograph.export.samples import make_samples
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts
from stenograph.trajectory.turn import Node, line_ids

NewSession = Callable[[], Any]


def facts_of(session: Any, kind: StrandKind = StrandKind.MAIN, outcome: SessionOutcome | None = None) -> SessionFacts:
    strand = StrandFacts(number=0, kind=kind, nodes=session.nodes)
    return SessionFacts(options=SessionOptions(history=HistoryKind.TREE), strands=[strand], outcome=outcome)


def read(page: bytes) -> list[tuple[int, float, int]]:
    """A page as its reader has it."""
    num = len(page) // 9
    ids, logprobs = np.frombuffer(page, "<u4", num), np.frombuffer(page, "<f4", num, 4 * num)
    return list(zip(ids.tolist(), logprobs.tolist(), page[8 * num :], strict=True))


def written_out(leaf: Node, look: TokenLook) -> list[tuple[int, float, int]]:
    """The same, token by token."""
    line: list[tuple[int, float, int]] = []
    for node in leaf.line():
        turn = node.turn
        del line[len(line) - turn.num_trimmed :]
        source = TokenSource.BRIDGE if node.parent else TokenSource.PROMPT
        line += [(id_, math.nan, source << SOURCE_SHIFT) for id_ in turn.new_prompt_ids]
        for index, (id_, logprob) in enumerate(zip(turn.sampled.ids, turn.sampled.logprobs, strict=True)):
            forced = turn.sampled.forced is not None and turn.sampled.forced[index]
            flags = (TokenSource.FORCED if forced else TokenSource.SAMPLED) << SOURCE_SHIFT
            flags |= TRAINED if index < look.trained.get(node.id, 0) else 0
            spans = [span for span in turn.sampled.weights if span.start <= index < span.end]
            flags |= min(look.versions[spans[0].version], MAX_VERSIONS + 1) << VERSION_SHIFT if spans else 0
            line.append((id_, float(np.float32(logprob)), flags))
    return line


@st.composite
def sessions(draw: st.DrawFn, new_session: NewSession) -> Any:
    """A tree of a few turns, in which a turn may trim its parent's last token, and versions come and go."""
    session = new_session()
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([None, *session.nodes]))
        num = draw(st.integers(0, 6))
        drawn = [(draw(st.integers(0, 2**31 - 1)), -draw(st.floats(0, 30, width=32))) for _ in range(num)]
        half = draw(st.integers(0, num))
        names = [f"v{draw(st.integers(0, 40))}" for _ in range(2)]
        cuts = [(names[0], 0, half), (names[1], half, num)]
        session.add(
            parent,
            draw(st.lists(st.integers(0, 999), min_size=1, max_size=6)),
            drawn,
            trimmed=draw(st.integers(0, 1)) if parent is not None and parent.turn.sampled.ids else 0,
            versions=[cut for cut in cuts if cut[1] < cut[2]] if draw(st.booleans()) else (),
            forced=draw(st.none() | st.lists(st.booleans(), min_size=num, max_size=num)),
        )
    return session


def same(one: list[tuple[int, float, int]], other: list[tuple[int, float, int]]) -> bool:
    return repr(one) == repr(other)  # NaN is itself here


@settings(max_examples=40)
@given(st.data())
def test_any_page_of_any_line_is_that_of_the_line_written_out(new_session: NewSession, data: st.DataObject) -> None:
    session = data.draw(sessions(new_session))
    look = TokenLook.of(facts_of(session))
    leaf = data.draw(st.sampled_from(session.nodes))
    start, stop = data.draw(st.integers(0, 80)), data.draw(st.integers(0, 80))
    page = token_page(LineTurns.of(leaf), start, stop, look)
    assert same(read(page), written_out(leaf, look)[start : max(start, stop)])
    whole = read(token_page(LineTurns.of(leaf), 0, leaf.num_tokens, look))
    assert [id_ for id_, _, _ in whole] == line_ids(leaf).tolist()


@settings(max_examples=40)
@given(st.data())
def test_what_is_marked_as_trained_is_what_samples_train(new_session: NewSession, data: st.DataObject) -> None:
    session = data.draw(sessions(new_session))
    kind = data.draw(st.sampled_from(StrandKind))
    verdict = data.draw(st.sampled_from(RolloutVerdict))
    facts = facts_of(session, kind, SessionOutcome(verdict=verdict))
    made = make_samples(
        session.nodes, decode=lambda _: "", max_trim_tokens=1, session=facts, kinds=TRAINED_KINDS, include_failed=False
    )
    trained = {node_id: num for node_id, num in made.num_trained.items() if num}
    assert {node_id: num for node_id, num in trained_tokens(facts).items() if num} == trained
    assert len(kept_lines(facts)) == len(made.samples)


def test_a_sampled_token_has_the_log_probability_that_its_sample_has(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(
        None, [1], [(10, -0.5)], tempered=[-0.75], sampling=[-0.25], params=SamplingParams(temperature=0.5, top_p=0.5)
    )
    ((_, prompt, _), (_, logprob, _)) = read(token_page(LineTurns.of(root), 0, 9, TokenLook.of(facts_of(session))))
    assert math.isnan(prompt)
    assert logprob == -0.75


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_two_lines_part_at_the_first_token_that_differs(one: list[int], other: list[int]) -> None:
    places = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    expected = next(places, min(len(one), len(other)))
    assert num_common(np.array(one, np.int32), np.array(other, np.int32)) == expected
