"""The routes answered by all processes, as their rows say: by this server's workers, and by the servers
on its database.

An ASGI application around each process's own. The request goes to all workers as it came, each checks it as its own,
and their answers become one; an error of any of them is the answer. Another server is asked then, once: a question
between servers is about the asked one alone. Pauses, weights and engines stay each server's own, because each
knows only its own engines; the answer names the servers not asked.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenograph.cluster.forwarding import is_for_anyone, seen_by
from stenograph.cluster.leased_owners import LeasedOwners
from stenograph.cluster.owners import number_of
from stenograph.cluster.peer_connection import is_passed_on, is_workers_own
from stenograph.cluster.peer_routes import KEY_HEADER, OPENED_PATH
from stenograph.cluster.peers import PeerAnswer, Peers, for_asker, named
from stenograph.cluster.way import end_to_end
from stenograph.core.errors import (
    IdempotencyMismatch,
    StenographError,
    StorageUnavailable,
    WorkerUnavailable,
)
from stenograph.core.loaded import entry
from stenograph.core.types import SessionId
from stenograph.http.auth import PASSED_ON, SESSION_ID, session_named
from stenograph.http.processes import ServedApp
from stenograph.http.route import All, Asking, Needs, Reach, Route, Who
from stenograph.http.wire import ClientGone, count_error, header_value, read_body, send_refusal
from stenograph.session.keyed_sessions import OpenedElsewhere

LOOK_S = 5.0
"""Longest time for a worker to answer a cheap question."""

MAX_BODY_BYTES = 2**20

NOT_ASKED = b"x-stenograph-not-asked"
"""Header of an answer by one server: the addresses of the others, with commas."""

Answers = Sequence[PeerAnswer]
Merge = Callable[[Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request to all. `scope` is the asker's."""

    scope: Scope
    method: str
    path: str
    query: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @property
    def target(self) -> str:
        return self.path + (f"?{self.query}" if self.query else "")


class Gathering:
    """One process's application, and before it the routes of all."""

    def __init__(
        self,
        served: ASGIApp,
        app: ServedApp,
        rows: Sequence[Route],
        *,
        of_workers: ASGIApp | None,
        peers: Peers,
        own: int,
        leases: LeasedOwners | None,
        check: Callable[[Scope], None],
        by_credential: bool,
        long_s: float,
    ) -> None:
        """`of_workers` are the routes between workers; None: the server has one process. `leases` know
        the other servers, and each process the sessions of all, from a database. `check` is `seen_by`'s. `long_s`: the
        longest time for a process to do work."""
        self._served = served
        self._app = app
        self._of_workers = of_workers
        self._peers = peers
        self._own = own
        self._leases = leases
        self._check = check
        self._by_credential = by_credential
        self._long_s = long_s
        ways: Mapping[Asking, Callable[..., Awaitable[PeerAnswer]]] = {
            Asking.EACH: self._each,
            Asking.BRIEFLY: self._briefly,
            Asking.IN_TURN: self._one_by_one,
            Asking.WHOEVER: self._whoever,
            Asking.READINESS: self._readiness,
            Asking.PAGES: self._list,
        }
        gathered = [(row, row.who) for row in rows if isinstance(row.who, All)]
        self._of_server: Mapping[tuple[str, str], Callable[[_Asked], Awaitable[PeerAnswer]]] = {
            (row.method, row.path): partial(ways[who.ask], merge=entry(who.merge) if who.merge else None)
            for row, who in gathered
            if of_workers is not None and not (leases is not None and who.reach is Reach.NOBODY)
        }
        self._of_servers: Mapping[tuple[str, str], Merge] = {
            (row.method, row.path): entry(who.merge)
            for row, who in gathered
            if leases is not None and who.reach is Reach.SERVERS
        }

        paths = (row.path for row in rows if row.who is Who.SERVER and row.needs is Needs.ADMIN)
        self._own_paths = tuple(path.partition("{")[0] for path in paths)
        """The beginnings of paths for each server's own engines."""

    def __repr__(self) -> str:
        return f"<Gathering of {self._peers!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, for HTTP."""
        if is_workers_own(scope) and self._of_workers is not None and scope["path"].startswith("/workers/"):
            await self._of_workers(scope, receive, send)
            return
        leases = self._leases
        if leases is not None and await self._refused(leases, scope, send):
            return
        at, is_own = (scope["method"], scope["path"]), is_workers_own(scope)
        is_alone = leases is None or is_own or header_value(scope, PASSED_ON) is not None
        of_server = None if is_own else self._of_server.get(at)
        of_servers = None if is_alone else self._of_servers.get(at)
        if of_server is None and of_servers is None:
            if leases is not None and not is_alone and scope["path"].startswith(self._own_paths):
                send = await _naming_others(leases, send)
            await self._served(scope, receive, send)
            return
        try:
            asked = _Asked(
                scope=scope,
                method=scope["method"],
                path=scope["path"],
                query=scope["query_string"].decode("latin-1"),
                headers=scope["headers"],
                body=await read_body(scope, receive, max_bytes=MAX_BODY_BYTES),
            )
            answer = await (of_server or self._here)(asked)
            if of_servers is not None and leases is not None and answer.status == 200:
                others = [await self._at(server, asked) for server in await leases.servers()]
                answer = _with_body(answer, of_servers([answer.body, *others]))
            await _send(send, answer)
        except ClientGone:
            return
        except StenographError as error:
            count_error(self._app.metrics, error)
            await send_refusal(send, self._app.refuse(error))

    async def _refused(self, leases: LeasedOwners, scope: Scope, send: Send) -> bool:
        """Refuse a request passed on to this process, if another has its session: it is passed on once. From
        then on memory holds nothing of another's."""
        leases.settle()
        if not is_passed_on(scope) and header_value(scope, PASSED_ON) is None:
            return False
        session_id = session_named(scope, by_id=self._by_credential)
        if session_id is None or SESSION_ID.fullmatch(session_id) is None or is_for_anyone(scope):
            return False
        try:
            error: StenographError | None = await leases.elsewhere(session_id)
        except StorageUnavailable as failure:
            error = failure
        if error is not None:
            error = seen_by(scope, error, self._check)
            count_error(self._app.metrics, error)
            await send_refusal(send, self._app.refuse_at(scope["path"], error))
        return error is not None

    async def _here(self, asked: _Asked) -> PeerAnswer:
        """The answer of this process alone."""
        starts: list[Message] = []
        pieces: list[bytes] = []

        async def whole() -> Message:
            return {"type": "http.request", "body": asked.body, "more_body": False}

        async def take(message: Message) -> None:
            if message["type"] == "http.response.start":
                starts.append(message)
            else:
                pieces.append(bytes(message.get("body", b"")))

        await self._served({**asked.scope, "extensions": {}}, whole, take)  # it goes to nobody's connection
        return PeerAnswer(status=starts[0]["status"], headers=starts[0]["headers"], body=b"".join(pieces))

    async def _at(self, server: str, asked: _Asked) -> bytes:
        """The answer of another server. Raises WorkerUnavailable."""
        target, headers = for_asker(asked.scope, asked.target)
        answer = await self._peers.ask(server, asked.method, target, headers, asked.body, timeout_s=self._long_s)
        if answer.status != 200:
            raise WorkerUnavailable(
                f"{named(server)} answered with {answer.status}; this server has done its part. Ask again."
            )
        return answer.body

    async def _all(self, asked: _Asked, timeout_s: float) -> Answers:
        """The answers of all workers. Raises WorkerUnavailable."""
        answers = await self._peers.ask_all(asked.method, asked.target, asked.headers, asked.body, timeout_s=timeout_s)
        given: list[PeerAnswer] = []
        for answer in answers:
            if isinstance(answer, WorkerUnavailable):
                raise answer
            given.append(answer)
        return given

    async def _each(self, asked: _Asked, *, merge: Merge) -> PeerAnswer:
        return _merged(await self._all(asked, self._long_s), merge)

    async def _briefly(self, asked: _Asked, *, merge: Merge) -> PeerAnswer:
        return _merged(await self._all(asked, LOOK_S), merge)

    async def _one_by_one(self, asked: _Asked, *, merge: Merge) -> PeerAnswer:
        """Ask one worker after the other, until one refuses."""
        answers: list[PeerAnswer] = []
        for worker in range(self._peers.num):
            answer = await self._peers.ask(
                worker, asked.method, asked.target, asked.headers, asked.body, timeout_s=self._long_s
            )
            answers.append(answer)
            if answer.status != 200:
                return answer
        return _merged(answers, merge)

    async def _whoever(self, asked: _Asked, *, merge: Callable[[Mapping[int, bytes]], bytes]) -> PeerAnswer:
        answers = await self._peers.ask_all(asked.method, asked.target, asked.headers, timeout_s=LOOK_S)
        given = {worker: answer for worker, answer in enumerate(answers) if isinstance(answer, PeerAnswer)}
        if not given:
            return await self._own_answer(asked)
        answer = next(iter(given.values()))
        return _refused([*given.values()]) or _with_body(
            answer, merge({worker: one.body for worker, one in given.items()})
        )

    async def _readiness(self, asked: _Asked, *, merge: Callable[..., tuple[bool, bytes]]) -> PeerAnswer:
        answers = await self._peers.ask_all(asked.method, asked.target, asked.headers, timeout_s=LOOK_S)
        given = [answer for answer in answers if isinstance(answer, PeerAnswer)]
        for answer in given:
            if answer.status not in (200, 503) or not answer.body.startswith(b'{"ready"'):
                return answer
        if not given:
            return await self._own_answer(asked)
        is_ready, body = merge([one.body for one in given], num_away=len(answers) - len(given))
        return PeerAnswer(status=200 if is_ready else 503, headers=given[0].headers, body=body)

    async def _own_answer(self, asked: _Asked) -> PeerAnswer:
        return await self._peers.ask(
            self._own, asked.method, asked.target, asked.headers, asked.body, timeout_s=self._long_s
        )

    async def _list(self, asked: _Asked, *, merge: None) -> PeerAnswer:
        """A page of the sessions of all workers: those of the first, then those of the second, and so on."""
        query = dict(parse_qsl(asked.query, keep_blank_values=True))
        after, limit = query.pop("after", None), query.pop("limit", "100")
        worker, num_left = 0, int(limit) if limit.isascii() and limit.isdecimal() and len(limit) <= 4 else 0
        if after is not None:
            found = number_of(after, self._peers.num)
            worker = self._own if found is None else found  # which refuses it
        sessions: list[msgspec.Raw] = []
        answer: PeerAnswer | None = None
        while worker < self._peers.num:
            # Once the page is full, whether there is more: one session of the next worker that has any.
            wanted = {"limit": limit if answer is None else str(num_left or 1)}
            if after is not None:
                wanted["after"] = after
            answer = await self._page(worker, {**query, **wanted}, asked)
            if answer.status != 200:
                return answer
            page = msgspec.json.decode(answer.body, type=_Page)
            if not num_left and sessions:
                if page.sessions:
                    return _with_body(answer, msgspec.json.encode(_Page(sessions=sessions, next=_id_of(sessions[-1]))))
            else:
                sessions += page.sessions
                num_left -= len(page.sessions)
                if page.next is not None:
                    return _with_body(answer, msgspec.json.encode(_Page(sessions=sessions, next=page.next)))
            worker, after = worker + 1, None
        assert answer is not None
        return _with_body(answer, msgspec.json.encode(_Page(sessions=sessions, next=None)))

    async def _page(self, worker: int, query: Mapping[str, str], asked: _Asked) -> PeerAnswer:
        target = f"{asked.path}?{urlencode(query)}"
        return await self._peers.ask(worker, asked.method, target, asked.headers, timeout_s=self._long_s)


def opened_elsewhere(peers: Peers, *, own: int) -> OpenedElsewhere:
    """Asks the other workers whether they have opened a session with a key. Raises IdempotencyMismatch if one has with
    another body, and WorkerUnavailable."""

    async def find(key: str, body: bytes) -> SessionId | None:
        for worker in range(peers.num):
            if worker == own:
                continue
            headers = [(KEY_HEADER.encode(), key.encode("latin-1"))]
            answer = await peers.ask(worker, "POST", OPENED_PATH, headers, body, timeout_s=LOOK_S)
            if answer.status == IdempotencyMismatch.status:
                raise IdempotencyMismatch
            if answer.status != 200:
                raise WorkerUnavailable(f"worker {worker} cannot say whether it has opened this session.")
            if (found := msgspec.json.decode(answer.body, type=str | None)) is not None:
                return SessionId(found)
        return None

    return find


class _Page(msgspec.Struct):
    """A page of sessions, as it goes out."""

    sessions: list[msgspec.Raw]
    next: str | None


class _Listed(msgspec.Struct):
    session_id: str


def _id_of(session: msgspec.Raw) -> str:
    return msgspec.json.decode(session, type=_Listed).session_id


def _refused(answers: Answers) -> PeerAnswer | None:
    """The first without success."""
    return next((answer for answer in answers if answer.status != 200), None)


def _merged(answers: Answers, merge: Merge) -> PeerAnswer:
    """The one answer of all, or the first without success."""
    return _refused(answers) or _with_body(answers[0], merge([answer.body for answer in answers]))


def _with_body(answer: PeerAnswer, body: bytes) -> PeerAnswer:
    return PeerAnswer(status=answer.status, headers=answer.headers, body=body)


async def _naming_others(leases: LeasedOwners, send: Send) -> Send:
    """Sends an answer with the servers not asked."""
    try:
        others = ", ".join(await leases.servers())
    except StorageUnavailable:
        others = "unknown: the database does not answer"

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start" and others:
            message = {**message, "headers": [*message["headers"], (NOT_ASKED, others.encode("latin-1"))]}
        await send(message)

    return sent


async def _send(send: Send, answer: PeerAnswer) -> None:
    headers = [pair for pair in end_to_end(answer.headers) if pair[0] not in (b"server", b"date")]
    headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
