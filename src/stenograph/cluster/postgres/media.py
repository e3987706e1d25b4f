"""The media of sessions in a shared database. Base64 becomes bytes, and bytes base64, beside the loop."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from stenograph.cluster.postgres.shared_rows import SharedRows
from stenograph.core.base64_text import decoded, encoded
from stenograph.core.messages import MediaItem, MediaRef
from stenograph.core.types import SessionId

T = TypeVar("T")


class AskedDatabase(Protocol):
    """Asks the database."""

    async def ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask until there is an answer. Raises StorageUnavailable."""
        ...


class SharedMedia:
    """A `MediaStore` in a shared database. Any owner may put media: a repeated statement changes nothing."""

    def __init__(self, asking: AskedDatabase, rows: SharedRows) -> None:
        self._asking = asking
        self._rows = rows

    def __repr__(self) -> str:
        return f"<SharedMedia of {self._rows!r}>"

    async def put(self, session_id: SessionId, items: Sequence[MediaItem]) -> None:
        known = await self._asking.ask(lambda: self._rows.media_of(session_id))
        for item in items:
            if item.ref.sha256 not in known:
                await self._put(session_id, item.ref, await asyncio.to_thread(decoded, item.base64))

    async def _put(self, session_id: SessionId, ref: MediaRef, body: bytes) -> None:
        await self._asking.ask(lambda: self._rows.put_media(session_id, ref, body))

    async def get(self, session_id: SessionId, sha256: str) -> MediaItem | None:
        found = await self._asking.ask(lambda: self._rows.get_media(session_id, sha256))
        if found is None:
            return None
        ref, body = found
        return MediaItem(ref=ref, base64=await asyncio.to_thread(encoded, body))
