"""A chat's reply as its client reads it, byte by byte: when something to read came, and how it ended. Pure.

Takes a stream of events or one JSON body, whichever comes; the time of each piece is given. Source: WHATWG HTML,
section 9.2 (text/event-stream); OpenAI's chat completion chunks.
"""

import re

import msgspec

from stenograph.bench.serving_target import ChatFailed

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    code: str | int | None = None
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_DECODER = msgspec.json.Decoder(_Event)


class ReplyReader:
    """One reply. `pieces_s` are the times at which something to read came: text, reasoning, or a call."""

    def __init__(self) -> None:
        self.pieces_s: list[float] = []
        self.finish_reason: str | None = None
        self.num_prompt = 0
        self.num_completion = 0
        self.num_cached = 0
        self._rest = b""
        self._texts: list[str] = []
        self._error: _Error | None = None
        self._is_stream: bool | None = None
        self._is_done = False

    @property
    def content(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def feed(self, data: bytes, now: float) -> None:
        """Bytes of the body that came at `now`. Raises ChatFailed for what is no event."""
        self._rest += data
        if self._is_stream is None and (head := self._rest.lstrip()):
            self._is_stream = not head.startswith(b"{")
        if self._is_stream:
            *events, self._rest = _BLANK_LINE.split(self._rest)
            for event in events:
                self._take_event(event, now)

    def end(self, now: float) -> None:
        """The body has ended, at `now`. Raises ChatFailed if it said so in its last words, or said too little."""
        if self._is_stream is False:
            self._take(self._rest, now)
            self._is_done = True
        if self._error is not None:
            raise ChatFailed(f"200 {self._error.code}", self._error.message)
        if not self._is_done or self.finish_reason is None:
            raise ChatFailed("unfinished", f"a reply ended after {len(self.pieces_s)} pieces without its end")

    def _take_event(self, event: bytes, now: float) -> None:
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if data == b"[DONE]":
            self._is_done = True
        elif data:
            self._take(data, now)

    def _take(self, data: bytes, now: float) -> None:
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise ChatFailed("not a reply", f"{error}: {data[:200]!r}") from error
        if event.error is not None:
            self._error = event.error
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices[:1]:
            said = choice.delta or choice.message or _Said()
            if said.content or said.reasoning_content or said.tool_calls:
                self.pieces_s.append(now)
            self._texts.append(said.content or "")
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _count(self, usage: _Usage) -> None:
        self.num_prompt, self.num_completion = usage.prompt_tokens, usage.completion_tokens or 0
        if usage.prompt_tokens_details is not None:
            self.num_cached = usage.prompt_tokens_details.cached_tokens or 0
