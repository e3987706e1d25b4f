"""A stand-in for an SGLang server: its routes and wire shapes over a real socket, without a model.

It says what a test planned, or something that never changes; it remembers all that it was asked. Nothing in it waits
for time: held and paused replies go on when the test, or an abort, lets them. For a plan's faults see `Fault`.
Wire shapes: SGLang's `entrypoints/openai/protocol.py` and `serving_chat.py`.
"""

import asyncio
import base64
import json
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from stenograph.testing.faults import Answer, Connection, Fault, HttpRequest, Pairs, send


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangScript:
    """One reply. Logprob of the i-th id is -(i + 1) / 8; `text` None means the ids as text.

    A `paused` script has drawn the first `num_drawn` ids, and goes on when released; aborted, it answers with just
    those, unless this is one of the first `ignored_aborts` for it. `status` and `body` override what is answered.
    `tool_calls` are `(id, name, arguments)`. `num_top` alternatives come with each id.
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


def utf8_ids(text: str) -> list[int]:
    """The tokenizer of a stand-in without one: a byte is a token."""
    return list(text.encode())


def utf8_text(ids: Sequence[int]) -> str:
    """The other way; ids that are no bytes show as `?`."""
    return bytes(id_ if id_ < 256 else 63 for id_ in ids).decode(errors="replace")


class SGLangServer:
    """An SGLang server at `url`. `async with` starts and ends it; it can be started again, at the same port.

    `abort_status` and `health_status` are what those routes answer: 404 is a router's answer to an abort.
    """

    def __init__(
        self,
        *,
        model: str = "stand-in",
        encode: Callable[[str], list[int]] = utf8_ids,
        decode: Callable[[Sequence[int]], str] = utf8_text,
        stop_id: int | None = None,
    ) -> None:
        self.asked: list[Asked] = []
        self.requests: list[Asked] = []
        """Chat requests alone."""
        self.replies: list[Answer] = []
        """What was answered to them, by the order of answering."""
        self.aborts: list[str] = []
        self.hung_up: list[str] = []
        """Request ids whose client left before its reply was sent."""
        self.abort_status = 200
        self.health_status = 200
        self._model = model
        self._encode = encode
        self._decode = decode
        self._stop_id = stop_id
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
        """Chat requests without a reply."""
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
        """Take chat requests only when released: an abort that comes before is for a request that is unknown here."""
        self._arrivals.clear()

    def release(self) -> None:
        """Let everything go on that is held or paused now."""
        self._arrivals.set()
        for play in self._plays:
            play.go.set()

    async def begun(self, num_requests: int) -> None:
        """Wait until this many chat requests have come since the server was made."""
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

    async def idle(self) -> None:
        """Wait until no chat request is without a reply."""
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
        self.asked.append(asked)
        if (request.method, path) == ("POST", "/v1/chat/completions"):
            await self._chat(connection, asked)
        else:
            await send(connection, self._answer(asked, path), _never)
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
                return {"object": "list", "data": [{"id": self._model, "object": "model"}]}
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
        self.aborts.extend(rids)
        if self.abort_status != 200:
            return
        for play in self._plays:
            if play.rid in rids:
                play.num_aborts += 1
                play.aborted = play.num_aborts > play.script.ignored_aborts
                if play.aborted and play.script.paused:
                    play.go.set()

    async def _chat(self, connection: Connection, asked: Asked) -> None:
        await self._arrivals.wait()
        script = self._scripts.popleft() if self._scripts else self._unplanned()
        play = _Play(rid=str(asked.json.get("rid", "")), script=script)
        self._plays.append(play)
        self.requests.append(asked)
        self._note()
        sent = False
        try:
            if script.paused:
                await self._hold(play)
            answer = self._completion(play, asked.json)
            self.replies.append(answer)
            play.go.clear()
            goes_on = await send(connection, answer, lambda: self._hold(play))
            sent = True
            if not goes_on:
                connection.end()
        finally:
            self._plays.remove(play)
            if not sent and connection.is_lost:
                self.hung_up.append(play.rid)
            self._note()

    async def _hold(self, play: _Play) -> None:
        self._num_held += 1
        self._note()
        try:
            await play.go.wait()
        finally:
            self._num_held -= 1

    # -- what it says

    def _unplanned(self) -> SGLangScript:
        ids = tuple(self._encode("ok"))
        if self._stop_id is None:
            return SGLangScript(ids=ids, text="ok")
        return SGLangScript(ids=(*ids, self._stop_id), text="ok", matched=self._stop_id)

    def _completion(self, play: _Play, body: dict[str, Any]) -> Answer:
        """The reply to a chat request, as SGLang would write it."""
        script = play.script
        raw = script.body
        if raw is None and script.status == 200:
            raw = json.dumps(self._reply(play, body), ensure_ascii=False, separators=(",", ":")).encode()
        elif raw is None:
            raw = json.dumps({"object": "error", "message": "as planned", "code": script.status}).encode()
        return Answer(
            status=script.status,
            body=raw,
            content_type=script.content_type,
            headers=script.headers,
            fault=script.fault,
        )

    def _reply(self, play: _Play, body: dict[str, Any]) -> dict[str, Any]:
        script = play.script
        ids = script.ids[: script.num_drawn] if play.aborted else script.ids
        text = script.text if script.text is not None and ids == script.ids else self._decode(ids)
        finish = "abort" if play.aborted else script.finish
        if script.tool_calls and finish == "stop":
            finish = "tool_calls"
        num_prompt = len(body.get("input_ids") or ())
        calls = [
            {"id": id_, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (id_, name, arguments) in enumerate(script.tool_calls)
        ]
        message = {"role": "assistant", "content": text, "reasoning_content": script.reasoning}
        return {
            "id": play.rid,
            "object": "chat.completion",
            "created": 0,
            "model": self._model,
            "choices": [
                {
                    "index": 0,
                    "message": {**message, "tool_calls": calls or None},
                    "logprobs": {"content": [_openai_logprob(self._decode([id_]), i) for i, id_ in enumerate(ids)]},
                    "finish_reason": finish,
                    "matched_stop": script.matched,
                    "meta_info": self._meta_info(play, ids, finish, num_prompt),
                }
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": len(ids),
                "total_tokens": num_prompt + len(ids),
            },
            "metadata": {"weight_version": script.weight_version},
        }

    def _meta_info(self, play: _Play, ids: tuple[int, ...], finish: str, num_prompt: int) -> dict[str, Any]:
        script = play.script
        info: dict[str, Any] = {
            "id": play.rid,
            "finish_reason": {"type": finish, "matched": script.matched},
            "prompt_tokens": num_prompt,
            "weight_version": script.weight_version,
            "completion_tokens": len(ids),
            "cached_tokens": script.num_cached,
            "output_token_logprobs": [
                [-(i + 1) / 8, id_, None][: 3 if script.triples else 2] for i, id_ in enumerate(ids)
            ],
        }
        if script.num_top:
            info["output_top_logprobs"] = [[[-(i + 1) / 8, i, None] for i in range(script.num_top)] for _ in ids]
        for name, payload in (("routed_experts", script.routed_experts), ("indexer_topk", script.indexer_topk)):
            if payload is not None:
                info[name] = base64.b64encode(payload).decode()
        return info


async def _never() -> None:
    """Routes other than chat hold nothing."""


def _object_of(body: bytes) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] | object = json.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}


def _openai_logprob(text: str, index: int) -> dict[str, Any]:
    return {"token": text, "bytes": list(text.encode()), "logprob": -(index + 1) / 8, "top_logprobs": []}
