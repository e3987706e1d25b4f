"""The identity of a request, by which another one is known to repeat it. Pure.

A client that lost its connection asks again. It says so by `Idempotency-Key`, the same on each attempt, or, as the
OpenAI and Anthropic SDKs do, by a retry count above 0 with the same body. Nothing else distinguishes a retry from an
agent that wants another reply to the same messages.
"""

from dataclasses import dataclass

from stenograph.core.errors import IdempotencyMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIdentity:
    """Identity of a request: its route and bytes, the key that its client gave it, and whether it is a retry.

    Bodies are compared as bytes: they are at hand, and a comparison costs less than a hash.
    """

    route: str
    body: bytes
    key: str | None = None
    is_retry: bool = False

    def is_repeated_by(self, later: "RequestIdentity") -> bool:
        """Whether `later` asks for the same turn again. Raises IdempotencyMismatch: same key, another request."""
        same = self.route == later.route and self.body == later.body
        if later.key is not None and later.key == self.key:
            if not same:
                raise IdempotencyMismatch
            return True
        # Another key says that it is another request, whatever the body.
        return same and later.is_retry and later.key is None
