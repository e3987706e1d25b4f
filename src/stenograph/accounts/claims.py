"""The routes of a trainer's claims, receipts and abandonments: a session's samples are trained once.

Each is decided by the session's own process, in memory in one step, and then made durable. A claim is a lease: a
dead trainer gives its sessions back by time.
"""

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stenograph.accounts.requests import (
    AbandonBody,
    ClaimBody,
    ReceiptBody,
    decode_abandon,
    decode_claim,
    decode_receipt,
)
from stenograph.core.errors import (
    InvalidRequest,
    ModelMismatch,
    SamplesInconsistent,
    SessionDamaged,
    SessionNotFound,
    StorageUnavailable,
    WorkerUnavailable,
)
from stenograph.core.json_types import Count, Hex32
from stenograph.core.outcome import RolloutVerdict
from stenograph.dialects.sessions import SamplesRequest
from stenograph.http.bulk_parts import SessionParts
from stenograph.http.create_route import decoded
from stenograph.http.responses import json_response
from stenograph.http.route import STORED, route
from stenograph.http.session_routes import SessionRoutes
from stenograph.session.said import keep_entry
from stenograph.session.selection import SessionFilter, SessionState
from stenograph.session.session import Session
from stenograph.session.stale import STALE, abandoned_for, end_turns, is_stale
from stenograph.trajectory.account import Abandoned, Account, Claim, Entry, Receipt

CLAIM_PATH, RECEIPT_PATH, ABANDON_PATH = "/samples/claim", "/samples/receipt", "/abandon"
NOT_TRAINED = (RolloutVerdict.INFRA_FAILED, RolloutVerdict.ABORTED)
"""Verdicts of rollouts ended by something else."""


MAX_OVER = 100_000
"""Sessions beyond any claim that a process remembers: about 150 bytes each."""

_AT_ONCE = 100
"""Sessions of a request looked for in one event-loop iteration."""


class ClaimedSessions(TypedDict):
    """Sessions claimed for a step, `until` a time in seconds of the epoch."""

    claim: str
    step: Count
    until: float
    sessions: Sequence[Hex32]


class Received(TypedDict):
    """The sessions of a receipt with trained samples, the number of their trained tokens, the sessions left out, and
    those lost to the claim: do not train on them again."""

    trained: Sequence[str]
    tokens: Count
    left_out: Sequence[str]
    lost: Sequence[str]


class AbandonedSessions(TypedDict):
    """The sessions abandoned now."""

    abandoned: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRoutes:
    """The routes of one server's claims."""

    sessions: SessionRoutes
    parts: SessionParts
    max_staleness: int | None
    over: dict[str, None] = field(default_factory=dict[str, None])
    """Sessions beyond any claim, the last that this process has seen."""

    @route(
        f"POST {CLAIM_PATH}",
        "claimSamples",
        "Claim sessions for a step of the trainer",
        ClaimedSessions,
        body=ClaimBody,
        errors=(InvalidRequest, WorkerUnavailable, *STORED),
    )
    async def claim(self, request: Request) -> Response:
        """`POST /samples/claim`."""
        wire = await decoded(request, decode_claim, self.sessions.pool, self.sessions.max_body_bytes)
        until = self.sessions.manager.sessions.clock.wall() + wire.lease_s
        claim = Claim(wire.claim or uuid.uuid4().hex, wire.step, until, wire.max_seq_len)
        parts, found = self.parts.asked_by(request.scope), list[str]()
        async with aclosing(self._ids(wire, parts)) as ids:
            async for session_id in ids:
                if session_id not in self.over and await self._claimed(session_id, claim, wire, parts):
                    found.append(session_id)
                if len(found) == wire.n:
                    break
        body: ClaimedSessions = {"claim": claim.id, "step": claim.step, "until": until, "sessions": found}
        return json_response(body)

    @route(
        f"POST {RECEIPT_PATH}",
        "receiveSamples",
        "Say which samples of a claim were trained",
        Received,
        body=ReceiptBody,
        errors=(SamplesInconsistent, WorkerUnavailable, *STORED),
    )
    async def receipt(self, request: Request) -> Response:
        """`POST /samples/receipt`."""
        wire = await decoded(request, decode_receipt, self.sessions.pool, self.sessions.max_body_bytes)
        parts, trained, left_out, num_tokens = self.parts.asked_by(request.scope), list[str](), list[str](), 0
        every = dict.fromkeys(wire.trained, True) | dict.fromkeys(wire.left_out, False)
        async for session_id in _in_turn(filter(parts.shows, every)):
            is_trained = every[session_id]
            one = msgspec.structs.replace(wire, trained=[], left_out=[])
            (one.trained if is_trained else one.left_out).append(session_id)
            answer = await _passed_on(parts, session_id, RECEIPT_PATH, one)
            if answer is not None:
                trained += answer.trained
                left_out += answer.left_out
                num_tokens += answer.tokens
            elif is_trained and (num := await self._received(session_id, wire.claim)) is not None:
                trained.append(session_id)
                num_tokens += num
            elif not is_trained and await self._left_out(session_id, wire.claim):
                left_out.append(session_id)
        taken = {*trained, *left_out}
        lost = [one for one in every if one not in taken]
        body: Received = {"trained": trained, "tokens": num_tokens, "left_out": left_out, "lost": lost}
        return json_response(body)

    @route(
        f"POST {ABANDON_PATH}",
        "abandonSessions",
        "End unwanted sessions",
        AbandonedSessions,
        body=AbandonBody,
        errors=(WorkerUnavailable, *STORED),
    )
    async def abandon(self, request: Request) -> Response:
        """`POST /abandon`."""
        wire = await decoded(request, decode_abandon, self.sessions.pool, self.sessions.max_body_bytes)
        parts, abandoned = self.parts.asked_by(request.scope), list[str]()
        ids = wire.sessions
        if ids is None:
            num_ended = len([one async for one in parts.ids(SessionFilter(group=wire.group, state=SessionState.ENDED))])
            is_decided = wire.first is None or num_ended >= wire.first
            still_open = SessionFilter(group=wire.group, state=SessionState.OPEN)
            ids = [one async for one in parts.ids(still_open)] if is_decided else []
        async for session_id in _in_turn(filter(parts.shows, dict.fromkeys(ids))):
            answer = await _passed_on(
                parts, session_id, ABANDON_PATH, AbandonBody(sessions=[session_id], cause=wire.cause)
            )
            if answer is not None:
                abandoned += answer.abandoned
            elif await self._abandoned(session_id, abandoned_for(wire.cause)):
                abandoned.append(session_id)
        body: AbandonedSessions = {"abandoned": abandoned}
        return json_response(body)

    async def _ids(self, wire: ClaimBody, parts: SessionParts) -> AsyncGenerator[str, None]:
        """The sessions to try, oldest first."""
        if wire.sessions is not None:
            async for session_id in _in_turn(filter(parts.shows, dict.fromkeys(wire.sessions))):
                yield session_id
        else:
            async with aclosing(parts.ids(SessionFilter(group=wire.group, state=SessionState.ENDED))) as ids:
                async for session_id in ids:
                    yield session_id

    async def _claimed(self, session_id: str, claim: Claim, wire: ClaimBody, parts: SessionParts) -> bool:
        """Claim a session, wherever it is; whether it is the claim's."""
        one = msgspec.structs.replace(wire, n=1, claim=claim.id, group=None, sessions=[session_id])
        answer = await _passed_on(parts, session_id, CLAIM_PATH, one)
        if answer is not None:
            return bool(answer.sessions)
        session = await self._found(session_id)
        if session is None or not self._may_have(session):
            return False
        claim = msgspec.structs.replace(claim, end=session.nodes[-1].id + 1)
        if (own := _own_claim(session, claim.id)) is not None:
            await self._enter(session, _extended(own, claim))
            return True
        if self.sessions.manager.sessions.clock.monotonic() < session.held_until:
            return False
        if self.max_staleness is not None and is_stale(session, self.sessions.manager, self.max_staleness):
            await self._abandoned(session_id, abandoned_for(STALE))
            return False
        await self._enter(session, claim)
        return True

    def _may_have(self, session: Session) -> bool:
        """Whether a session came to its end, and nobody has trained or abandoned it."""
        outcome = session.outcome
        if session.account is not None and session.account.is_over:
            self._note_over(session.id)
            return False
        has_ended = outcome is not None and outcome.verdict not in NOT_TRAINED and not session.is_busy
        return has_ended and not isinstance(session.refusal, ModelMismatch) and _has_own_tokens(session)

    def _note_over(self, session_id: str) -> None:
        self.over[session_id] = None
        if len(self.over) > MAX_OVER:
            del self.over[next(iter(self.over))]

    async def _received(self, session_id: str, claim_id: str) -> int | None:
        """Note the training of a claimed session: its trained tokens; None if the claim is lost."""
        session = await self._found(session_id)
        if session is None or session.account is None:
            return None
        if session.account.receipt is not None:  # the same word again
            known = session.account.receipt
            return sum(known.trained.values()) if known.claim == claim_id else None
        claim = _own_claim(session, claim_id)
        if claim is None:
            return None
        wishes = self.sessions.wishes(SamplesRequest(max_seq_len=claim.max_seq_len))
        made, _, _ = await self.sessions.made_samples(session, replace(wishes, end=claim.end or sys.maxsize))
        session = await self._found(session_id)  # it may have left memory meanwhile, and be another by now
        if session is None or _own_claim(session, claim_id) is None:
            return None
        await self._enter(session, Receipt(claim.id, claim.step, dict(made.num_trained)))
        self._note_over(session_id)
        return sum(made.num_trained.values())

    async def _left_out(self, session_id: str, claim_id: str) -> bool:
        """Abandon a claimed session; whether the claim had it."""
        session = await self._found(session_id)
        if session is None or _own_claim(session, claim_id) is None:
            return False
        return await self._abandoned(session_id, abandoned_for("left_out"), is_own=True)

    async def _abandoned(self, session_id: str, entry: Abandoned, *, is_own: bool = False) -> bool:
        """Abandon a session of this process; whether it was not over before, nor another's (not `is_own`) by a
        claim."""
        session = await self._found(session_id)
        if session is None or (session.account is not None and session.account.is_over):
            return False
        if not is_own and self.sessions.manager.sessions.clock.monotonic() < session.held_until:
            return False
        await self._enter(session, entry)
        end_turns(session)
        return True

    async def _found(self, session_id: str) -> Session | None:
        """A live session; None also for a damaged one, which keeps nobody from the others."""
        try:
            return await self.sessions.manager.sessions.wake(session_id)
        except (SessionNotFound, SessionDamaged):
            return None

    async def _enter(self, session: Session, entry: Entry) -> None:
        """Add an entry, and wait until it is durable; without that it is taken back."""
        account, sessions = session.account or Account(), self.sessions.manager.sessions
        session.account = account
        before = account.claim, account.receipt, account.abandoned
        was_held_until, last_chat = session.held_until, session.last_chat
        account.add(entry)
        now = sessions.clock.monotonic()
        session.held_until = now + account.held_until - sessions.clock.wall()
        if not isinstance(entry, Claim):
            session.last_chat = now  # its time to live begins once more: its claim has held it until here
        try:
            await keep_entry(sessions, session, entry)
        except StorageUnavailable:
            account.claim, account.receipt, account.abandoned = before
            session.held_until = was_held_until
            if session.last_chat == now:  # no chat came meanwhile
                session.last_chat = last_chat
            raise


async def _in_turn(ids: Iterable[str]) -> AsyncGenerator[str, None]:
    """The same, with others served in between."""
    for num, session_id in enumerate(ids, start=1):
        yield session_id
        if num % _AT_ONCE == 0:
            await asyncio.sleep(0)


def _has_own_tokens(session: Session) -> bool:
    """Whether a session has a turn, and of a fork one of its own: the others are trained where they were sampled."""
    if session.options.fork is None:
        return bool(session.nodes)
    return any(len(node.turn.sampled.ids) > node.turn.num_inherited for node in session.nodes)


def _own_claim(session: Session, claim_id: str) -> Claim | None:
    """The claim on a session, if it is still this one: nobody else has claimed it since its lease ended."""
    account = session.account
    if account is None or account.is_over or account.claim is None:
        return None
    return account.claim if account.claim.id == claim_id else None


def _extended(own: Claim, claim: Claim) -> Claim:
    """A claim as it goes on: of the same step and turns, with its samples' limit where none is given. Raises
    InvalidRequest."""
    if own.step != claim.step:
        raise InvalidRequest(f"Claim {claim.id} is of step {own.step}, got step {claim.step}.", param="/step")
    return Claim(own.id, own.step, claim.until, claim.max_seq_len or own.max_seq_len, own.end or claim.end)


class _Answer(msgspec.Struct):
    """Another process's answer to one of these routes."""

    sessions: list[str] = []
    trained: list[str] = []
    left_out: list[str] = []
    abandoned: list[str] = []
    tokens: int = 0


class _Reason(msgspec.Struct):
    message: str
    param: str | None = None


class _RefusedClaim(msgspec.Struct):
    """Another process's refusal."""

    error: _Reason | str


async def _passed_on(parts: SessionParts, session_id: str, path: str, wire: msgspec.Struct) -> _Answer | None:
    """The answer of a session's process; None where it is this one. Raises WorkerUnavailable."""
    answer = await parts.passed_on(session_id, path, msgspec.json.encode(wire))
    if answer is None:
        return None
    status, body = answer
    if status == InvalidRequest.status:
        why = msgspec.json.decode(body, type=_RefusedClaim).error
        raise InvalidRequest(why) if isinstance(why, str) else InvalidRequest(why.message, param=why.param)
    if status != 200:
        raise WorkerUnavailable(f"The process of session {session_id[:40]} answered {path} with {status}.")
    return msgspec.json.decode(body, type=_Answer)
