"""Turns as the console shows them: each a piece of its own, so that the loop goes on between two of them."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import force_setattr

from stenograph.console.views import turn_page
from stenograph.core.kinds import StrandKind
from stenograph.core.messages import MediaKind, MediaRef, Message, PlacedMedia, Role
from stenograph.core.types import SamplingParams
from stenograph.trajectory.strand_facts import StrandFacts

NewSession = Callable[[], Any]


@settings(max_examples=60)
@given(
    num=st.integers(0, 24),
    start=st.integers(0, 25),
    limit=st.none() | st.integers(1, 25),
    long=st.sets(st.integers(0, 24), max_size=4),
)
def test_a_page_is_made_a_few_turns_at_a_time_and_is_json(
    new_session: NewSession, num: int, start: int, limit: int | None, long: set[int]
) -> None:
    session = new_session()
    for number in range(num):
        session.add(session.nodes[-1] if session.nodes else None, [1, 2], [(number, -0.5)])
        if number in long:
            force_setattr(session.nodes[-1].turn, "messages", (Message(role=Role.USER, content="\u00e9" * 9000),) * 9)
    strand = StrandFacts(number=0, kind=StrandKind.MAIN, nodes=session.nodes)
    pieces = list(turn_page("s", session.nodes, {node.id: strand for node in session.nodes}, start=start, limit=limit))
    assert all(piece and piece.count(b'"node":') <= 8 for piece in pieces)
    page = json.loads(b"".join(pieces))
    shown = session.nodes[start:][:limit]
    assert [len(turn["messages"]) for turn in page["turns"]] == [9 if node.id in long else 1 for node in shown]
    assert [turn["node"] for turn in page["turns"]] == [node.id for node in shown]
    assert list(page) == ["session_id", "leaf", "start", "turns", "num_turns"]
    assert (page["leaf"], page["start"], page["num_turns"]) == (num - 1 if num else None, start, num)


def test_a_turn_says_what_was_asked_of_the_sampler_and_no_more(new_session: NewSession) -> None:
    session = new_session()
    node = session.add(None, [1], [], params=SamplingParams(temperature=0.0, top_k=5, stop=("x",)))
    strand = StrandFacts(number=3, kind=StrandKind.MAIN, nodes=session.nodes)
    (turn,) = json.loads(b"".join(turn_page("s", [node], {0: strand})))["turns"]
    assert turn["params"] == {"temperature": 0.0, "top_k": 5, "stop": ["x"]}
    assert (turn["strand"], turn["mean_logprob"], turn["weights"]) == (3, None, [])


def test_a_message_s_images_have_their_hashes_and_places_and_no_bytes(new_session: NewSession) -> None:
    session = new_session()
    session.add(None, [1, 2], [(7, -0.5)])
    ref = MediaRef(sha256="ab" * 32, kind=MediaKind.IMAGE, media_type="image/png", num_bytes=9)
    message = Message(role=Role.USER, content="look", media=(PlacedMedia(at=2, ref=ref),))
    force_setattr(session.nodes[-1].turn, "messages", (message,))
    strand = StrandFacts(number=0, kind=StrandKind.MAIN, nodes=session.nodes)
    pieces = turn_page("s", session.nodes, {node.id: strand for node in session.nodes}, start=0, limit=None)
    (turn,) = json.loads(b"".join(pieces))["turns"]
    shown = [{"at": 2, "sha256": "ab" * 32, "media_type": "image/png", "num_bytes": 9}]
    assert (turn["messages"][0]["media"], turn["reply"]["media"]) == (shown, [])
