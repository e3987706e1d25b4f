"""Requests for claims, receipts and abandonments, as they come. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta

from stenograph.core.errors import InvalidRequest
from stenograph.core.stated_options import GroupName
from stenograph.dialects.common.json_bodies import decode_json
from stenograph.dialects.sessions import MAX_LISTED

CAUSES = ("decided", "left_out", "stale")
Step = Annotated[int, Meta(ge=0, lt=2**53)]
ClaimId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Ids = Annotated[list[str], Meta(max_length=MAX_LISTED)]


class ClaimBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A claim of at most `n` ended sessions, of those with the `group` or the ids `sessions` if either is given.
    `null` means absent.

    The trainer's `step` has them for `lease_s` seconds. `max_seq_len` is the limit of the samples to train. The same
    `claim` again, with the same step, extends it.
    """

    step: Step
    n: Annotated[int, Meta(ge=1, le=MAX_LISTED)]
    lease_s: Annotated[float, Meta(gt=0, le=7 * 86400)] = 600.0
    claim: ClaimId | None = None
    group: GroupName | None = None
    sessions: Ids | None = None
    max_seq_len: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class ReceiptBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The claimed sessions with `trained` samples, and those `left_out` for good. The others come back at the
    end of the lease."""

    claim: ClaimId
    trained: Ids
    left_out: Ids = []


class AbandonBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Unwanted sessions: of the ids `sessions`, or of the `group` those without an outcome, once `first` of it
    have one. `null` means absent."""

    sessions: Ids | None = None
    group: GroupName | None = None
    first: Annotated[int, Meta(ge=0, le=MAX_LISTED)] | None = None
    cause: Annotated[str, Meta(extra_json_schema={"enum": list(CAUSES)})] = CAUSES[0]


_CLAIM = msgspec.json.Decoder(ClaimBody)
_RECEIPT = msgspec.json.Decoder(ReceiptBody)
_ABANDON = msgspec.json.Decoder(AbandonBody)


def decode_claim(body: bytes) -> ClaimBody:
    """Read the body of `POST /samples/claim`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _CLAIM, known=ClaimBody.__struct_fields__)
    if wire.group is not None and wire.sessions is not None:
        raise InvalidRequest("Give group or sessions, not both.", param="/group")
    return wire


def decode_receipt(body: bytes) -> ReceiptBody:
    """Read the body of `POST /samples/receipt`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _RECEIPT, known=ReceiptBody.__struct_fields__)
    if both := set(wire.trained).intersection(wire.left_out):
        raise InvalidRequest(f"A session is trained or left out, not both: {min(both)[:40]!r}.", param="/left_out")
    return wire


def decode_abandon(body: bytes) -> AbandonBody:
    """Read the body of `POST /abandon`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _ABANDON, known=AbandonBody.__struct_fields__) if body else AbandonBody()
    if (wire.sessions is None) is (wire.group is None):
        raise InvalidRequest("Say which sessions: give sessions or group.", param="/sessions")
    if wire.first is not None and wire.group is None:
        raise InvalidRequest("first counts a group's sessions: give group too.", param="/first")
    if wire.cause not in CAUSES:
        raise InvalidRequest(f"cause is one of {', '.join(CAUSES)}, got {wire.cause[:40]!r}.", param="/cause")
    return wire
