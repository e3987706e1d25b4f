"""The media of one request: data URIs and base64, held to the request's limits and hashed. Pure; loaded with media.

Nothing is decoded as an image here: the engine does that, in its own process. A hash is always our own.
"""

import re
from collections.abc import Sequence

from msgspec.structs import replace

from stenograph.core.base64_text import measured
from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.messages import MediaItem, MediaKind, MediaLimits, MediaRef
from stenograph.dialects.common.pointers import shown

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""Types of images taken by every engine's image library."""

BASE64_TEXT = "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=|[A-Za-z0-9+/][AQgw]==)"
"""A pattern of bytes in base64, at least one."""

_OTHER_NAMES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg"}
_DATA_URI = re.compile(r"data:(?P<type>[^;,]*)(?P<more>(?:;[^;,]*)*),", re.IGNORECASE)
_REMOTE = re.compile(r"https?://", re.IGNORECASE)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class MediaWanted(Exception):
    """The media behind some URLs have to be fetched before the request is read again. `places` has each URL, with the
    pointer of its first place."""

    def __init__(self, places: dict[str, str]) -> None:
        super().__init__(f"{len(places)} media are to be fetched")
        self.places = places


class MediaReader:
    """Reads the media of one request, in the order of its messages."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._items: dict[str, MediaItem] = {}
        self._num = 0
        self._wanted: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<MediaReader {self._num} media>"

    def items(self) -> tuple[MediaItem, ...]:
        """All media, each once. Raises MediaWanted where some have to be fetched first."""
        if self._wanted:
            raise MediaWanted(self._wanted)
        return tuple(self._items.values())

    def count_earlier(self, refs: Sequence[MediaRef], at: str) -> None:
        """Count the media that the request names by an earlier response. Raises InvalidRequest."""
        for _ in refs:
            self._count(at)
        num_bytes = sum(ref.num_bytes for ref in refs)
        if num_bytes > self._limits.max_named_bytes:
            raise InvalidRequest(
                f"The images of the response before have {num_bytes} bytes; at most {self._limits.max_named_bytes}"
                " (--max-body-bytes).",
                param=at,
            )

    def of_url(self, url: str, at: str) -> MediaRef:
        """The image behind a URL at this pointer. Raises InvalidRequest or UnrenderableMessage."""
        head = _DATA_URI.match(url)
        if head is not None:
            if head["more"].rpartition(";")[2].strip().lower() != "base64":
                raise InvalidRequest("A data URI of an image must be base64: data:image/png;base64,…", param=at)
            return self.of_base64(url[head.end() :], head["type"], at)
        if _REMOTE.match(url) is None:
            raise InvalidRequest(f"An image is a data URI or an http URL, not {shown(url)}.", param=at)
        if not self._limits.fetches:
            raise InvalidRequest(
                "This server fetches no media by URL: send the image as a data URI (data:image/png;base64,…), or start"
                " the server with --fetch-media and the URL's host.",
                param=at,
            )
        fetched = self._limits.fetched.get(url)
        if fetched is None:
            self._wanted.setdefault(url, at)
            self._count(at)
            return MediaRef(sha256="", kind=MediaKind.IMAGE, media_type="", num_bytes=0)
        name = _known_type(fetched.ref.media_type, at)
        self._count(at)
        return self._taken(replace(fetched.ref, media_type=name), fetched.base64, at)

    def of_base64(self, text: str, media_type: str, at: str, *, is_url_safe: bool = False) -> MediaRef:
        """The image of a base64 text. `is_url_safe`: the URL's alphabet is taken too, and no padding. Raises as
        `of_url`."""
        name = _known_type(media_type, at)
        self._count(at)
        most = self._limits.max_bytes
        if len(text) > (most + 2) // 3 * 4:
            raise InvalidRequest(
                f"An image has at most {most} bytes (--max-media-bytes), this one about {len(text) // 4 * 3}.", param=at
            )
        try:
            base64 = text.encode("ascii")
            if is_url_safe:
                base64 = base64.translate(_URL_SAFE) + b"=" * (-len(base64) % 4)
            sha256, num_bytes = measured(base64)
        except ValueError as error:
            raise InvalidRequest(f"The image is not base64: {error}.", param=at) from error
        ref = MediaRef(sha256=sha256, kind=MediaKind.IMAGE, media_type=name, num_bytes=num_bytes)
        return self._taken(ref, base64, at)

    def _taken(self, ref: MediaRef, base64: bytes, at: str) -> MediaRef:
        if not ref.num_bytes:
            raise InvalidRequest("The image is empty.", param=at)
        self._items.setdefault(ref.sha256, MediaItem(ref=ref, base64=base64))
        return ref

    def _count(self, at: str) -> None:
        self._num += 1
        if self._num > self._limits.max_items:
            raise InvalidRequest(
                f"A request has at most {self._limits.max_items} images (--max-media-items).", param=at
            )


def _known_type(media_type: str, at: str) -> str:
    name = media_type.strip().lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in IMAGE_TYPES:
        raise UnrenderableMessage(
            f"Media of type {shown(media_type)} cannot be shown to the model; only {', '.join(IMAGE_TYPES)} can.",
            param=at,
        )
    return name
