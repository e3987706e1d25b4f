"""The media of sessions: kept before a turn that shows them is committed, and found again by their hashes.

Where there is a store it keeps them; else its session does, and sessions with the same content share it. Loaded with
the first medium.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import MediaItem
from stenograph.session.session import Session
from stenograph.session.storage import SessionStorage


class HeldMedium:
    """A medium in memory, for as long as a session refers to it."""

    __slots__ = ("__weakref__", "item")

    def __init__(self, item: MediaItem) -> None:
        self.item = item

    def __repr__(self) -> str:
        return f"<HeldMedium {self.item.ref.sha256}>"


_HELD: WeakValueDictionary[str, HeldMedium] = WeakValueDictionary()
"""The media in memory, by hash. Changed on the loop alone."""


async def keep_media(session: Session, storage: SessionStorage | None, items: Sequence[MediaItem]) -> None:
    """Keep media of a session; known ones change nothing. Raises StorageUnavailable."""
    if storage is not None and session.tail is not None:
        await storage.store.media.put(session.id, items)
        return
    for item in items:
        sha256 = item.ref.sha256
        if sha256 not in session.media:
            held = _HELD.get(sha256)
            if held is None:
                held = _HELD[sha256] = HeldMedium(item)
            session.media[sha256] = held


async def find_media(session: Session, storage: SessionStorage | None, sha256: str) -> MediaItem | None:
    """A medium of a session; None if it has none with this hash. Raises StorageUnavailable."""
    held = session.media.get(sha256)
    if isinstance(held, HeldMedium):
        return held.item
    return None if storage is None else await storage.store.media.get(session.id, sha256)


async def with_earlier_media(
    decoded: tuple[ChatRequest, bytes], session: Session, storage: SessionStorage | None
) -> tuple[ChatRequest, bytes]:
    """A request and its part of the record, with the media of the response before it. Raises InvalidRequest for one
    that is lost, or StorageUnavailable."""
    request, record = decoded
    items = {item.ref.sha256: item for item in request.media}
    for ref in request.earlier_media:
        if ref.sha256 not in items:
            found = await find_media(session, storage, ref.sha256)
            if found is None:
                raise InvalidRequest(
                    f"The session no longer has the {ref.kind.value} {ref.sha256} of the response before: send all"
                    " messages with their images, and no previous_response_id.",
                    blame=Blame(RequestPart.MESSAGES),
                )
            items[ref.sha256] = found
    return replace(request, media=tuple(items.values())), record
