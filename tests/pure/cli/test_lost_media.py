"""`check` names each image that a session's turns show and its store does not have."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import force_setattr

from stenograph.cli.store_commands import lost_media
from stenograph.core.messages import MediaKind, MediaRef, Message, PlacedMedia, Role

from ..export.conftest import new_session

__all__ = ["new_session"]


def test_a_turn_without_its_media_is_a_fault(new_session: Callable[[], Any]) -> None:
    session = new_session()
    for number in range(3):
        session.add(session.nodes[-1] if session.nodes else None, [1, 2], [(number, -0.5)])
    refs = [
        MediaRef(sha256=two * 32, kind=MediaKind.IMAGE, media_type="image/png", num_bytes=9) for two in ("ab", "cd")
    ]
    message = Message(role=Role.USER, content="", media=tuple(PlacedMedia(at=0, ref=ref) for ref in refs))
    force_setattr(session.nodes[1].turn, "messages", (message,))
    assert list(lost_media(session.nodes, lambda: [ref.sha256 for ref in refs])) == []
    assert list(lost_media(session.nodes, lambda: ["ab" * 32])) == [
        (f"turn {session.nodes[1].id}", f"its media {'cd' * 32} is not there")
    ]


def test_a_session_without_media_asks_for_none(new_session: Callable[[], Any]) -> None:
    session = new_session()
    session.add(None, [1, 2], [(0, -0.5)])
    assert list(lost_media(session.nodes, lambda: pytest.fail("asked"))) == []
