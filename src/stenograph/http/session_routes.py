"""The routes of sessions except the chats: create, read, sample, abort, delete. Starlette endpoints.

Large answers (records, samples, drift) are computed on the CPU pool, from a snapshot taken by the loop: a committed
node does not change. The loop writes them out in pieces, and serves others between them.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stenograph.core.drift import DriftReport, num_by_class
from stenograph.core.errors import (
    InvalidRequest,
    LimitExceeded,
    SamplesInconsistent,
    SessionClaimed,
    StenographError,
    StorageUnavailable,
    TokenizationFailed,
)
from stenograph.core.json_pieces import as_list
from stenograph.core.json_types import Count, Hex32
from stenograph.core.kinds import TRAINED_KINDS, StrandKind
from stenograph.core.loaded import entry
from stenograph.core.types import LogprobsKind
from stenograph.dialects.sessions import (
    AbortRequest,
    BulkSamplesRequest,
    Nothing,
    PutOutcome,
    SamplesRequest,
    check_state,
    decode_abort,
    decode_nothing,
    decode_outcome,
    decode_samples,
)
from stenograph.export.arrow import MEDIA_TYPE, ArrowMissing, load_pyarrow, to_arrow
from stenograph.export.ledger_rows import LedgerPage, ledger_rows
from stenograph.export.records import (
    SessionMetadata,
    SessionView,
    WireOutcome,
    outcome_json,
    records,
)
from stenograph.export.replay import ReplayShape
from stenograph.export.safetensors import to_safetensors
from stenograph.export.samples import SampleSet
from stenograph.export.session_samples import JsonSamples, SampleWishes, json_samples, session_metadata, session_samples
from stenograph.export.why import SessionFindings, session_findings
from stenograph.http.create_route import decoded
from stenograph.http.line_drifts import DriftReports, LineDrifts, drift_reports
from stenograph.http.metrics import Metrics
from stenograph.http.query import check_query, is_forced, number_of
from stenograph.http.responses import in_pieces, json_in_pieces, json_response, tree_payload
from stenograph.http.route import STORED, All, Needs, Reach, Schema, in_json, one_answer, parameter, route, tag_seen_by
from stenograph.http.settings import Settings
from stenograph.offload.pool import INLINE_BELOW_BYTES, CpuPool, LoopShare
from stenograph.session.facts import session_facts
from stenograph.session.manager import SessionManager
from stenograph.session.said import put_outcome
from stenograph.session.selection import SessionFilter, SessionState, selected
from stenograph.session.services import TurnServices
from stenograph.session.session import Session
from stenograph.text.renderer import Renderer
from stenograph.trajectory.strand_facts import SessionFacts, leaves
from stenograph.trajectory.turn import Node

T = TypeVar("T")

MAX_PAGE = 1000
"""Most sessions in one `GET /sessions`."""
LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 100}

FORCE = parameter("query", "force", "`true` deletes what a trainer has claimed too.", {"enum": ["true", "false"]})

_FULL_OR_DELTA: Schema = {"type": "string", "enum": ["full", "delta"], "default": "full"}
_RECORDS = parameter("query", "records", "`delta` leaves out what earlier records contain.", _FULL_OR_DELTA)
_STRAND = parameter(
    "query", "strand", "The strand whose line is shown, the main one's by default.", {"type": "integer", "minimum": 0}
)
_LEDGER_PAGE = (
    parameter("query", "limit", "The most requests that a page has.", {**LIMIT, "default": MAX_PAGE}),
    parameter("query", "after", "The page begins after this number.", {"type": "integer", "minimum": 0}),
)

REVISION_HEADER = "x-stenograph-revision"
"""Header between processes: the revision of a session shown in a part, or to be deleted."""

_BYTES_PER_TOKEN = 8
"""The approximate cost to write out a token's id and logprob; only decides whether an answer is small enough for the
loop."""

_BYTES_PER_ROW = 64
"""The same of a turn's facts, and of a row of the ledger."""

_SENT_BYTES = 256 * 1024
"""Bytes sent at once, of a complete answer."""


class OutcomeView(TypedDict):
    """A session's outcome; null if nobody has said it."""

    session_id: Hex32
    outcome: WireOutcome | None


class Aborted(TypedDict):
    """The number of running turns that were asked to end."""

    aborted: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRoutes:
    """The session routes of one server."""

    manager: SessionManager
    metrics: Metrics
    renderer: Renderer
    pool: CpuPool
    drifts: LineDrifts
    share: LoopShare
    replay_shape: ReplayShape | None
    required_logprobs: LogprobsKind | None
    max_body_bytes: int

    @staticmethod
    def of(
        settings: Settings,
        services: TurnServices,
        manager: SessionManager,
        metrics: Metrics,
        moe_shape: tuple[int, int] | None,
    ) -> "SessionRoutes":
        """The routes of a server."""
        return SessionRoutes(
            manager=manager,
            metrics=metrics,
            renderer=services.renderer,
            pool=services.pool,
            drifts=LineDrifts(services.pool, services.renderer),
            share=services.share,
            replay_shape=None if moe_shape is None else ReplayShape(layers=moe_shape[0], top_k=moe_shape[1]),
            required_logprobs=None if settings.require_logprobs is None else LogprobsKind(settings.require_logprobs),
            max_body_bytes=settings.max_body_bytes,
        )

    @route(
        "GET /sessions/{id}",
        "getSession",
        "Get a session's records and metadata",
        SessionView,
        parameters=(_RECORDS, _STRAND),
        errors=(InvalidRequest, TokenizationFailed, *STORED),
    )
    async def get(self, request: Request) -> Response:
        """`GET /sessions/{id}?records=full|delta&strand=N`: a line's records, and metadata for a trainer.

        The line is the main strand's or strand N's; of several, the last committed one.
        """
        session = await self._look(request)
        check_query(request, "records", "strand")
        wanted = request.query_params.get("records", "full")
        if wanted not in ("full", "delta"):
            raise InvalidRequest(f"records must be 'full' or 'delta', got {wanted[:20]!r}.", param="/records")
        facts = session_facts(session)
        latest = facts.latest if (number := request.query_params.get("strand")) is None else _strand(facts, number)

        report = None if latest is None else await self.drifts.of(session.id, latest)
        work = partial(session_metadata, facts, latest, report, max_trim_tokens=self.renderer.max_trim_tokens)
        num_bytes = (0 if latest is None else latest.num_tokens * _BYTES_PER_TOKEN) + _bytes_of(facts)
        metadata = await self.pool.run(work, num_bytes=num_bytes)
        if latest is not None and report is not None:
            self._count_drift(session, {latest.id: report})
        shown = records([] if latest is None else latest.line(), delta=wanted == "delta")
        view: SessionView = {"session_id": session.id, "records": as_list(shown), "metadata": metadata}
        return json_in_pieces(self.share, view)

    @route("HEAD /sessions/{id}", "greetSession", "Check that a session is there", needs=Needs.TOKEN)
    @route("HEAD /sessions/{id}/api/hello", "greetOnSession", "Check that a session is there", needs=Needs.TOKEN)
    async def greet(self, request: Request) -> Response:
        """`HEAD` of a session's address and of `api/hello` below it, clients' first try: 200 without a body."""
        await self._look(request)
        return Response()

    @route(
        "DELETE /sessions/{id}",
        "deleteSession",
        "Delete a session",
        parameters=(FORCE,),
        answers={"204": {"description": "The session is deleted."}},
        errors=(InvalidRequest, SessionClaimed, StorageUnavailable),
    )
    async def delete(self, request: Request) -> Response:
        """`DELETE /sessions/{id}?force=true|false`; from another process giving samples out, only if the session is
        unchanged."""
        session_id, revision = request.path_params["id"], request.headers.get(REVISION_HEADER)
        if revision is not None:
            return Response(status_code=204 if await delete_as_it_was(self.manager, session_id, revision) else 409)
        check_query(request, "force")
        await self.manager.delete(session_id, force=is_forced(request))
        return Response(status_code=204)

    @route(
        "POST /sessions/{id}/samples",
        "getSamples",
        "Get a session's training samples",
        body=SamplesRequest,
        answers=one_answer(
            "The samples in the requested `format`: safetensors, Arrow, or JSON.",
            {"application/octet-stream": {}, MEDIA_TYPE: {}, **in_json(JsonSamples)},
        ),
        shapes=(JsonSamples,),
        errors=(SamplesInconsistent, TokenizationFailed, *STORED),
    )
    async def samples(self, request: Request) -> Response:
        """`POST /sessions/{id}/samples`."""
        await self._look(request)  # 404 comes before a body that is wrong
        wire = await decoded(request, decode_samples, self.pool, self.max_body_bytes)
        session = await self._look(request)
        made, metadata, num_bytes = await self.made_samples(session, self.wishes(wire))
        self.manager.sessions.note_trained(session, made.num_trained)
        if wire.format == "json":
            token_text = self.renderer.tokenizer.token_text if wire.token_texts else None
            return json_in_pieces(
                self.share, json_samples(made, metadata, token_text=token_text, with_masks=bool(wire.sampling_mask))
            )
        if wire.format == "arrow":
            try:
                await self.pool.run(load_pyarrow, num_bytes=INLINE_BELOW_BYTES)
                messages = to_arrow(made.samples, session_metadata=metadata, empty_reason=made.empty_reason)
            except ArrowMissing as error:
                raise InvalidRequest(str(error), param="/format") from error
            return StreamingResponse(self._arrow_pieces(messages, num_bytes=num_bytes), media_type=MEDIA_TYPE)
        if wire.format == "tree":
            payload = await tree_payload(self.pool, made, metadata, num_bytes)
        else:
            payload = to_safetensors(made.samples, session_metadata=metadata, empty_reason=made.empty_reason)
        return in_pieces(self.share, payload, media_type="application/octet-stream")

    @route(
        "GET /sessions/{id}/drift",
        "getDrift",
        "Get the drift of each line",
        DriftReports,
        errors=(TokenizationFailed, *STORED),
    )
    async def drift(self, request: Request) -> Response:
        """`GET /sessions/{id}/drift`: the report of each line."""
        session = await self._look(request)
        reports = await self.drift_of(session, leaves(session.nodes))
        return json_in_pieces(self.share, drift_reports(session.id, reports))

    @route(
        "GET /sessions/{id}/ledger",
        "getLedger",
        "Get the ledger: the requests for turns that named the session",
        LedgerPage,
        parameters=_LEDGER_PAGE,
        errors=(InvalidRequest, *STORED),
    )
    async def ledger(self, request: Request) -> Response:
        """`GET /sessions/{id}/ledger?limit=&after=`: every request naming the session, in order."""
        session = await self._look(request)
        check_query(request, "limit", "after")
        limit, after = number_of(request, "limit", 1000, least=1), number_of(request, "after", 0, least=0)
        if limit > MAX_PAGE:
            raise InvalidRequest(f"limit must be at most {MAX_PAGE}, got {limit}.", param="/limit")
        rows = session.ledger.rows(limit, after)
        last = rows[-1].number if rows else session.ledger.num_rows
        page: LedgerPage = {
            "session_id": session.id,
            "requests": ledger_rows(rows, session_facts(session)),
            "num_requests": session.ledger.num_requests,
            "next": last if last < session.ledger.num_rows else None,
        }
        return json_in_pieces(self.share, page)

    @route(
        "GET /sessions/{id}/why",
        "getFindings",
        "Get what there is to say about a session's samples, the worst first",
        SessionFindings,
        errors=(TokenizationFailed, *STORED),
    )
    async def why(self, request: Request) -> Response:
        """`GET /sessions/{id}/why`: the first things for a person to look at, in plain sentences."""
        session = await self._look(request)
        ledger = session.ledger
        rows = [row async for chunk in self.share.pieces(ledger.chunks()) for row in chunk]
        facts = session_facts(session)  # after the rows, whose strands it has
        by_leaf = {leaf.id: report for leaf, report in await self.drift_of(session, leaves(facts.nodes))}
        work = partial(session_findings, facts, by_leaf, rows, ledger.num_requests)
        num_bytes = _bytes_of(facts) + _BYTES_PER_ROW * len(rows)
        return json_in_pieces(self.share, await self.pool.run(work, num_bytes=num_bytes))

    @route(
        "PUT /sessions/{id}/outcome",
        "putOutcome",
        "Set the rollout's outcome, or replace it",
        OutcomeView,
        body=PutOutcome,
        errors=(LimitExceeded, *STORED),
    )
    async def put_outcome(self, request: Request) -> Response:
        """`PUT /sessions/{id}/outcome`."""
        session = await self._look(request)  # 404 comes before a body that is wrong
        outcome = await decoded(request, decode_outcome, self.pool, self.max_body_bytes)
        if outcome.turns or outcome.tokens:
            entry("stenograph.export.credit:check_credit")(outcome, session.nodes)
        await put_outcome(self.manager.sessions, request.path_params["id"], outcome)
        return await self.get_outcome(request)

    @route(
        "GET /sessions/{id}/outcome",
        "getOutcome",
        "Get the rollout's outcome",
        OutcomeView,
        errors=STORED,
    )
    async def get_outcome(self, request: Request) -> Response:
        """`GET /sessions/{id}/outcome`."""
        session = await self._look(request)
        body: OutcomeView = {"session_id": session.id, "outcome": outcome_json(session.outcome)}
        return json_response(body)

    @route(
        "POST /sessions/{id}/abort",
        "abortSession",
        "End the session's running turns",
        Aborted,
        body=Nothing,
        errors=STORED,
    )
    async def abort(self, request: Request) -> Response:
        """`POST /sessions/{id}/abort`."""
        session = await self._look(request)
        await decoded(request, decode_nothing, self.pool, self.max_body_bytes)
        is_live = self.manager.sessions.has(session.id)
        aborted: Aborted = {"aborted": await self.manager.abort(session.id) if is_live else 0}
        return json_response(aborted)

    @route(
        "POST /abort_request",
        "abortAll",
        "End every running turn, or those of a group",
        Aborted,
        body=AbortRequest,
        who=All(merge="stenograph.http.merging:sums", reach=Reach.SERVERS),
    )
    async def abort_all(self, request: Request) -> Response:
        """`POST /abort_request {"abort_all": true}` or `{"group"}`."""
        wire = await decoded(request, decode_abort, self.pool, self.max_body_bytes)
        tag = tag_seen_by(request.scope)
        if wire.group is None and not tag:
            return json_response(Aborted(aborted=await self.manager.abort(None)))
        found = selected(self.manager, SessionFilter(group=wire.group, tag=tag))
        turns = [turn async for one in found if isinstance(one, Session) for turn in one.running]
        return json_response(Aborted(aborted=sum(await asyncio.gather(*(turn.run.abort() for turn in turns)))))

    async def made_samples(self, session: Session, wishes: SampleWishes) -> tuple[SampleSet, SessionMetadata, int]:
        """A session's samples, its metadata, and about how many bytes they are, made on the pool from a snapshot.

        Raises SamplesInconsistent.
        """
        facts = session_facts(session)
        nodes = facts.nodes
        by_leaf = {leaf.id: report for leaf, report in await self.drift_of(session, leaves(nodes))}
        num_bytes = _BYTES_PER_TOKEN * sum(node.turn.num_tokens for node in nodes)
        made, metadata = await self.pool.run(
            partial(
                session_samples,
                facts,
                by_leaf,
                wishes=wishes,
                decode=self.renderer.tokenizer.decode,
                max_trim_tokens=self.renderer.max_trim_tokens,
                replay_shape=self.replay_shape,
            ),
            num_bytes=num_bytes,
        )
        return made, metadata, num_bytes

    async def _arrow_pieces(
        self, messages: Iterator[memoryview], *, num_bytes: int
    ) -> AsyncGenerator[bytes | memoryview, None]:
        """A stream's messages, each made on the pool, where making it releases the GIL, and sent in pieces."""
        while (message := await self.pool.run(lambda: next(messages, None), num_bytes=num_bytes)) is not None:
            starts = range(0, len(message), _SENT_BYTES)
            async for piece in self.share.pieces(message[start : start + _SENT_BYTES] for start in starts):
                yield piece

    def wishes(self, wire: SamplesRequest | BulkSamplesRequest) -> SampleWishes:
        """The samples for a request."""
        kinds = TRAINED_KINDS if wire.kinds is None else tuple(map(StrandKind, wire.kinds))
        return SampleWishes(
            kinds=tuple(StrandKind) if wire.include_side else kinds,
            max_seq_len=wire.max_seq_len,
            metadata=wire.metadata or {},
            include_failed=bool(wire.include_failed),
            required=self.required_logprobs,
            scores=tuple(dict.fromkeys(wire.scores or ())),
        )

    async def drift_of(self, session: Session, ends: Sequence[Node]) -> list[tuple[Node, DriftReport]]:
        """The drift of each of a session's lines, counted when it is first looked at."""
        reports = await self.drifts.of_all(session.id, ends)
        self._count_drift(session, {leaf.id: report for leaf, report in reports})
        return reports

    def _count_drift(self, session: Session, reports: Mapping[int, DriftReport]) -> None:
        """Count each line's drift once, however often it is looked at; none of a session outside memory."""
        if not self.manager.sessions.has(session.id):
            return
        for leaf_id, report in reports.items():
            if session.is_first_drift(leaf_id):
                self.metrics.drift_found({str(kind): num for kind, num in num_by_class(report).items()})

    async def _look(self, request: Request) -> Session:
        """The session of the path, to be read: one in the store alone is not woken."""
        return await self.manager.sessions.peek(request.path_params["id"])


def revision_of(session: Session) -> str:
    """It differs after each committed turn of the session."""
    latest = None if session.latest is None else session.latest.id
    return f"{len(session.nodes)} {latest} {session.strands.discarded}"


async def delete_as_it_was(manager: SessionManager, session_id: str, revision: str) -> bool:
    """Delete a session if it is still of this revision and runs no turn; returns whether it has gone."""
    try:
        session = await manager.sessions.peek(session_id)
        if session.is_busy or revision_of(session) != revision:
            return False
        await manager.delete(session_id)
    except StenographError:
        return False
    return True


def _bytes_of(facts: SessionFacts) -> int:
    return _BYTES_PER_ROW * sum(len(strand.nodes) for strand in facts.strands)


def _strand(facts: SessionFacts, number: str) -> Node | None:
    """The last turn of the strand with this number. Raises InvalidRequest if there is none."""
    if number.isascii() and number.isdecimal() and len(number) <= 6 and int(number) < len(facts.strands):
        return facts.strands[int(number)].latest
    raise InvalidRequest(
        f"strand must be a number below {len(facts.strands)}, got {number[:20]!r}: metadata.strands lists them.",
        param="/strand",
    )


_METADATA = "metadata."


def filter_of(request: Request, *others: str, filters: Sequence[str] = ("group", "state", _METADATA)) -> SessionFilter:
    """The filter in a query, of these `filters`, with `others` allowed beside it. Raises InvalidRequest."""
    query = request.query_params
    texts = {name.removeprefix(_METADATA): text for name, text in query.items() if name.startswith(_METADATA)}
    keys = [_METADATA + key for key in texts] if _METADATA in filters else []
    check_query(request, *others, *(name for name in filters if name != _METADATA), *keys)
    state = query.get("state")
    check_state(state)
    known, tag = None if state is None else SessionState(state), tag_seen_by(request.scope)
    return SessionFilter(group=query.get("group"), state=known, texts=texts, tag=tag)


def check_known(manager: SessionManager, wanted: SessionFilter) -> None:
    """Raise InvalidRequest for a state known only to the process with the session, where others may have some."""
    is_shared = manager.sessions.storage is not None and manager.sessions.storage.store.is_shared
    if is_shared and wanted.state in (SessionState.BUSY, SessionState.IDLE):
        raise InvalidRequest(
            f"state={wanted.state} cannot be asked for with --store: only the server that has a session knows whether a"
            " turn runs. Ask by group, metadata, or state=open or ended.",
            param="/state",
        )
