"""Fetches media that a request names by URL, from the hosts of --fetch-media. Loaded with the first such request.

The laws: only a named host; only addresses of the public internet, checked where the connection goes, so that a name
cannot mean another address a moment later; no redirect is followed; bytes and time are bounded, those of all media of a
request together as those of a request are.
"""

import asyncio
import hashlib
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec.structs import replace

from stenograph.core.base64_text import encoded
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import MediaItem, MediaKind, MediaRef
from stenograph.dialects.base import Decoded, Incoming
from stenograph.dialects.common.media import MediaWanted
from stenograph.dialects.common.pointers import shown

FETCH_S = 10.0
"""Time for all media of a request."""
MAX_AT_ONCE = 8

Address = IPv4Address | IPv6Address
_NAT64 = IPv6Network("64:ff9b::/32")
_UNICAST = IPv6Network("2000::/3")
"""All of IPv6 that was given to the public internet. Outside are IPv4 in other spellings, and site-local addresses,
global for Python 3.11."""
_OTHERS = (ip_network("168.63.129.16/32"), ip_network("192.88.99.0/24"), ip_network("3fff::/20"))
"""Azure's host, relays of 6to4, documentation: global for Python, and no server of pictures."""


class NotPublic(OSError):
    """A name means an address that media are not fetched from."""


def is_public(address: Address) -> bool:
    """Whether an address is of the public internet, also by what it stands for in IPv4."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            return is_public(inner)
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in one for one in _OTHERS)


async def addresses_of(host: str, family: socket.AddressFamily) -> list[str]:
    """The addresses of a name, as the system looks them up. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    return [str(address) for *_, (address, *_) in found]


Lookup = Callable[[str, socket.AddressFamily], Awaitable[Sequence[str]]]


class CheckedResolver(AbstractResolver):
    """Resolves a name to addresses that are all allowed: aiohttp connects to these, and asks nobody again."""

    def __init__(self, allows: Callable[[Address], bool], lookup: Lookup = addresses_of) -> None:
        self._allows = allows
        self._lookup = lookup

    def __repr__(self) -> str:
        return "<CheckedResolver>"

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        results: list[ResolveResult] = []
        for text in await self._lookup(host, family):
            address = ip_address(text.partition("%")[0])
            if not self._allows(address):
                raise NotPublic(f"{host} is {text}, which is not an address of the public internet")
            results.append(
                ResolveResult(
                    hostname=host,
                    host=text,
                    port=port,
                    family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                    proto=socket.IPPROTO_TCP,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        return results

    async def close(self) -> None:
        """Nothing is held."""


class MediaFetcher:
    """Fetches for one request. `most_bytes` are those of all media together; `allows` says which addresses may be
    connected to, `lookup` gives those of a name."""

    def __init__(
        self,
        hosts: Collection[str],
        *,
        most_bytes: int,
        allows: Callable[[Address], bool] = is_public,
        lookup: Lookup = addresses_of,
    ) -> None:
        self._hosts = frozenset(hosts)
        self._most_bytes = self._num_left = most_bytes
        self._resolver = CheckedResolver(allows, lookup)
        self._allows = allows

    def __repr__(self) -> str:
        return f"<MediaFetcher of {len(self._hosts)} hosts>"

    async def decoded(self, decode: Callable[[Incoming], Awaitable[Decoded]], incoming: Incoming) -> Decoded:
        """Decode a request, with its media fetched first where it names any by URL. Raises InvalidRequest."""
        try:
            return await decode(incoming)
        except MediaWanted as wanted:
            urls = wanted.places
        fetched = await self.fetch(urls, max_bytes=incoming.media.max_bytes)
        return await decode(replace(incoming, media=replace(incoming.media, fetched=fetched)))

    async def fetch(self, places: dict[str, str], *, max_bytes: int) -> dict[str, MediaItem]:
        """The media behind URLs, each with its place in the request. Raises InvalidRequest: the first that fails."""
        for url, at in places.items():
            self._check(url, at)
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, limit=MAX_AT_ONCE, force_close=True
        )
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=FETCH_S),
            headers={"accept": "image/*", "accept-encoding": "identity"},
            auto_decompress=False,
        ) as session:
            jobs = [self._one(session, url, at, max_bytes) for url, at in places.items()]
            return dict(zip(places, await asyncio.gather(*jobs), strict=True))

    def _check(self, url: str, at: str) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidRequest(f"{shown(url)} is no URL: {error}.", param=at) from error
        if "@" in parts.netloc or host not in self._hosts:
            raise InvalidRequest(
                f"Media are fetched from {', '.join(sorted(self._hosts))} (--fetch-media), not from {shown(host)}.",
                param=at,
            )
        try:
            address = ip_address(host)
        except ValueError:
            return  # a name, which the resolver checks
        if not self._allows(address):
            raise InvalidRequest(f"{host} is not an address of the public internet.", param=at)

    async def _one(self, session: aiohttp.ClientSession, url: str, at: str, max_bytes: int) -> MediaItem:
        try:
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise InvalidRequest(f"{shown(url)} was answered with status {answer.status}.", param=at)
                content = await self._read(answer, max_bytes, at)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            reason = str(cause) or f"no answer within {FETCH_S:g} s"
            raise InvalidRequest(f"{shown(url)} cannot be fetched: {reason}.", param=at) from error
        return await asyncio.to_thread(_item, content, answer.content_type)

    async def _read(self, answer: aiohttp.ClientResponse, max_bytes: int, at: str) -> bytes:
        """The bytes of an answer. Raises InvalidRequest where there are too many."""
        content = bytearray()
        async for piece in answer.content.iter_chunked(64 * 1024):
            content += piece
            self._num_left -= len(piece)
            if len(content) > max_bytes:
                what = f"The image at {shown(str(answer.url))} has more than {max_bytes} bytes (--max-media-bytes)."
                raise InvalidRequest(what, param=at)
            if self._num_left < 0:
                what = f"The images fetched for a request have at most {self._most_bytes} bytes (--max-body-bytes)."
                raise InvalidRequest(what, param=at)
        return bytes(content)


def _item(content: bytes, media_type: str) -> MediaItem:
    """Work for a thread: the hash and the base64 of megabytes."""
    sha256 = hashlib.sha256(content).hexdigest()
    ref = MediaRef(sha256=sha256, kind=MediaKind.IMAGE, media_type=media_type, num_bytes=len(content))
    return MediaItem(ref=ref, base64=encoded(content))
