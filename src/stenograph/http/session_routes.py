"""The routes of sessions but the chats: create, look at, sample, abort, delete. Starlette endpoints.

What is large (records, samples, drift) is worked out on the CPU pool, from a snapshot that the loop takes: a committed
node does not change. It is written out in pieces on the loop, which serves others between them.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stenograph.core.errors import InvalidRequest
from stenograph.core.settings import HistoryKind
from stenograph.export.arrow import MEDIA_TYPE, to_arrow
from stenograph.export.line_drift import line_drift
from stenograph.export.lines import leaves, tree_metadata
from stenograph.export.records import records, session_summary
from stenograph.export.replay import ReplayShape
from stenograph.export.safetensors import to_safetensors
from stenograph.export.samples import SampleSet, make_samples, to_json
from stenograph.http.metrics import Metrics
from stenograph.http.wire import in_pieces, json_in_pieces, json_response, read_body
from stenograph.offload.body_slots import LARGE_BODY_BYTES
from stenograph.offload.loop_share import LoopShare
from stenograph.offload.pool import CpuPool
from stenograph.protocol.sessions import SamplesRequest, decode_abort, decode_create, decode_nothing, decode_samples
from stenograph.render.drift import DriftReport, num_by_class
from stenograph.render.drift import to_json as drift_json
from stenograph.render.renderer import Renderer
from stenograph.session.history import Node, line_ids
from stenograph.session.manager import SessionManager
from stenograph.session.matching import MATCHERS, Matcher
from stenograph.session.session import Session, SessionOptions

T = TypeVar("T")

MAX_PAGE = 1000
"""Most sessions that one `GET /sessions` lists."""

MAX_SESSION_BODY_BYTES = 2**20
"""Most bytes of a body that has no messages, whatever `--max-body-bytes` allows."""

_BYTES_PER_TOKEN = 8
"""About what a token's id and logprob cost to write out; only decides what is small enough for the loop."""

_SENT_BYTES = 256 * 1024
"""What is sent at once of bytes that are at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDefaults:
    """What a session is created with where its creator does not say."""

    history: HistoryKind
    matcher: Matcher
    matcher_name: str
    ttl_s: float | None
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRoutes:
    """The session routes of one server. Methods are endpoints; control_routes.py binds them to paths."""

    manager: SessionManager
    metrics: Metrics
    renderer: Renderer
    pool: CpuPool
    share: LoopShare
    defaults: SessionDefaults
    replay_shape: ReplayShape | None
    max_body_bytes: int

    async def create(self, request: Request) -> Response:
        """`POST /sessions`."""
        wire = await self._decoded(request, decode_create)
        options = SessionOptions(
            history=self.defaults.history if wire.history is None else HistoryKind(wire.history),
            matcher=self._matcher(wire.matcher),
            metadata=wire.metadata or {},
            ttl_s=self.defaults.ttl_s if wire.ttl_s is None else wire.ttl_s,
            max_turns=wire.max_turns,
            max_total_tokens=wire.max_total_tokens,
            max_nodes=self.defaults.max_nodes,
            template_kwargs=wire.chat_template_kwargs or {},
        )
        session = self.manager.create(options)
        base = str(request.base_url).rstrip("/")
        return json_response({"session_id": session.id, "base_url": f"{base}/sessions/{session.id}/v1"})

    async def list_sessions(self, request: Request) -> Response:
        """`GET /sessions?limit=&after=`."""
        _check_query(request, "limit", "after")
        limit = request.query_params.get("limit", "100")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4) or not 1 <= int(limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit must be a number from 1 to {MAX_PAGE}, got {limit[:20]!r}.", param="/limit")
        page = self.manager.page(limit=int(limit) + 1, after=request.query_params.get("after"))
        shown = page[: int(limit)]
        more = shown[-1].id if len(page) > len(shown) else None
        return json_in_pieces(self.share, {"sessions": [session_summary(session) for session in shown], "next": more})

    async def get(self, request: Request) -> Response:
        """`GET /sessions/{id}?records=full|delta`: the records of the latest line, and what a trainer wants beside."""
        session = self._session(request)
        _check_query(request, "records")
        wanted = request.query_params.get("records", "full")
        if wanted not in ("full", "delta"):
            raise InvalidRequest(f"records must be 'full' or 'delta', got {wanted[:20]!r}.", param="/records")
        latest, nodes = session.history.latest, tuple(session.history.nodes)

        def metadata_and_drift() -> tuple[dict[str, object], DriftReport | None]:
            report = None if latest is None else line_drift(latest, self.renderer)
            return self._metadata(session.options, latest, nodes, report), report

        num_bytes = 0 if latest is None else latest.num_tokens * _BYTES_PER_TOKEN
        metadata, report = await self.pool.run(metadata_and_drift, num_bytes=num_bytes)
        if latest is not None and report is not None:
            self._count_drift(session, {latest.id: report})
        shown = records([] if latest is None else latest.line(), delta=wanted == "delta")
        return json_in_pieces(self.share, {"session_id": session.id, "records": shown, "metadata": metadata})

    async def delete(self, request: Request) -> Response:
        """`DELETE /sessions/{id}`."""
        await self.manager.delete(request.path_params["id"])
        return Response(status_code=204)

    async def abort(self, request: Request) -> Response:
        """`POST /sessions/{id}/abort`."""
        session = self._session(request)
        await self._decoded(request, decode_nothing)
        return json_response({"aborted": await self.manager.abort(session.id)})

    async def abort_all(self, request: Request) -> Response:
        """`POST /abort_request {"abort_all": true}`."""
        await self._decoded(request, decode_abort)
        return json_response({"aborted": await self.manager.abort(None)})

    async def drift(self, request: Request) -> Response:
        """`GET /sessions/{id}/drift`: the report of each line."""
        session = self._session(request)
        reports = await self._drift_of(leaves(session.history.nodes))
        self._count_drift(session, {leaf.id: report for leaf, report in reports})
        lines = (
            {
                "leaf": leaf.id,
                "path_node_ids": [node.id for node in leaf.line()],
                "num_tokens": leaf.num_tokens,
                "counts": num_by_class(report),
                "unrenderable": report.unrenderable,
                "mismatches": drift_json(report),
            }
            for leaf, report in reports
        )
        return json_in_pieces(self.share, {"session_id": session.id, "lines": lines})

    async def samples(self, request: Request) -> Response:
        """`POST /sessions/{id}/samples`."""
        self._session(request)  # 404 comes before a body that is wrong
        wire = await self._decoded(request, decode_samples)
        session = self._session(request)
        nodes, latest = tuple(session.history.nodes), session.history.latest
        reports = await self._drift_of(leaves(nodes))
        self._count_drift(session, {leaf.id: report for leaf, report in reports})
        by_leaf = {leaf.id: report for leaf, report in reports}
        num_bytes = _BYTES_PER_TOKEN * sum(node.turn.num_tokens for node in nodes)
        made, metadata = await self.pool.run(
            lambda: self._make_samples(nodes, latest, session.options, wire, by_leaf), num_bytes=num_bytes
        )
        if wire.format == "json":
            token_text = self.renderer.tokenizer.token_text if wire.token_texts else None
            body = {
                "samples": (to_json(sample, token_text=token_text) for sample in made.samples),
                "session_metadata": metadata,
                "empty_reason": made.empty_reason,
            }
            return json_in_pieces(self.share, body)
        if wire.format == "arrow":
            messages = to_arrow(made.samples, session_metadata=metadata, empty_reason=made.empty_reason)
            return StreamingResponse(self._arrow_pieces(messages, num_bytes=num_bytes), media_type=MEDIA_TYPE)
        payload = to_safetensors(made.samples, session_metadata=metadata, empty_reason=made.empty_reason)
        return in_pieces(self.share, payload, media_type="application/octet-stream")

    async def _arrow_pieces(
        self, messages: Iterator[memoryview], *, num_bytes: int
    ) -> AsyncGenerator[bytes | memoryview, None]:
        """A stream's messages, each made on the pool, where making it releases the GIL, and sent in pieces."""
        while (message := await self.pool.run(lambda: next(messages, None), num_bytes=num_bytes)) is not None:
            starts = range(0, len(message), _SENT_BYTES)
            async for piece in self.share.pieces(message[start : start + _SENT_BYTES] for start in starts):
                yield piece

    def _make_samples(
        self,
        nodes: Sequence[Node],
        latest: Node | None,
        options: SessionOptions,
        wire: SamplesRequest,
        reports: Mapping[int, DriftReport],
    ) -> tuple[SampleSet, dict[str, object]]:
        """The samples of a session, and its metadata. Touches no session: it runs on a worker."""
        told = {leaf_id: drift_json(report) for leaf_id, report in reports.items()}
        made = make_samples(
            nodes,
            decode=self.renderer.tokenizer.decode,
            max_seq_len=wire.max_seq_len,
            max_trim_tokens=self.renderer.max_trim_tokens,
            replay_shape=self.replay_shape,
            metadata={**options.metadata, **(wire.metadata or {})},
            mismatches={leaf_id: mismatches for leaf_id, mismatches in told.items() if mismatches is not None},
        )
        return made, self._metadata(options, latest, nodes, None if latest is None else reports[latest.id])

    def _metadata(
        self, options: SessionOptions, latest: Node | None, nodes: Sequence[Node], report: DriftReport | None
    ) -> dict[str, object]:
        """What the server says of a session, over what its creator said: of the latest line, and of the whole tree."""
        metadata: dict[str, object] = {
            **options.metadata,
            "accumulated_token_ids": line_ids(latest),
            "max_trim_tokens": self.renderer.max_trim_tokens,
        }
        mismatches = [] if report is None else drift_json(report)
        if mismatches is not None:  # a line that the template cannot show was not compared
            metadata["tito_session_mismatch"] = mismatches
        if options.history is HistoryKind.TREE:
            metadata["tree"] = tree_metadata(nodes)
        return metadata

    async def _drift_of(self, ends: Sequence[Node]) -> list[tuple[Node, DriftReport]]:
        """Each line's drift, one after the other: between two of them the worker is free for others."""
        reports: list[tuple[Node, DriftReport]] = []
        for leaf in ends:
            work = partial(line_drift, leaf, self.renderer)
            reports.append((leaf, await self.pool.run(work, num_bytes=_BYTES_PER_TOKEN * leaf.num_tokens)))
        return reports

    def _count_drift(self, session: Session, reports: Mapping[int, DriftReport]) -> None:
        """Count each line's drift once, however often it is looked at."""
        for leaf_id, report in reports.items():
            if session.is_first_look(leaf_id):
                self.metrics.drift_found({str(kind): num for kind, num in num_by_class(report).items()})

    def _session(self, request: Request) -> Session:
        return self.manager.get(request.path_params["id"])

    def _matcher(self, name: str | None) -> Matcher:
        defaults = self.defaults
        if name is None or name == defaults.matcher_name:
            return defaults.matcher
        if name not in MATCHERS:
            known = ", ".join(dict.fromkeys([*MATCHERS, defaults.matcher_name]))
            raise InvalidRequest(
                f"matcher must be one of {known}, got {name[:80]!r}. A dotted path is for the server's own settings"
                " (--matcher): it imports code.",
                param="/matcher",
            )
        return MATCHERS[name]

    async def _decoded(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """The request's body, decoded on a worker if it is large: what is in it is looked through by Python."""
        limit = min(MAX_SESSION_BODY_BYTES, self.max_body_bytes)
        body = await read_body(request.scope, request.receive, max_bytes=limit)
        if len(body) < LARGE_BODY_BYTES:
            return decode(body)
        return await self.pool.run(lambda: decode(body), num_bytes=len(body))


def _check_query(request: Request, *known: str) -> None:
    """Raise InvalidRequest for a query parameter that means nothing here."""
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(f"Unknown query parameter {name[:40]!r}; known are {', '.join(known)}.")
