"""A reply as its client reads it, byte by byte: when something to read came, and how it ended. Pure.

Takes a stream of events or one JSON body, whichever comes; the time of each piece is given. Source: OpenAI's chat
completion chunks.
"""

import msgspec

from benchmarks.kit.client import RequestFailed
from benchmarks.kit.requests import TimedReply
from stenograph.core.sse import EventReader, EventTooLarge

MAX_EVENT_BYTES = 2**27


class _ContentPiece(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _ReplyChoice(msgspec.Struct):
    delta: _ContentPiece | None = None
    message: _ContentPiece | None = None
    text: str | None = None
    finish_reason: str | None = None


class _UsageDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _ReplyUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _UsageDetails | None = None


class _ErrorEvent(msgspec.Struct):
    code: str | int | None = None
    message: str = ""


class _ReplyEvent(msgspec.Struct):
    choices: list[_ReplyChoice] = []
    usage: _ReplyUsage | None = None
    error: _ErrorEvent | None = None


_DECODER = msgspec.json.Decoder(_ReplyEvent)


class StreamedReply(TimedReply):
    """A reply that is read as it comes. Its pieces are text, reasoning, or a call; `text` is whole at the end."""

    def __init__(self, sent_s: float = 0.0) -> None:
        super().__init__(sent_s=sent_s)
        self._events = EventReader(max_bytes=MAX_EVENT_BYTES)
        self._begin = b""
        """All of a body that is no stream; else its white space before the first event."""
        self._texts: list[str] = []
        self._error: _ErrorEvent | None = None
        self._is_stream: bool | None = None
        self._is_done = False

    def feed(self, data: bytes, now: float) -> None:
        """Bytes of the body that came at `now`. Raises RequestFailed for what is no event."""
        if not self._is_stream:
            self._begin = data = self._begin + data
            if self._is_stream is None and (head := data.lstrip()):
                self._is_stream = not head.startswith(b"{")
        if self._is_stream:
            self._read(data, now)

    def end(self, now: float) -> None:
        """The body has ended, at `now`. Raises RequestFailed if it said so in its last words, or said too little."""
        if self._is_stream is False:
            self._take(self._begin, now)
            self._is_done = True
        self.end_s, self.text = now, "".join(self._texts)
        if self._error is not None:
            raise RequestFailed(f"200 {self._error.code}", self._error.message)
        if not self._is_done or self.finish_reason is None:
            raise RequestFailed("unfinished", f"a reply ended after {len(self.pieces_s)} pieces without its end")

    def _read(self, data: bytes, now: float) -> None:
        try:
            events = self._events.feed(data)
        except EventTooLarge as error:
            raise RequestFailed("not a reply", str(error)) from error
        for event in events:
            if event == b"[DONE]":
                self._is_done = True
            else:
                self._take(event, now)

    def _take(self, data: bytes, now: float) -> None:
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise RequestFailed("not a reply", f"{error}: {data[:200]!r}") from error
        if event.error is not None:
            self._error = event.error
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices[:1]:
            said = choice.delta or choice.message or _ContentPiece(content=choice.text)
            if said.content or said.reasoning_content or said.tool_calls:
                self.pieces_s.append(now)
            self._texts.append(said.content or "")
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _count(self, usage: _ReplyUsage) -> None:
        self.num_prompt, self.num_completion = usage.prompt_tokens, usage.completion_tokens or 0
        if usage.prompt_tokens_details is not None:
            self.num_cached = usage.prompt_tokens_details.cached_tokens or 0
