"""The fate of each sampled token of a session, with its cause; and the entries of its account as turns end.

Each token has exactly one fate: the sums over all sessions, those that ended included, are the tokens that engines
sampled for them.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from stenograph.core.clock import Clock
from stenograph.core.errors import StenographError
from stenograph.core.kinds import TRAINED_KINDS, HistoryKind
from stenograph.core.outcome import RolloutVerdict, TokenFate
from stenograph.core.telemetry import TurnEnd, TurnReport
from stenograph.session.facts import session_facts
from stenograph.session.session import Session
from stenograph.session.sessions import Sessions
from stenograph.session.storage import SessionStorage
from stenograph.session.weights import Weights
from stenograph.store.codec.entries import encode_entry
from stenograph.store.codec.rows import ENTRY, Totals
from stenograph.trajectory.account import AbortedTurn, Account, Entry, LostTurn
from stenograph.trajectory.strand_facts import SessionFacts, kept_leaves, leaves
from stenograph.trajectory.turn import Node, TurnStatus

log = logging.getLogger(__name__)

STATELESS, CLIENT_LEFT, DELETED, ENDED = "stateless", "client_left", "deleted", "ended"
UPDATE, ABORT = "update", "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class FateRow:
    """Tokens of one fate by one cause. `node` is their turn; None: they are in no turn of the session any more."""

    fate: TokenFate
    cause: str
    num_tokens: int
    node: int | None = None


class SumKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The key of a sum of tokens of ended sessions, JSON in the store. Without a fate: a number of sessions."""

    group: str | None
    step: int | None
    fate: TokenFate | None
    cause: str
    tenant: str | None = None  # as it stood before there were tenants, a key without one is shorter


def fate_rows(session: Session, *, is_gone: bool = False) -> Iterator[FateRow]:
    """All sampled tokens of a session, each once. `is_gone`: nobody can train what is open still."""
    account = session.account or Account()
    facts = session_facts(session)
    trained, how = _trained(session, account)
    gone, last = dict(trained), math.inf if account.receipt is not None else max(trained, default=-1)
    superseded = _superseded(facts)
    for strand in facts.strands:
        for node in strand.nodes:
            num_trained = gone.pop(node.id, 0)
            if num_trained:
                yield FateRow(fate=TokenFate.TRAINED, cause=how, num_tokens=num_trained, node=node.id)
            if not (num_left := len(node.turn.sampled.ids) - node.turn.num_inherited - num_trained):
                continue
            if strand.kind not in TRAINED_KINDS:
                fate, cause = TokenFate.SIDE, strand.kind.value
            elif node.id in superseded:
                fate, cause = TokenFate.RETRY, "replaced"
            else:
                fate, cause = _left(node, session, account, node.id <= last, is_gone=is_gone)
            yield FateRow(fate=fate, cause=cause, num_tokens=num_left, node=node.id)
    yield from _replaced(session, account, gone, how)
    for (fate, cause), num_tokens in account.lost.items():
        yield FateRow(fate=fate, cause=cause, num_tokens=num_tokens)


def _trained(session: Session, account: Account) -> tuple[Mapping[int, int], str]:
    """The trained tokens of each turn, and how that is known. A claimed session's count by their receipt alone."""
    if account.receipt is not None:
        return account.receipt.trained, "receipt"
    return ({}, "") if account.claim is not None else (session.given, "given_out")


def _left(node: Node, session: Session, account: Account, is_settled: bool, *, is_gone: bool) -> tuple[TokenFate, str]:
    """The fate of a turn's tokens that nobody trained."""
    outcome = session.outcome
    if outcome is not None and outcome.verdict is RolloutVerdict.INFRA_FAILED:
        return TokenFate.INFRA, RolloutVerdict.INFRA_FAILED.value
    if account.abandoned is not None:
        return account.abandoned.fate, account.abandoned.cause
    if (is_settled or is_gone) and node.turn.status is TurnStatus.ABORTED:
        early = account.aborted.get(node.id)
        return TokenFate.ABORTED, ABORT if early is None else early.cause
    if is_settled:
        end = None if account.claim is None else account.claim.end
        return TokenFate.CUT, "max_seq_len" if end is None or node.id < end else "after_claim"
    return (TokenFate.DISCARDED, DELETED) if is_gone else (TokenFate.OPEN, "claimed" if account.claim else "")


def _superseded(facts: SessionFacts) -> set[int]:
    """Turns of a tree without a child that have a later sibling."""
    if facts.options.history is not HistoryKind.TREE:
        return set()
    nodes = facts.nodes
    return {leaf.id for leaf in leaves(nodes)}.difference(leaf.id for leaf in kept_leaves(nodes))


def _replaced(session: Session, account: Account, trained: Mapping[int, int], how: str) -> Iterator[FateRow]:
    """The tokens of turns that later turns replaced. `trained`: those of them trained before."""
    num_left = session.strands.discarded.num_tokens
    if num_trained := sum(trained.values()):
        yield FateRow(fate=TokenFate.TRAINED, cause=how, num_tokens=num_trained)
    kept = {node.id for node in session.nodes}
    for node, early in account.aborted.items():
        if node not in kept and node not in trained:
            num_left -= early.num_tokens
            yield FateRow(fate=TokenFate.ABORTED, cause=early.cause, num_tokens=early.num_tokens)
    if num_left := num_left - num_trained:
        yield FateRow(fate=TokenFate.RETRY, cause="replaced", num_tokens=num_left)


def num_by_fate(session: Session, *, is_gone: bool = False) -> dict[TokenFate, int]:
    """A session's sampled tokens by their fates."""
    found = dict.fromkeys(TokenFate, 0)
    for row in fate_rows(session, is_gone=is_gone):
        found[row.fate] += row.num_tokens
    return found


def step_of(session: Session) -> int | None:
    """The trainer's step that trained a session's samples; None if none did."""
    account = session.account
    return None if account is None or account.receipt is None else account.receipt.step


def last_sums(session: Session) -> dict[str, int]:
    """The rest of a session that ends: its tokens by group, step, fate and cause, as JSON keys."""
    group, step, sums = session.options.stated.group, step_of(session), Counter[str]()
    tenant = session.options.tenant
    for row in fate_rows(session, is_gone=True):
        sums[written_key(SumKey(group, step, row.fate, row.cause, tenant))] += row.num_tokens
    sums[written_key(SumKey(group, step, None, ENDED, tenant))] += 1
    return dict(sums)


def written_key(key: SumKey) -> str:
    """A key as a store keeps it."""
    whole = msgspec.structs.astuple(key)
    return msgspec.json.encode(whole if key.tenant is not None else whole[:-1]).decode()


def add_entry(session: Session, entry: Entry) -> None:
    """Add an entry to a session's account in memory."""
    session.account = session.account or Account()
    session.account.add(entry)


def enter(session: Session, entry: Entry, *, storage: SessionStorage | None, clock: Clock) -> None:
    """Add an entry to a session's account, now in memory and soon in the store. What the store does not take, this
    process remembers."""
    add_entry(session, entry)
    if storage is None or session.tail is None or session.is_closing:
        return

    def done(error: StenographError | None) -> None:
        if error is not None:
            log.warning("an entry of a session's account is not kept: %s", error)
            storage.note_unkept(session.id, entry)

    at = session.idle_since(clock)
    payload = encode_entry(entry, idle_since=at)
    storage.store.append(session.tail, payload, adds=Totals(), at=at, done=done, kind=ENTRY)


def turn_left(
    sessions: Sessions,
    session: Session | None,
    node: int | None,
    report: TurnReport,
    weights: Weights,
    tenant: str | None = None,
) -> None:
    """Note a turn that is not in its session, or that ended early, as number `node`; nothing if it sampled nothing."""
    if not report.num_completion:
        return
    if session is not None and session.account is not None and session.account.abandoned is not None:
        abandoned = session.account.abandoned
        entry: Entry = LostTurn(abandoned.fate, abandoned.cause, report.num_completion)
        if report.end is TurnEnd.COMMITTED:
            return  # it is in the session, with its fate
    elif report.end is TurnEnd.COMMITTED and node is not None:
        cause = UPDATE if weights.is_held else ABORT
        entry = AbortedTurn(node, report.num_completion, cause)
    elif report.end is TurnEnd.FAILED:
        entry = LostTurn(TokenFate.INFRA, report.code or "", report.num_completion)
    else:
        cause = CLIENT_LEFT if report.end is TurnEnd.ABANDONED else DELETED if session else STATELESS
        entry = LostTurn(TokenFate.DISCARDED, cause, report.num_completion)
    if session is not None:
        enter(session, entry, storage=sessions.storage, clock=sessions.clock)
    elif isinstance(entry, LostTurn):
        sessions.sums[written_key(SumKey(None, None, entry.fate, entry.cause, tenant))] += entry.num_tokens
