"""The payloads of rows: a session's opening, a commit, an outcome. Pure."""

import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import structs

from stenograph.core.chat import Remaining
from stenograph.core.kinds import UNLABELLED, AfterLength, Compat, HistoryKind, Label, SaltMode, StrandKind
from stenograph.core.loaded import entry
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.stated_options import StatedOptions
from stenograph.core.types import SessionId
from stenograph.core.weights import FOLLOWING, CacheSalt
from stenograph.store.codec.rows import RowDamaged
from stenograph.store.codec.turns import (
    WrittenTurn,
    maybe_read,
    maybe_written,
    object_read,
    text_read,
    text_written,
    turn_read,
    turn_written,
    values_read,
    values_written,
)
from stenograph.trajectory.canonical import Canonical, DropRule, PinPlace, PinRule
from stenograph.trajectory.commits import (
    LedgerRow,
    ModelMark,
    RequestMark,
    SessionCommit,
    SessionOpened,
    SessionOptions,
)
from stenograph.trajectory.turn import Node

FORKS = "stenograph.store.codec.forks"
"""Loaded by the first fork."""

_Text = bytes | None
_WrittenPattern = tuple[bytes, int]
_WrittenLabel = tuple[str | None, _Text, _Text]
_WrittenRequest = tuple[bytes, bytes, int, _Text, int, int, int | None, int | None]
_WrittenLedgerRow = tuple[
    tuple[int, float, bytes, bytes, bytes, _WrittenLabel, tuple[int, ...]],
    tuple[float | None, int | None, str | None, int | None, int | None],
    tuple[int, int, int],
    tuple[bytes, ...],
]


class _WrittenCommit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    turns: list[WrittenTurn]
    label: _WrittenLabel
    reply_id: str | None
    request: _WrittenRequest | None
    ledger: list[_WrittenLedgerRow]


class _WrittenFork(msgspec.Struct, array_like=True, frozen=True, gc=False):
    session_id: str
    turn: int
    token: int | None
    num_turns: int
    cut: WrittenTurn | None
    replays: bool = False  # older rows end before it


class _WrittenOpening(msgspec.Struct, array_like=True, frozen=True, gc=False):
    session_id: str
    created_at: float
    model: tuple[bytes, bytes]
    history: str
    matcher: str
    after_length: str
    metadata: bytes
    ttl_s: float | None
    limits: tuple[int | None, int | None, int | None]
    template_kwargs: bytes
    sampling: tuple[dict[str, Any], dict[str, Any]] | None
    drops: list[tuple[bytes, _WrittenPattern, int]]
    pins: list[tuple[bytes, str, _WrittenPattern | None, _WrittenPattern | None]]
    group: bytes | None
    request: _WrittenRequest | None
    support: bool = False  # older rows end before these
    compat: str | None = None
    stated: dict[str, Any] | None = None  # by name; older rows have two of them as limits
    cache_salt: tuple[str, _Text] | None = None
    fork: _WrittenFork | None = None
    tenant: str | None = None


class _WrittenOutcome(msgspec.Struct, array_like=True, frozen=True, gc=False):
    verdict: str
    reward: float | list[tuple[bytes, float]] | None
    detail: bytes | None
    idle_since: float | None = None
    turns: dict[int, float] = {}  # older rows end before these
    tokens: dict[int, bytes] = {}


_ENCODER = msgspec.msgpack.Encoder()
_COMMITS = msgspec.msgpack.Decoder(_WrittenCommit)
_OPENINGS = msgspec.msgpack.Decoder(_WrittenOpening)
_OUTCOMES = msgspec.msgpack.Decoder(_WrittenOutcome)


def encode_commit(commit: SessionCommit) -> bytes:
    """The payload of a commit's row."""
    return _ENCODER.encode(
        _WrittenCommit(
            turns=[turn_written(placed) for placed in commit.turns],
            label=_label_written(commit.label),
            reply_id=commit.reply_id,
            request=None if commit.request is None else _request_written(commit.request),
            ledger=[_ledger_row_written(row) for row in commit.ledger],
        )
    )


def decode_commit(payload: memoryview, node_of: Callable[[int], Node]) -> SessionCommit:
    """A commit. `node_of` gives the nodes of the rows before, by id. Raises RowDamaged."""
    try:
        written = _COMMITS.decode(payload)
        return SessionCommit(
            turns=tuple(turn_read(one, node_of) for one in written.turns),
            label=_label_read(written.label),
            reply_id=written.reply_id,
            request=None if written.request is None else _request_read(written.request),
            ledger=tuple(map(_ledger_row_read, written.ledger)),
        )
    except (ValueError, TypeError, KeyError) as error:  # msgspec's errors are ValueErrors
        raise RowDamaged(f"its content cannot be read: {error}") from error


def encode_opened(opened: SessionOpened) -> bytes:
    """The payload of a session's first row."""
    options = opened.options
    sampling = options.sampling
    return _ENCODER.encode(
        _WrittenOpening(
            session_id=opened.session_id,
            created_at=opened.created_at,
            model=(text_written(opened.model.name), opened.model.digest),
            history=options.history,
            matcher=options.matcher,
            after_length=options.after_length,
            metadata=msgspec.json.encode(options.metadata),
            ttl_s=options.ttl_s,
            limits=(None, None, options.max_nodes),
            template_kwargs=msgspec.json.encode(options.template_kwargs),
            sampling=None if sampling is None else (values_written(sampling.default), values_written(sampling.force)),
            drops=[
                (text_written(rule.name), (text_written(rule.block.pattern), rule.block.flags), rule.num_blocks)
                for rule in options.canonical.drops
            ],
            pins=[
                (text_written(rule.name), rule.place, _pattern_written(rule.begins), _pattern_written(rule.pattern))
                for rule in options.canonical.pins
            ],
            group=maybe_written(options.stated.group),
            request=None if opened.request is None else _request_written(opened.request),
            support=options.support,
            compat=options.compat,
            stated=msgspec.to_builtins(structs.replace(options.stated, group=None)),
            cache_salt=(options.cache_salt.mode, maybe_written(options.cache_salt.pinned)),
            fork=None if options.fork is None else entry(f"{FORKS}:fork_written")(options.fork),
            tenant=options.tenant,
        )
    )


def decode_opened(payload: memoryview) -> SessionOpened:
    """A session as it was opened. Raises RowDamaged."""
    try:
        written = _OPENINGS.decode(payload)
        return SessionOpened(
            session_id=SessionId(written.session_id),
            created_at=written.created_at,
            model=ModelMark(name=text_read(written.model[0]), digest=written.model[1]),
            options=_options_read(written),
            request=None if written.request is None else _request_read(written.request),
        )
    except (ValueError, TypeError, KeyError, re.error) as error:
        raise RowDamaged(f"its content cannot be read: {error}") from error


def _options_read(written: _WrittenOpening) -> SessionOptions:
    rules = written.sampling
    return SessionOptions(
        history=HistoryKind(written.history),
        matcher=written.matcher,
        after_length=AfterLength(written.after_length),
        metadata=object_read(written.metadata),
        ttl_s=written.ttl_s,
        stated=_stated_read(written),
        max_nodes=written.limits[2],
        template_kwargs=object_read(written.template_kwargs),
        sampling=None if rules is None else SamplingRules(default=values_read(rules[0]), force=values_read(rules[1])),
        canonical=_canonical_read(written),
        support=written.support,
        compat=None if written.compat is None else Compat(written.compat),
        cache_salt=_cache_salt_read(written.cache_salt),
        fork=None if written.fork is None else entry(f"{FORKS}:fork_read")(*structs.astuple(written.fork)),
        tenant=written.tenant,
    )


def encode_outcome(outcome: SessionOutcome, *, idle_since: float | None = None) -> bytes:
    """The payload of an outcome's row, with the time since which its session was idle."""
    reward = outcome.reward
    written = [(text_written(name), one) for name, one in reward.items()] if isinstance(reward, Mapping) else reward
    return _ENCODER.encode(
        _WrittenOutcome(
            verdict=outcome.verdict,
            reward=written,
            detail=maybe_written(outcome.detail),
            idle_since=idle_since,
            turns=dict(outcome.turns),
            tokens={node: rewards.tobytes() for node, rewards in outcome.tokens.items()},
        )
    )


def outcome_idle_since(payload: memoryview) -> float | None:
    """The time in an outcome's row; None where it has none. Raises RowDamaged."""
    try:
        return _OUTCOMES.decode(payload).idle_since
    except (ValueError, TypeError) as error:
        raise RowDamaged(f"its content cannot be read: {error}") from error


def decode_outcome(payload: memoryview) -> SessionOutcome:
    """An outcome. Raises RowDamaged."""
    try:
        written = _OUTCOMES.decode(payload)
        reward = written.reward
        return SessionOutcome(
            verdict=RolloutVerdict(written.verdict),
            reward={text_read(name): value for name, value in reward} if isinstance(reward, list) else reward,
            detail=maybe_read(written.detail),
            turns=written.turns,
            tokens={node: array("d", rewards) for node, rewards in written.tokens.items()},
        )
    except (ValueError, TypeError) as error:
        raise RowDamaged(f"its content cannot be read: {error}") from error


def _stated_read(written: _WrittenOpening) -> StatedOptions:
    found: dict[str, Any] = {"max_turns": written.limits[0], "max_total_tokens": written.limits[1]}
    if written.stated is not None:
        found = written.stated
    return structs.replace(msgspec.convert(found, StatedOptions), group=maybe_read(written.group))


def _cache_salt_read(written: tuple[str, _Text] | None) -> CacheSalt:
    if written is None:
        return FOLLOWING
    return CacheSalt(mode=SaltMode(written[0]), pinned=maybe_read(written[1]))


def _pattern_written(pattern: re.Pattern[str] | None) -> _WrittenPattern | None:
    return None if pattern is None else (text_written(pattern.pattern), pattern.flags)


def _pattern_read(written: _WrittenPattern | None) -> re.Pattern[str] | None:
    return None if written is None else re.compile(text_read(written[0]), written[1])


def _canonical_read(written: _WrittenOpening) -> Canonical:
    return Canonical(
        drops=tuple(
            DropRule(name=text_read(name), block=re.compile(text_read(block), flags), num_blocks=num_blocks)
            for name, (block, flags), num_blocks in written.drops
        ),
        pins=tuple(
            PinRule(
                name=text_read(name),
                place=PinPlace(place),
                begins=_pattern_read(begins),
                pattern=_pattern_read(pattern),
            )
            for name, place, begins, pattern in written.pins
        ),
    )


def _label_written(label: Label) -> _WrittenLabel:
    return None if label.kind is None else label.kind.value, maybe_written(label.client), maybe_written(label.rule)


def _label_read(written: _WrittenLabel) -> Label:
    kind, client, rule = written
    if kind is None and client is None and rule is None:
        return UNLABELLED
    kind_read = None if kind is None else StrandKind(kind)
    return Label(kind=kind_read, client=maybe_read(client), rule=maybe_read(rule))


def _request_written(mark: RequestMark) -> _WrittenRequest:
    budget = mark.budget
    return (
        text_written(mark.route),
        mark.body_print,
        mark.num_body_bytes,
        maybe_written(mark.key),
        mark.order,
        mark.num_begun,
        budget.context_tokens,
        budget.session_tokens,
    )


def _request_read(written: _WrittenRequest) -> RequestMark:
    route, body_print, num_bytes, key, order, num_begun, context, session = written
    return RequestMark(
        route=text_read(route),
        body_print=body_print,
        num_body_bytes=num_bytes,
        key=maybe_read(key),
        order=order,
        num_begun=num_begun,
        budget=Remaining(context_tokens=context, session_tokens=session),
    )


def _ledger_row_written(row: LedgerRow) -> _WrittenLedgerRow:
    path, dialect, client = text_written(row.path), text_written(row.dialect), text_written(row.client)
    return (
        (row.number, row.received_s, path, dialect, client, _label_written(row.label), row.overlaps),
        (row.ended_s, row.status, row.error, row.strand, row.turn),
        (row.num_prompt_tokens, row.num_cached_tokens, row.num_sampled_tokens),
        tuple(map(text_written, row.rewrites)),
    )


def _ledger_row_read(written: _WrittenLedgerRow) -> LedgerRow:
    (number, received_s, path, dialect, client, label, overlaps), end, tokens, rewrites = written
    ended_s, status, error, strand, turn = end
    return LedgerRow(
        number=number,
        received_s=received_s,
        path=text_read(path),
        dialect=text_read(dialect),
        client=text_read(client),
        label=_label_read(label),
        overlaps=overlaps,
        ended_s=ended_s,
        status=status,
        error=error,
        strand=strand,
        turn=turn,
        num_prompt_tokens=tokens[0],
        num_cached_tokens=tokens[1],
        num_sampled_tokens=tokens[2],
        rewrites=tuple(map(text_read, rewrites)),
    )
