"""The identity of a request, to recognize repeats of it. Pure.

After losing its connection, a client asks again. It says so by `Idempotency-Key`, the same on each attempt, or, as the
OpenAI and Anthropic SDKs do, by a retry count above 0 with the same body. Nothing else distinguishes a retry from an
agent that wants another reply to the same messages.
"""

import xxhash
from msgspec import Struct

from stenograph.core.chat import Remaining
from stenograph.core.errors import IdempotencyMismatch
from stenograph.trajectory.commits import RequestMark


class RequestIdentity(Struct, frozen=True, kw_only=True, gc=False):
    """Identity of a request: its route and bytes, its client's key, and whether it is a retry.

    Bodies are compared as bytes: they are at hand, and a comparison costs less than a hash.
    """

    route: str
    body: bytes
    key: str | None = None
    is_retry: bool = False

    def mark(self, *, order: int = 0, num_begun: int = 0, budget: Remaining | None = None) -> RequestMark:
        """The part of it for a store."""
        return RequestMark(
            route=self.route,
            body_print=_print_of(self.body),
            num_body_bytes=len(self.body),
            key=self.key,
            order=order,
            num_begun=num_begun,
            budget=budget or Remaining(),
        )


def is_like(one: RequestIdentity | RequestMark, other: RequestIdentity) -> bool:
    """Whether both say the same. Of a request committed before this process began there is the print of its body."""
    if isinstance(one, RequestIdentity):
        return one.route == other.route and one.body == other.body
    same_size = one.route == other.route and one.num_body_bytes == len(other.body)
    return same_size and one.body_print == _print_of(other.body)


def is_repeated(one: RequestIdentity | RequestMark, later: RequestIdentity) -> bool:
    """Whether `later` asks for the same turn again. Raises IdempotencyMismatch: same key, another request."""
    if later.key is not None and later.key == one.key:
        if not is_like(one, later):
            raise IdempotencyMismatch
        return True
    # Another key says that it is another request, whatever the body.
    return later.is_retry and later.key is None and is_like(one, later)


def _print_of(body: bytes) -> bytes:
    """XXH3 of 128 bits. It protects no secret: a client with two bodies of one print confuses only its own session."""
    return xxhash.xxh3_128_digest(body)
