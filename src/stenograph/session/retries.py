"""The identity of a request, to recognize repeats of it. Pure.

After losing its connection, a client asks again. It says so by `Idempotency-Key`, the same on each attempt, or, as the
OpenAI and Anthropic SDKs do, by a retry count above 0 with the same body. Nothing else distinguishes a retry from an
agent that wants another reply to the same messages.
"""

from dataclasses import dataclass

import xxhash
from msgspec import Struct

from stenograph.core.errors import IdempotencyMismatch


class RequestIdentity(Struct, frozen=True, kw_only=True, gc=False):
    """Identity of a request: its route and bytes, its client's key, and whether it is a retry.

    Bodies are compared as bytes: they are at hand, and a comparison costs less than a hash.
    """

    route: str
    body: bytes
    key: str | None = None
    is_retry: bool = False

    def is_like(self, other: "RequestIdentity") -> bool:
        """Whether both say the same."""
        return self.route == other.route and self.body == other.body

    def is_repeated_by(self, later: "RequestIdentity") -> bool:
        """Whether `later` asks for the same turn again. Raises IdempotencyMismatch: same key, another request."""
        return _is_repeated(self.key, later, same=self.is_like(later))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIdentity:
    """Identity of a request committed before this process began: of its body there is the print."""

    route: str
    body_print: bytes
    num_body_bytes: int
    key: str | None = None

    def is_like(self, other: RequestIdentity) -> bool:
        """Whether the other says the same."""
        same_size = self.route == other.route and self.num_body_bytes == len(other.body)
        return same_size and self.body_print == print_of(other.body)

    def is_repeated_by(self, later: RequestIdentity) -> bool:
        """As `RequestIdentity.is_repeated_by`."""
        return _is_repeated(self.key, later, same=self.is_like(later))


def print_of(body: bytes) -> bytes:
    """XXH3 of 128 bits. It protects no secret: a client with two bodies of one print confuses only its own session."""
    return xxhash.xxh3_128_digest(body)


def _is_repeated(key: str | None, later: RequestIdentity, *, same: bool) -> bool:
    if later.key is not None and later.key == key:
        if not same:
            raise IdempotencyMismatch
        return True
    # Another key says that it is another request, whatever the body.
    return same and later.is_retry and later.key is None
