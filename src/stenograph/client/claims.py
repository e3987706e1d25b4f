"""Claims of samples by a trainer's step, and receipts for them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, cast

from stenograph.client.errors import BadPayload


class ClaimFields(TypedDict, total=False):
    """Fields of `POST /samples/claim`; all optional, as docs/accounts.md has them."""

    lease_s: float
    group: str
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleClaim:
    """Sessions of the server at `url`, claimed for a step until a time in seconds of the epoch."""

    id: str
    step: int
    until: float
    sessions: tuple[str, ...]
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReceipt:
    """The sessions that count as trained by this claim, with so many tokens, and those it has lost: another claim may
    train them."""

    trained: tuple[str, ...]
    tokens: int
    left_out: tuple[str, ...]
    lost: tuple[str, ...]


def decoded_claim(body: Mapping[str, object], url: str) -> SampleClaim:
    """The claim of an answer. Raises BadPayload."""
    try:
        return SampleClaim(
            id=str(body["claim"]),
            step=cast("int", body["step"]),
            until=cast("float", body["until"]),
            sessions=tuple(cast("list[str]", body["sessions"])),
            url=url,
        )
    except (KeyError, TypeError) as error:
        raise BadPayload(f"an answer has no claim: {error!r}") from error


def decoded_receipt(body: Mapping[str, object]) -> SampleReceipt:
    """The receipt of an answer. Raises BadPayload."""
    try:
        trained, left_out, lost = (tuple(cast("list[str]", body[one])) for one in ("trained", "left_out", "lost"))
        return SampleReceipt(trained=trained, tokens=cast("int", body["tokens"]), left_out=left_out, lost=lost)
    except (KeyError, TypeError) as error:
        raise BadPayload(f"an answer has no receipt: {error!r}") from error
