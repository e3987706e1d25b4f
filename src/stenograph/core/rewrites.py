"""Rewrites: named changes to a client's request, made before it is matched and rendered, as a turn keeps them. Pure."""

import hashlib

from msgspec import Struct

MAX_KEPT_BYTES = 4096
"""The longest text kept as it was; of a longer one its hash and its length are kept."""


class AppliedRewrite(Struct, frozen=True, kw_only=True, gc=False):
    """A change made by a rule: `where`, as the client's own pointer, and the text before and after it.

    `message` is the client's number of the changed message; a turn keeps the change once, when the message is new.
    None: the change is of something every request has anew, and every turn keeps it.
    """

    rule: str
    where: str
    before: str
    after: str
    message: int | None = None


def kept_text(text: str) -> str:
    """A text as a record has it: whole, or its SHA-256 and its length in UTF-8 bytes."""
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= MAX_KEPT_BYTES:
        return text
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}, {len(encoded)} bytes"
