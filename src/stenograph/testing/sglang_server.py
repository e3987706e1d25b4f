"""A stand-in for an SGLang server: its routes and wire shapes over a real socket, without a model.

It says what a test planned, or something that never changes; it remembers all that it was asked. Nothing in it waits
for time: held and paused replies go on when the test, or an abort, lets them. For a plan's faults see `Fault`.
Wire shapes: SGLang's `entrypoints/openai/protocol.py` and `serving_chat.py`; see also sglang_parts.py.
"""

import asyncio
import json
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from stenograph.testing.faults import Answer, Connection, Fault, HttpRequest, Pairs, send, send_events
from stenograph.testing.sglang_parts import Logprobs, Sampled, chat_reply, finish_reason, generate_part

CHAT_ROUTE = ("POST", "/v1/chat/completions")
GENERATE_ROUTE = ("POST", "/generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangScript:
    """One reply. `text` None means the ids as text; `logprobs` None that of the i-th id is -(i + 1) / 8.

    A `paused` script has drawn the first `num_drawn` ids, and goes on when released; aborted, it answers with just
    those, unless this is one of the first `ignored_aborts` for it. `status` and `body` override what is answered, or,
    with `error_event`, are an event within a 200; `edit` changes the reply, or each event of a stream, before it is
    written. What a `released` one's fault would hold goes on at once. `tool_calls` are `(id, name, arguments)`.
    `tops` are the alternatives at each position; without them, `num_top` made up ones come with each id. A stream has
    `per_event` tokens in each event, and `events` instead of all of them where those are given.
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
    per_event: int = 1
    events: tuple[bytes, ...] | None = None
    error_event: bool = False
    cut_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
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
class _Play:
    """A script under way for one request."""

    rid: str
    script: SGLangScript
    go: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False
    num_aborts: int = 0
    versions: list[str | int | None] = field(default_factory=list[str | int | None])


def utf8_ids(text: str) -> list[int]:
    """The tokenizer of a stand-in without one: a byte is a token."""
    return list(text.encode())


def utf8_text(ids: Sequence[int]) -> str:
    """The other way; ids that are no bytes show as `?`."""
    return bytes(id_ if id_ < 256 else 63 for id_ in ids).decode(errors="replace")


class SGLangServer:
    """An SGLang server at `url`. `async with` starts and ends it; it can be started again, at the same port.

    `abort_status` and `health_status` are what those routes answer: 404 is a router's answer to an abort.
    `answers` says what is replied where nothing is planned; `routes` answers the paths that SGLang does not have, None
    where there is none. Without `remembers` nothing is kept of what was asked: for servers that run for long.
    `incremental`: streams have only what is new in each event, as with `--incremental-streaming-output`. `has_spans`:
    newer versions tell the spans of weight versions. `max_model_len` is what `/v1/models` tells, None for a router.
    `weight_version` replaces that of the scripts.
    """

    def __init__(
        self,
        *,
        model: str = "stand-in",
        encode: Callable[[str], list[int]] = utf8_ids,
        decode: Callable[[Sequence[int]], str] = utf8_text,
        stop_id: int | None = None,
        answers: Callable[[Asked], SGLangScript] | None = None,
        routes: Callable[[Asked], Awaitable[Answer | None]] | None = None,
        remembers: bool = True,
        incremental: bool = False,
        has_spans: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        self.asked: list[Asked] = []
        self.requests: list[Asked] = []
        """Requests for a generation alone."""
        self.replies: list[Answer] = []
        """What was answered to them, by the order of answering."""
        self.aborts: list[str] = []
        self.hung_up: list[str] = []
        """Request ids whose client left before its reply was sent."""
        self.abort_status = 200
        self.health_status = 200
        self.weight_version: str | None = None
        self._incremental = incremental
        self._has_spans = has_spans
        self._max_model_len = max_model_len
        self._draws = asyncio.Event()
        self._draws.set()
        self._model = model
        self._encode = encode
        self._decode = decode
        self._stop_id = stop_id
        self._answers = answers
        self._routes = routes
        self._remembers = remembers
        self._scripts: deque[SGLangScript] = deque()
        self._plays: list[_Play] = []
        self._num_held = 0
        self._arrivals = asyncio.Event()
        self._arrivals.set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    def __repr__(self) -> str:
        return f"<SGLangServer {self.url} {len(self._scripts)} scripts left, {len(self._plays)} running>"

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
        server = await loop.create_server(lambda: Connection(self._handle, self._tasks), "127.0.0.1", self._port)
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

    def plan(self, *scripts: SGLangScript) -> None:
        """Add replies to play, in order; a request beyond them gets the same reply always."""
        self._scripts.extend(scripts)

    def hold_arrivals(self) -> None:
        """Take requests only when released: an abort that comes before is for a request that is unknown here."""
        self._arrivals.clear()

    def pause(self) -> None:
        """Draw nothing more, as `/pause_generation` does: streams stand still, and no reply is begun."""
        self._draws.clear()

    def resume(self) -> None:
        """Draw again."""
        self._draws.set()

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

    # -- routes

    async def _handle(self, connection: Connection, request: HttpRequest) -> None:
        path = request.path.partition("?")[0]
        asked = Asked(
            method=request.method,
            path=request.path,
            headers=request.headers,
            body=request.body,
            json=_object_of(request.body),
        )
        if self._remembers:
            self.asked.append(asked)
        if (request.method, path) in (CHAT_ROUTE, GENERATE_ROUTE):
            await self._serve(connection, asked, path)
        else:
            other = None if self._routes is None else await self._routes(asked)
            await send(connection, other or self._answer(asked, path), _never)
        self._note()

    def _answer(self, asked: Asked, path: str) -> Answer:
        """The routes that answer at once."""
        match asked.method, path:
            case "POST", "/abort_request":
                self._abort(asked.json)
                return Answer(status=self.abort_status, content_type="")
            case "GET", "/health":
                return Answer(status=self.health_status, content_type="")
            case _:
                told = self._told(asked.method, path, asked.json)
        if told is None:
            detail = {"detail": "Not Found", "path": urllib.parse.unquote(path)}
            return Answer(status=404, body=json.dumps(detail).encode())
        return Answer(body=json.dumps(told).encode())

    def _told(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """What the routes that a proxy may reach say; None where there is no such route."""
        match method, path:
            case "GET", "/v1/models":
                card = {"id": self._model, "object": "model", "max_model_len": self._max_model_len}
                return {"object": "list", "data": [card]}
            case "POST", "/tokenize":
                ids = self._encode(str(body.get("prompt", "")))
                return {"tokens": ids, "count": len(ids)}
            case "POST", "/detokenize":
                return {"text": self._decode(body.get("tokens", []))}
            case "POST", "/v1/embeddings":
                ids = self._encode(str(body.get("input", "")))
                vector = [float(len(ids)), float(sum(ids))]
                data = [{"object": "embedding", "index": 0, "embedding": vector}]
                return {"object": "list", "model": self._model, "data": data}
            case _:
                return None

    def _abort(self, body: dict[str, Any]) -> None:
        rids = [play.rid for play in self._plays] if body.get("abort_all") else [str(body.get("rid", ""))]
        if self._remembers:
            self.aborts.extend(rids)
        if self.abort_status != 200:
            return
        for play in self._plays:
            if play.rid in rids:
                play.num_aborts += 1
                play.aborted = play.num_aborts > play.script.ignored_aborts
                if play.aborted and play.script.paused:
                    play.go.set()

    async def _serve(self, connection: Connection, asked: Asked, path: str) -> None:
        await self._arrivals.wait()
        script = self._scripts.popleft() if self._scripts else self._unplanned(asked)
        play = _Play(rid=str(asked.json.get("rid", "")), script=script)
        self._plays.append(play)
        if self._remembers:
            self.requests.append(asked)
        self._note()
        sent = False
        try:
            if path == GENERATE_ROUTE[1] and self._streams(script, asked.json):
                goes_on = await self._stream(connection, play, asked.json)
            else:
                goes_on = await self._reply_whole(connection, play, asked.json, path)
            sent = True
            if not goes_on:
                connection.end()
        finally:
            self._plays.remove(play)
            if self._remembers and not sent and connection.is_lost:
                self.hung_up.append(play.rid)
            self._note()

    async def _reply_whole(self, connection: Connection, play: _Play, body: dict[str, Any], path: str) -> bool:
        await self._draws.wait()
        if play.script.paused:
            await self._hold(play)
        answer = self._answer_whole(play, body, path)
        if self._remembers:
            self.replies.append(answer)
        play.go.clear()
        return await send(connection, answer, self._holding(play))

    def _streams(self, script: SGLangScript, body: dict[str, Any]) -> bool:
        """Whether a stream is what comes; a refusal before it is none."""
        return body.get("stream") is True and (script.status == 200 or script.error_event)

    async def _stream(self, connection: Connection, play: _Play, body: dict[str, Any]) -> bool:
        script = play.script
        head = Answer(
            content_type="text/event-stream; charset=utf-8",
            headers=script.headers,
            fault=script.fault,
            cut_at=script.cut_at,
        )
        return await send_events(connection, head, self._events(play, body), self._holding(play))

    async def _events(self, play: _Play, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The data of each event, as it is drawn."""
        script = play.script
        if script.events is not None or script.error_event:
            for data in script.events or (self._refusal(play.script, GENERATE_ROUTE[1]),):
                yield data
        else:
            num_sent = 0
            while True:
                held_at = script.num_drawn if script.paused and not play.go.is_set() else None
                num_drawn = await self._draw(play, num_sent, held_at)
                finish = "abort" if play.aborted else script.finish if num_drawn == len(script.ids) else None
                told = None if finish is None else finish_reason(finish, script.matched, num_drawn)
                first = num_sent if self._incremental else 0
                part = generate_part(
                    self._sampled(play, body), num_drawn, told, self._decode, first=first, has_spans=self._has_spans
                )
                if script.edit is not None:
                    script.edit(part)
                yield _compact(part)
                num_sent = num_drawn
                if finish is not None:
                    break
        yield b"[DONE]"

    async def _draw(self, play: _Play, num_drawn: int, held_at: int | None) -> int:
        """How many tokens there are after one event more; an aborted generation has no more."""
        await asyncio.sleep(0)  # between tokens, an engine hears others
        if held_at == num_drawn:
            await self._hold(play)
        await self._draws.wait()
        if play.aborted:
            return num_drawn
        total = min(len(play.script.ids), num_drawn + play.script.per_event)
        total = total if held_at is None or held_at < num_drawn else min(total, held_at)
        if self._remembers:
            play.versions.extend([self._version(play.script)] * (total - num_drawn))
        return total

    def _version(self, script: SGLangScript) -> str | int | None:
        return script.weight_version if self.weight_version is None else self.weight_version

    def _holding(self, play: _Play) -> Callable[[], Awaitable[None]]:
        return _never if play.script.released else lambda: self._hold(play)

    async def _hold(self, play: _Play) -> None:
        self._num_held += 1
        self._note()
        try:
            await play.go.wait()
        finally:
            self._num_held -= 1

    # -- what it says

    def _unplanned(self, asked: Asked) -> SGLangScript:
        if self._answers is not None:
            return self._answers(asked)
        ids = tuple(self._encode("ok"))
        if self._stop_id is None:
            return SGLangScript(ids=ids, text="ok")
        return SGLangScript(ids=(*ids, self._stop_id), text="ok", matched=self._stop_id)

    def _answer_whole(self, play: _Play, body: dict[str, Any], path: str) -> Answer:
        """A reply at once, as SGLang would write it."""
        script = play.script
        raw = script.body
        if raw is None and script.status == 200:
            reply = self._reply(play, body) if path == CHAT_ROUTE[1] else self._generated(play, body)
            if script.edit is not None:
                script.edit(reply)
            raw = _compact(reply)
        elif raw is None:
            raw = self._refusal(script, path)
        return Answer(
            status=script.status,
            body=raw,
            content_type=script.content_type,
            headers=script.headers,
            fault=script.fault,
            cut_at=script.cut_at,
        )

    def _refusal(self, script: SGLangScript, path: str) -> bytes:
        """An error in the words of the route."""
        if script.body is not None:
            return script.body
        if path == CHAT_ROUTE[1]:
            return json.dumps({"object": "error", "message": "as planned", "code": script.status}).encode()
        return json.dumps({"error": {"message": "as planned"}}).encode()

    def _generated(self, play: _Play, body: dict[str, Any]) -> dict[str, Any]:
        sampled = self._sampled(play, body)
        finish = "abort" if play.aborted else play.script.finish
        told = finish_reason(finish, play.script.matched, len(sampled.ids))
        return generate_part(sampled, len(sampled.ids), told, self._decode, has_spans=self._has_spans)

    def _sampled(self, play: _Play, body: dict[str, Any]) -> Sampled:
        script = play.script
        ids = script.ids[: script.num_drawn] if play.aborted and script.paused else script.ids
        logprobs = script.logprobs or tuple(-(i + 1) / 8 for i in range(len(ids)))
        made_up: Logprobs = [(i, -(i + 1) / 8) for i in range(script.num_top)]
        versions = play.versions + [self._version(script)] * (len(ids) - len(play.versions))
        return Sampled(
            rid=play.rid,
            ids=ids,
            logprobs=logprobs[: len(ids)],
            tops=script.tops[: len(ids)] or ([made_up] * len(ids) if script.num_top else []),
            versions=versions,
            num_prompt=len(body.get("input_ids") or ()),
            num_cached=script.num_cached,
            routed_experts=script.routed_experts,
            indexer_topk=script.indexer_topk,
            rows_have_text=script.triples,
        )

    def _reply(self, play: _Play, body: dict[str, Any]) -> dict[str, Any]:
        script, sampled = play.script, self._sampled(play, body)
        has_all = len(sampled.ids) == len(script.ids)
        return chat_reply(
            sampled,
            text=script.text if script.text is not None and has_all else self._decode(sampled.ids),
            reasoning=script.reasoning,
            tool_calls=script.tool_calls,
            finish="abort" if play.aborted else script.finish,
            matched=script.matched,
            model=self._model,
            token_text=lambda id_: self._decode([id_]),
        )


async def _never() -> None:
    """What holds nothing: routes other than chat, and scripts that are released."""


def _compact(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _object_of(body: bytes) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] | object = json.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
