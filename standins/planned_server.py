"""The common part of stand-ins for engines' servers: scripts that are played to requests, over a real socket.

Owns the scripts, the requests under way, and what was asked; whoever uses one waits here for what it has come to, and
lets go on what is held. Nothing in it waits for time. Knows no engine: which routes there are, and how a reply is
spelled, a subclass says.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from standins.faults import Answer, Fault, FaultyConnection, HttpRequest, Pairs, send, send_events
from standins.weight_versions import CachedPrompt, CacheKey, PrefixCache

Logprobs = Sequence[tuple[int, float]]
"""Ids and their logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyScript:
    """One reply. `text` None means the ids as text; `logprobs` None that of the i-th id is -(i + 1) / 8.

    A `paused` script has drawn the first `num_drawn` ids, and goes on when released; aborted, it answers with just
    those, unless this is one of the first `ignored_aborts` for it. `status` and `body` override what is answered, or,
    with `error_event`, are an event within a 200. `edit` changes the reply, or each event of a stream, before it is
    written; where it returns bytes, they are written instead of a whole reply. What a `released` one's fault would hold
    goes on at once. `tool_calls` are `(id, name, arguments)`. `tops` are the alternatives at each position; without
    them, `num_top` made up ones come with each id. `supports` are the ids that could be drawn at each; without them,
    the id alone. A stream has `per_event` tokens in each event, and `events` instead of all of them where those are
    given.
    """

    ids: tuple[int, ...] = ()
    text: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    finish: str = "stop"
    matched: int | str | None = None
    num_cached: int = 0
    num_top: int = 0
    weight_version: str | int | None = "default"
    routed_experts: bytes | None = None
    indexer_topk: bytes | None = None
    triples: bool = True
    paused: bool = False
    num_drawn: int = 0
    ignored_aborts: int = 0
    status: int = 200
    body: bytes | None = None
    content_type: str = "application/json"
    headers: Pairs = ()
    fault: Fault = Fault.NONE
    released: bool = False
    edit: Callable[[dict[str, Any]], object] | None = None
    logprobs: tuple[float, ...] | None = None
    tops: tuple[Logprobs, ...] = ()
    supports: tuple[tuple[int, ...], ...] = ()
    per_event: int = 1
    events: tuple[bytes, ...] | None = None
    error_event: bool = False
    cut_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRequest:
    """A request that came. `json` is its body where that is an object, else empty."""

    method: str
    path: str
    headers: Pairs
    body: bytes
    json: dict[str, Any]

    def header(self, name: str) -> str | None:
        """The first header of this lower-case name."""
        return next((value for other, value in self.headers if other == name), None)


@dataclass(slots=True)
class Play:
    """A script under way for one request, whose prompt is `cached` in the server's cache, if that has one. `versions`
    are the weights' for each token that was drawn in a stream, or before it was held."""

    rid: str
    script: ReplyScript
    asked: AskedRequest
    go: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False
    num_aborts: int = 0
    versions: list[str | int | None] = field(default_factory=list[str | int | None])
    cached: CachedPrompt | None = None

    @property
    def finish(self) -> str:
        """The finish reason."""
        return "abort" if self.aborted else self.script.finish

    @property
    def ids(self) -> tuple[int, ...]:
        """All sampled tokens: fewer than planned, if it was aborted."""
        script = self.script
        if not self.aborted:
            return script.ids
        return script.ids[: script.num_drawn if script.paused else len(self.versions)]

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Those of its ids."""
        num = len(self.ids)
        return (self.script.logprobs or tuple(-(i + 1) / 8 for i in range(num)))[:num]

    @property
    def tops(self) -> Sequence[Logprobs]:
        """The alternatives at each position; empty where there are none."""
        made_up: Logprobs = [(i, -(i + 1) / 8) for i in range(self.script.num_top)]
        return self.script.tops[: len(self.ids)] or ([made_up] * len(self.ids) if made_up else [])

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were cached: as found, or as planned."""
        return self.script.num_cached if self.cached is None else self.cached.num_found

    @property
    def num_prompt(self) -> int:
        """The number of ids that were sent."""
        return len(self.asked.json.get("input_ids") or ())


def utf8_ids(text: str) -> list[int]:
    """The tokenizer of a stand-in without one: a byte is a token."""
    return list(text.encode())


def utf8_text(ids: Sequence[int]) -> str:
    """The other way; ids that are no bytes show as `?`."""
    return bytes(id_ if id_ < 256 else 63 for id_ in ids).decode(errors="replace")


class PlannedServer(ABC):
    """A server at `url`. `async with` starts and ends it; it can be started again, at the same port.

    `abort_status` and `health_status` are what those routes answer. `answers` says what is replied where nothing is
    planned, else there is always the same; `routes` answers the paths that the engine does not have, None where there
    is none. Without `remembers` nothing is kept of what was asked: for servers that run for long. `weight_version`
    replaces that of the scripts, and a `cache` what they say was cached.
    """

    def __init__(
        self,
        *,
        unplanned: ReplyScript,
        answers: Callable[[AskedRequest], ReplyScript] | None,
        routes: Callable[[AskedRequest], Awaitable[Answer | None]] | None,
        remembers: bool,
    ) -> None:
        self.asked: list[AskedRequest] = []
        self.requests: list[AskedRequest] = []
        """Requests for a generation alone."""
        self.replies: list[Answer] = []
        """Answers that were given at once, in their order."""
        self.aborts: list[str] = []
        self.hung_up: list[str] = []
        """Request ids whose client left before its reply was sent."""
        self.abort_status = 200
        self.health_status = 200
        self.weight_version: str | None = None
        self.refusal: str | None = None
        """The reason why it takes no new weights; None: it takes them."""
        self.loaded: list[str] = []
        """Folders of weights that it has taken."""
        self.loras: dict[str, str] = {}  # folders by name
        self.cache: PrefixCache | None = None
        self._unplanned = unplanned
        self._answers = answers
        self._routes = routes
        self._remembers = remembers
        self._scripts: deque[ReplyScript] = deque()
        self._plays: list[Play] = []
        self._num_held = 0
        self._arrivals = asyncio.Event()
        self._arrivals.set()
        self._draws = True
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url} {len(self._scripts)} scripts left, {len(self._plays)} running>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.aclose()

    @property
    def url(self) -> str:
        """Where it listens, or listened."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def num_running(self) -> int:
        """Requests for a generation without a reply."""
        return len(self._plays)

    async def start(self) -> None:
        """Listen; the second time at the same port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: FaultyConnection(self._handle, self._tasks), "127.0.0.1", self._port)
        self._server, self._port = server, server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Close every connection, and listen no more."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def plan(self, *scripts: ReplyScript) -> None:
        """Add replies to play, in order; a request beyond them gets the same reply always."""
        self._scripts.extend(scripts)

    def unplan(self) -> None:
        """Drop what is planned and was not played."""
        self._scripts.clear()

    def hold_arrivals(self) -> None:
        """Take requests only when released: an abort that comes before is for a request that is unknown here."""
        self._arrivals.clear()

    def pause(self) -> None:
        """Draw nothing more, as `/pause_generation` does: streams stand still, and no reply is begun."""
        self._draws = False

    def abort_running(self) -> None:
        """Abort all that runs, as a pause may."""
        self._abort([play.rid for play in self._plays])

    def resume(self) -> None:
        """Draw again."""
        self._draws = True
        self._note()

    def release(self) -> None:
        """Let everything go on that is held or paused now."""
        self._arrivals.set()
        for play in self._plays:
            play.go.set()

    async def begun(self, num_requests: int) -> None:
        """Wait until this many requests for a generation have come since the server was made."""
        await self._until(lambda: len(self.requests) >= num_requests)

    async def held(self, num_replies: int) -> None:
        """Wait until this many replies are held or paused at once."""
        await self._until(lambda: self._num_held >= num_replies)

    async def aborted(self, num_aborts: int) -> None:
        """Wait until this many aborts have come."""
        await self._until(lambda: len(self.aborts) >= num_aborts)

    async def left(self, num_clients: int) -> None:
        """Wait until this many clients have left before their reply."""
        await self._until(lambda: len(self.hung_up) >= num_clients)

    async def ended(self, rid: str) -> None:
        """Wait until no request of this id is without a reply."""
        await self._until(lambda: all(play.rid != rid for play in self._plays))

    async def idle(self) -> None:
        """Wait until no request is without a reply."""
        await self._until(lambda: not self._plays)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _note(self) -> None:
        """Something changed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # -- what an engine says

    @abstractmethod
    def _is_generation(self, asked: AskedRequest, path: str) -> bool:
        """Whether a script is played to this request."""

    @abstractmethod
    def id_of(self, asked: AskedRequest) -> str:
        """The id by which a request can be aborted."""

    def _cache_key(self, asked: AskedRequest) -> CacheKey:
        """Its place in a cache."""
        return CacheKey((), None)

    @abstractmethod
    def _answer(self, asked: AskedRequest, path: str) -> Answer:
        """The routes that answer at once."""

    @abstractmethod
    def _whole(self, play: Play, path: str) -> dict[str, Any]:
        """A reply that comes at once."""

    @abstractmethod
    def _parts(
        self, play: Play, path: str, *, num_sent: int, num_drawn: int, finish: str | None
    ) -> Sequence[dict[str, Any]]:
        """The events of a stream for tokens `[num_sent, num_drawn)`."""

    @abstractmethod
    def _refusal(self, script: ReplyScript, path: str) -> dict[str, Any]:
        """An error in the words of the route."""

    # -- how it is played

    async def _handle(self, connection: FaultyConnection, request: HttpRequest) -> None:
        path = request.path.partition("?")[0]
        asked = AskedRequest(
            method=request.method,
            path=request.path,
            headers=request.headers,
            body=request.body,
            json=_object_of(request.body),
        )
        if self._remembers:
            self.asked.append(asked)
        if self._is_generation(asked, path):
            await self._serve(connection, asked, path)
        else:
            other = None if self._routes is None else await self._routes(asked)
            await send(connection, other or self._answer(asked, path), _never)
        self._note()

    def _abort(self, rids: Sequence[str]) -> None:
        if self._remembers:
            self.aborts.extend(rids)
        if self.abort_status != 200:
            return
        for play in self._plays:
            if play.rid in rids and self._hears_aborts(play):
                play.num_aborts += 1
                play.aborted = play.num_aborts > play.script.ignored_aborts
                if play.aborted and play.script.paused:
                    play.go.set()

    def _hears_aborts(self, play: Play) -> bool:
        """Whether aborts of this request do anything."""
        return True

    async def _serve(self, connection: FaultyConnection, asked: AskedRequest, path: str) -> None:
        await self._arrivals.wait()
        play = Play(rid=self.id_of(asked), script=self._next_script(asked), asked=asked)
        if self.cache is not None:
            play.cached = self.cache.find(self._cache_key(asked), self._version(play.script))
        self._plays.append(play)
        if self._remembers:
            self.requests.append(asked)
        self._note()
        sent = False
        try:
            goes_on = await self._send(connection, play, path)
            sent = True
            if not goes_on:
                connection.end()
            if play.cached is not None:
                play.cached.keep(play.ids, play.versions)
        finally:
            self._plays.remove(play)
            if self._remembers and not sent and connection.is_lost:
                self.hung_up.append(play.rid)
            self._note()

    def _next_script(self, asked: AskedRequest) -> ReplyScript:
        if self._scripts:
            return self._scripts.popleft()
        return self._unplanned if self._answers is None else self._answers(asked)

    async def _send(self, connection: FaultyConnection, play: Play, path: str) -> bool:
        script = play.script
        hold = _never if script.released else lambda: self._hold(play)
        if play.asked.json.get("stream") is True and (script.status == 200 or script.error_event):
            return await send_events(connection, self._head(script), self._events(play, path), hold)
        await self._until(lambda: play.aborted or self._draws)
        if script.paused:
            play.versions.extend([self._version(script)] * script.num_drawn)
            await self._hold(play)
        answer = self._answer_whole(play, path)
        if self._remembers:
            self.replies.append(answer)
        play.go.clear()
        return await send(connection, answer, hold)

    def _answer_whole(self, play: Play, path: str) -> Answer:
        """A reply at once, as the engine would write it."""
        script = play.script
        raw = script.body
        if raw is None:
            reply = self._whole(play, path) if script.status == 200 else self._refusal(script, path)
            edited = None if script.edit is None else script.edit(reply)
            raw = edited if isinstance(edited, bytes) else compact(reply)
        return Answer(
            status=script.status,
            body=raw,
            content_type=script.content_type,
            headers=script.headers,
            fault=script.fault,
            cut_at=script.cut_at,
        )

    def _head(self, script: ReplyScript) -> Answer:
        return Answer(
            content_type="text/event-stream; charset=utf-8",
            headers=script.headers,
            fault=script.fault,
            cut_at=script.cut_at,
        )

    async def _events(self, play: Play, path: str) -> AsyncIterator[bytes]:
        """The data of each event, as it is drawn."""
        script = play.script
        if script.error_event:
            yield script.body or compact(self._refusal(script, path))
        elif script.events is not None:
            for data in script.events:
                yield data
        else:
            async for part in self._drawn_parts(play, path):
                if script.edit is not None:
                    script.edit(part)
                yield compact(part)
        yield b"[DONE]"

    async def _drawn_parts(self, play: Play, path: str) -> AsyncIterator[dict[str, Any]]:
        script, num_sent, finish = play.script, 0, None
        while finish is None:
            held_at = script.num_drawn if script.paused and not play.go.is_set() else None
            num_drawn = await self._draw(play, num_sent, held_at)
            finish = play.finish if play.aborted or num_drawn == len(script.ids) else None
            for part in self._parts(play, path, num_sent=num_sent, num_drawn=num_drawn, finish=finish):
                yield part
            num_sent = num_drawn

    async def _draw(self, play: Play, num_drawn: int, held_at: int | None) -> int:
        """The number of tokens after one more event; an aborted generation gets no more."""
        await asyncio.sleep(0)  # between tokens, an engine hears others
        if held_at == num_drawn:
            await self._hold(play)
        await self._until(lambda: play.aborted or self._draws)
        if play.aborted:
            return num_drawn
        total = min(len(play.script.ids), num_drawn + play.script.per_event)
        total = total if held_at is None or held_at <= num_drawn else min(total, held_at)
        play.versions.extend([self._version(play.script)] * (total - num_drawn))
        return total

    def _version(self, script: ReplyScript) -> str | int | None:
        return script.weight_version if self.weight_version is None else self.weight_version

    async def _hold(self, play: Play) -> None:
        self._num_held += 1
        self._note()
        try:
            await play.go.wait()
        finally:
            self._num_held -= 1


async def _never() -> None:
    """A gate that is open: for routes that answer at once, and scripts that are released."""


def compact(value: object) -> bytes:
    """A value as JSON, as engines write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _object_of(body: bytes) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] | object = json.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
