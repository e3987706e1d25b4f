"""Bodies of the server's own routes: opening a session, asking for samples, adding an engine. Pure.

Replies are dictionaries, encoded by the routes; the shapes of a session and its records are the miles session server's,
with more in them (docs/http-api.md).
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from stenograph.core.errors import InvalidRequest
from stenograph.core.kinds import AfterLength, Compat, HistoryKind, SaltMode, StrandKind
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.stated_options import GroupName, StatedOptions
from stenograph.core.types import token_ids
from stenograph.dialects.common.json_bodies import decode_json, decode_part
from stenograph.dialects.common.pointers import shown
from stenograph.dialects.common.sampling_rules import WireSamplingRules, name_known, sampling_rules
from stenograph.dialects.common.template_input import TemplateKwargs, check_depth, check_template_kwargs
from stenograph.dialects.settings import SAMPLE_FORMATS

BULK_FORMATS = ("safetensors", "arrow", "tree")
SESSION_STATES = ("busy", "idle", "open", "ended")
MAX_LISTED = 10_000
"""Most ids of sessions in one request."""


ScoreNames = Annotated[list[str], Meta(max_length=64)]


class CreateSession(StatedOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a new session, its budgets among them. `null` means absent.

    `compat` `miles` is `history` `linear` and `after_length` `refuse`; another value of either beside it is refused.
    """

    history: Annotated[str, Meta(extra_json_schema={"enum": [kind.value for kind in HistoryKind]})] | None = None
    matcher: str | None = None
    compat: Annotated[str, Meta(extra_json_schema={"enum": [compat.value for compat in Compat]})] | None = None
    after_length: Annotated[str, Meta(extra_json_schema={"enum": [kind.value for kind in AfterLength]})] | None = None
    metadata: dict[str, object] | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=10 * 365 * 86400)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    sampling: WireSamplingRules | None = None
    canonical: str | None = None
    support: bool | None = None
    cache_salt: Annotated[str, Meta(extra_json_schema={"enum": [mode.value for mode in SaltMode]})] | None = None


class TurnReward(msgspec.Struct, forbid_unknown_fields=True):
    """The reward of a turn, by the id of its node."""

    turn: Annotated[int, Meta(ge=0, lt=2**31)]
    reward: float


class TokenRewards(msgspec.Struct, forbid_unknown_fields=True):
    """The reward of each sampled token of a turn, by the id of its node."""

    turn: Annotated[int, Meta(ge=0, lt=2**31)]
    rewards: list[float]


class PutOutcome(msgspec.Struct, forbid_unknown_fields=True):
    """The outcome of a rollout: a reward, which is a number or numbers by name, a verdict, and words for a person.

    `null` means absent. Without a verdict it is `ok`. `turns` and `tokens` are rewards of single turns and of their
    sampled tokens.
    """

    reward: float | dict[str, float] | None = None
    verdict: Annotated[str, Meta(extra_json_schema={"enum": [verdict.value for verdict in RolloutVerdict]})] | None = (
        None
    )
    detail: Annotated[str, Meta(max_length=4096)] | None = None
    turns: list[TurnReward] | None = None
    tokens: list[TokenRewards] | None = None


class SamplesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Options of the samples. `null` means absent. `token_texts` and `sampling_mask` need `format` `json`, `arrow`
    needs pyarrow.

    `kinds` are the kinds of strands that become samples; `include_side: true` is all of them, and needs no `kinds`.
    `include_failed: true`: those of a rollout that failed by infrastructure too. `scores`: annotations by their names,
    each a number per token.
    """

    max_seq_len: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    metadata: dict[str, object] | None = None
    format: Annotated[str, Meta(extra_json_schema={"enum": list(SAMPLE_FORMATS)})] | None = None
    token_texts: bool | None = None
    kinds: list[Annotated[str, Meta(extra_json_schema={"enum": [kind.value for kind in StrandKind]})]] | None = None
    include_side: bool | None = None
    include_failed: bool | None = None
    scores: ScoreNames | None = None
    sampling_mask: bool | None = None


class BulkSamplesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Options of the samples of many sessions. `null` means absent.

    The sessions are those of the ids `sessions`, in this order, or those that have the `group`, the `state` and the
    metadata `where`, as far as these are given. `delete: true` deletes each session once its bytes have left. The rest
    is as for one session.
    """

    sessions: list[str] | None = None
    group: GroupName | None = None
    state: Annotated[str, Meta(extra_json_schema={"enum": list(SESSION_STATES)})] | None = None
    where: dict[str, object] | None = None
    delete: bool | None = None
    max_seq_len: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    metadata: dict[str, object] | None = None
    format: Annotated[str, Meta(extra_json_schema={"enum": list(BULK_FORMATS)})] | None = None
    kinds: list[Annotated[str, Meta(extra_json_schema={"enum": [kind.value for kind in StrandKind]})]] | None = None
    include_side: bool | None = None
    include_failed: bool | None = None
    scores: ScoreNames | None = None


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to end every running turn, or those of the sessions of a `group`."""

    abort_all: Annotated[bool, Meta(extra_json_schema={"const": True})] | None = None
    group: GroupName | None = None


class BackupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to copy the store. `path` is a folder on the server's machine, which does not exist or is empty."""

    path: Annotated[str, Meta(min_length=1)]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a route that takes no fields."""


class Tokenize(msgspec.Struct, forbid_unknown_fields=True):
    """A text; the spellings of control tokens in it are recognized."""

    prompt: str
    model: str | None = None


TokenIdInt = Annotated[int, Meta(ge=0, lt=2**31)]


class Detokenize(msgspec.Struct, forbid_unknown_fields=True):
    """Token ids of the model."""

    tokens: msgspec.Raw  # read in pieces
    model: str | None = None


Rewards = TypeVar("Rewards", bound=TurnReward | TokenRewards)

_CREATE = msgspec.json.Decoder(CreateSession)
_OUTCOME = msgspec.json.Decoder(PutOutcome)
_SAMPLES = msgspec.json.Decoder(SamplesRequest)
_BULK_SAMPLES = msgspec.json.Decoder(BulkSamplesRequest)
_ABORT = msgspec.json.Decoder(AbortRequest)
_BACKUP = msgspec.json.Decoder(BackupRequest)
_NOTHING = msgspec.json.Decoder(Nothing)
_TOKENIZE = msgspec.json.Decoder(Tokenize)
_DETOKENIZE = msgspec.json.Decoder(Detokenize)
_IDS: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[TokenIdInt])

_IDS_BYTES = 64 * 1024
"""Text of ids decoded at once, in half a millisecond."""

MAX_METADATA_BYTES = 64 * 1024
"""Metadata stands in every sample and in every listing."""


def _check_metadata(metadata: Mapping[str, object] | None, *, at: str = "/metadata") -> None:
    check_depth(metadata, at=at)
    if metadata and (size := len(msgspec.json.encode(metadata))) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"{at[1:]} has {size} bytes as JSON; at most {MAX_METADATA_BYTES}.", param=at)


def decode_create(body: bytes) -> tuple[CreateSession, SamplingRules | None]:
    """Read the optional body of `POST /sessions`, and the rules in it. Raises InvalidJson or InvalidRequest."""
    try:
        wire = decode_json(body, _CREATE, known=CreateSession.__struct_fields__) if body else CreateSession()
    except InvalidRequest as error:
        name_known(error, at="/sampling")
        if error.param == "/over_limit":
            error.remark_on("over_limit is 'error' or 'stop'.")
        raise
    if wire.history is not None and wire.history not in tuple(HistoryKind):
        raise InvalidRequest(
            f"history must be 'strands', 'linear' or 'tree', got {shown(wire.history)}.", param="/history"
        )
    if wire.compat is not None:
        _check_compat(wire, wire.compat)
    if wire.after_length is not None and wire.after_length not in tuple(AfterLength):
        raise InvalidRequest(
            f"after_length must be 'close' or 'refuse', got {shown(wire.after_length)}.", param="/after_length"
        )
    if wire.cache_salt is not None and wire.cache_salt not in tuple(SaltMode):
        raise InvalidRequest(
            f"cache_salt must be 'pin', 'follow' or 'off', got {shown(wire.cache_salt)}.", param="/cache_salt"
        )
    check_template_kwargs(wire.chat_template_kwargs or {}, at="/chat_template_kwargs")
    _check_metadata(wire.metadata)
    return wire, None if wire.sampling is None else sampling_rules(wire.sampling, at="/sampling")


def _check_compat(wire: CreateSession, compat: str) -> None:
    """Raise InvalidRequest for an unknown contract, or an option against it."""
    if compat not in tuple(Compat):
        raise InvalidRequest(f"compat must be 'miles', got {shown(compat)}.", param="/compat")
    for name, given, kept in (
        ("history", wire.history, HistoryKind.LINEAR),
        ("after_length", wire.after_length, AfterLength.REFUSE),
    ):
        if given is not None and given != kept:
            raise InvalidRequest(
                f"{name} is {kept.value!r} with compat 'miles', got {shown(given)}. Leave one of the two out.",
                param=f"/{name}",
            )


def decode_outcome(body: bytes) -> SessionOutcome:
    """Read the optional body of `PUT /sessions/{id}/outcome`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _OUTCOME, known=PutOutcome.__struct_fields__) if body else PutOutcome()
    if wire.verdict is not None and wire.verdict not in tuple(RolloutVerdict):
        raise InvalidRequest(
            f"verdict must be one of {', '.join(RolloutVerdict)}, got {shown(wire.verdict)}.", param="/verdict"
        )
    if isinstance(wire.reward, dict):
        _check_metadata(wire.reward, at="/reward")
    return SessionOutcome(
        verdict=RolloutVerdict.OK if wire.verdict is None else RolloutVerdict(wire.verdict),
        reward=wire.reward,
        detail=wire.detail,
        turns={row.turn: row.reward for row in _each_once(wire.turns or (), "turns")},
        tokens={row.turn: array("d", row.rewards) for row in _each_once(wire.tokens or (), "tokens")},
    )


def _each_once(rows: Sequence[Rewards], name: str) -> Sequence[Rewards]:
    """Rows of rewards. Raises InvalidRequest where a turn stands twice."""
    seen = set[int]()
    for index, row in enumerate(rows):
        if row.turn in seen:
            raise InvalidRequest(
                f"A turn has its rewards once: {row.turn} stands twice in {name}.", param=f"/{name}/{index}/turn"
            )
        seen.add(row.turn)
    return rows


def decode_samples(body: bytes) -> SamplesRequest:
    """Read the optional body of the samples route. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _SAMPLES, known=SamplesRequest.__struct_fields__) if body else SamplesRequest()
    if wire.format is not None and wire.format not in SAMPLE_FORMATS:
        raise InvalidRequest(
            f"format must be one of {', '.join(SAMPLE_FORMATS)}, got {shown(wire.format)}.", param="/format"
        )
    _check_kinds(wire)
    if wire.token_texts and wire.format != "json":
        raise InvalidRequest("token_texts needs format 'json'.", param="/token_texts")
    if wire.sampling_mask and wire.format != "json":
        raise InvalidRequest("sampling_mask needs format 'json'.", param="/sampling_mask")
    _check_metadata(wire.metadata)
    return wire


def _check_kinds(wire: SamplesRequest | BulkSamplesRequest) -> None:
    for index, kind in enumerate(wire.kinds or ()):
        if kind not in tuple(StrandKind):
            raise InvalidRequest(
                f"A kind is one of {', '.join(StrandKind)}, got {shown(kind)}.",
                param=f"/kinds/{index}",
            )
    if wire.include_side and wire.kinds is not None:
        raise InvalidRequest("include_side is all kinds: leave kinds out, or include_side.", param="/include_side")


def decode_bulk_samples(body: bytes) -> BulkSamplesRequest:
    """Read the body of `POST /samples`. Raises InvalidJson or InvalidRequest."""
    known = BulkSamplesRequest.__struct_fields__
    wire = decode_json(body, _BULK_SAMPLES, known=known) if body else BulkSamplesRequest()
    if wire.format is not None and wire.format not in BULK_FORMATS:
        raise InvalidRequest(
            f"format must be one of {', '.join(BULK_FORMATS)}, got {shown(wire.format)}.", param="/format"
        )
    check_state(wire.state)
    filters = [name for name in ("group", "state", "where") if getattr(wire, name) is not None]
    if wire.sessions is not None and filters:
        raise InvalidRequest(f"Give sessions, or {filters[0]}, not both.", param=f"/{filters[0]}")
    if wire.sessions is None and not filters:
        raise InvalidRequest("Say which sessions: give sessions, group, state or where.")
    if wire.sessions is not None and len(wire.sessions) > MAX_LISTED:
        raise InvalidRequest(f"sessions has {len(wire.sessions)} ids; at most {MAX_LISTED}.", param="/sessions")
    _check_kinds(wire)
    _check_metadata(wire.metadata)
    _check_metadata(wire.where, at="/where")
    return wire


def check_state(state: str | None) -> None:
    """Raise InvalidRequest for an unknown state."""
    if state is not None and state not in SESSION_STATES:
        raise InvalidRequest(f"state must be one of {', '.join(SESSION_STATES)}, got {shown(state)}.", param="/state")


def decode_abort(body: bytes) -> AbortRequest:
    """Read the body of `POST /abort_request`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _ABORT) if body else AbortRequest()
    if wire.abort_all is not None and wire.group is not None:
        raise InvalidRequest("Give abort_all or group, not both.", param="/group")
    if not wire.abort_all and wire.group is None:
        raise InvalidRequest(
            "abort_all must be true here, or group be given; POST /sessions/{id}/abort ends one session's turn.",
            param="/abort_all",
        )
    return wire


def decode_backup(body: bytes) -> BackupRequest:
    """Read the body of `POST /backup`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _BACKUP)
    if "\0" in wire.path:
        raise InvalidRequest("path must not contain NUL: no file system has such a name.", param="/path")
    return wire


def decode_nothing(body: bytes) -> None:
    """Read the body of a route without fields: nothing, or `{}`. Raises InvalidJson or InvalidRequest."""
    if body:
        decode_json(body, _NOTHING)


def decode_tokenize(body: bytes) -> Tokenize:
    """Read the body of `POST /tokenize`. Raises InvalidJson or InvalidRequest."""
    return decode_json(body, _TOKENIZE)


def decode_detokenize(body: bytes, *, vocab_size: int) -> "array[int]":
    """The ids in the body of `POST /detokenize`. Raises InvalidJson or InvalidRequest."""
    ids = _ids(bytes(decode_json(body, _DETOKENIZE).tokens))
    if ids and np.frombuffer(ids, dtype=ids.typecode).max() >= vocab_size:
        raise InvalidRequest(f"Not all are token ids: the vocabulary has {vocab_size} ids.", param="/tokens")
    return ids


def _ids(text: bytes) -> "array[int]":
    """A JSON list of ids, decoded in pieces, because a decoder holds the GIL; any other text is decoded whole."""
    text = text.strip()
    ids = token_ids()
    start, end = 1, len(text) - 1
    try:
        while start < end and text.startswith(b"["):
            comma = text.find(b",", start + _IDS_BYTES, end)
            stop = end if comma < 0 else comma
            ids.extend(_IDS.decode(b"[" + text[start:stop] + b"]"))
            start = stop + 1
    except msgspec.DecodeError:
        start = 1
    if start > 1:
        return ids
    whole = decode_part(text, _IDS, at="/tokens")
    return token_ids(whole)


class AddEngine(msgspec.Struct, forbid_unknown_fields=True):
    """The address of an engine of the kind that the server was started with."""

    url: Annotated[str, Meta(min_length=1, max_length=2048)]


_ADD_ENGINE = msgspec.json.Decoder(AddEngine)


def decode_engine(body: bytes) -> AddEngine:
    """Read the body. Raises InvalidJson or InvalidRequest."""
    return decode_json(body, _ADD_ENGINE, known=AddEngine.__struct_fields__)
