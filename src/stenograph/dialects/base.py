"""The interface of a dialect: everything between the bytes of one kind of client and the values of core. Pure.

A dialect owns its paths, its decoding, the ids of its replies, whole replies, streams with their framing, and errors.
It knows no socket and no session: a route reads and writes for it, and passes it the session's facts.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from msgspec import Struct

from stenograph.core.chat import (
    ChatReply,
    ChatRequest,
    KnownMessages,
    PastTurns,
    ReplyOptions,
    Spelling,
    StreamPiece,
    TurnRequest,
)
from stenograph.core.errors import StenographError
from stenograph.core.loaded import entry
from stenograph.core.messages import MEDIA_LIMITS, MediaItem, MediaLimits, MediaRef, PlacedMedia
from stenograph.core.types import SamplingParams

if TYPE_CHECKING:
    from stenograph.dialects.common.media import MediaReader

Headers = Sequence[tuple[str, str]]


class RequestMedia:
    """The media of one request. Their reader is loaded with the first."""

    __slots__ = ("_limits", "_reader")

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._reader: MediaReader | None = None

    def __repr__(self) -> str:
        return f"<RequestMedia {self._reader!r}>"

    @property
    def reader(self) -> "MediaReader":
        """Reads one more."""
        if self._reader is None:
            self._reader = cast("MediaReader", entry("stenograph.dialects.common.media:MediaReader")(self._limits))
        return self._reader

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """All of them, each once. Raises MediaWanted where some have to be fetched first."""
        return () if self._reader is None else self._reader.items()


def joined(parts: Sequence[str | MediaRef]) -> tuple[str, tuple[PlacedMedia, ...]]:
    """The content of a message of texts and media, and the places of the media in it."""
    texts: list[str] = []
    media: list[PlacedMedia] = []
    num_chars = 0
    for part in parts:
        if isinstance(part, MediaRef):
            media.append(PlacedMedia(at=num_chars, ref=part))
        else:
            texts.append(part)
            num_chars += len(part)
    return "".join(texts), tuple(media)


class Incoming(Struct, frozen=True, kw_only=True, gc=False):
    """A request as it came. `at` has the named groups of its path, `query` is the text after its question mark; the
    beginning of its body in common with `known` need not be read again. `past` are the turns of its session, None
    without one. `headers` are raw, with names in lower case. `media` limits its media."""

    body: bytes
    at: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    known: Sequence[KnownMessages] = ()
    past: PastTurns | None = None
    query: str = ""
    headers: Iterable[tuple[bytes, bytes]] = ()
    media: MediaLimits = MEDIA_LIMITS


Decoded = tuple[TurnRequest, bytes]
"""A request, and its part of the record, as JSON: `path`, `model`, `recorded` and `sent`."""


class Body(Struct, frozen=True, kw_only=True, gc=False):
    """A whole reply as it goes out, with its own headers, the content type among them.

    Content that may be large comes in pieces; between them the loop serves others.
    """

    content: bytes | Iterator[bytes]
    headers: Headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error as it goes out before anything else was sent."""

    status: int
    content: bytes
    headers: Headers


Refuse = Callable[[StenographError], Refusal]
"""Writes the error of a request not read by any dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectCall:
    """One POST path of a dialect, also below `/sessions/{id}`. From this row come its pattern, its operation in
    /openapi.json, and its required row in docs/http-api.md.

    `choices` has the spellings of a part of the path, the documented one first; `summary` a place for `where` the
    session is named. `reply` is the type of its 200, or a list of one, in the content types `media`; `shapes` are
    further types in body and reply. `parameters` and `errors` are its own. `by_engine`: an engine's server may write
    the reply. A call that `counts` makes no turn.
    """

    path: str
    id: str
    summary: str
    body: type
    reply: Any
    error_body: type
    about: str = ""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    media: tuple[str, ...] = ("application/json", "text/event-stream")
    headers: Mapping[str, object] = field(default_factory=dict[str, object])
    parameters: tuple[Mapping[str, object], ...] = ()
    shapes: tuple[type, ...] = ()
    errors: tuple[type[StenographError], ...] = ()
    by_engine: bool = False
    counts: bool = False

    @property
    def shown_path(self) -> str:
        """The path as a document shows it."""
        return _PART.sub(lambda part: self.choices.get(part[1], (part[0],))[0], self.path)

    @property
    def pattern(self) -> str:
        """The path as a regular expression, with a named group for each part."""
        return _PART.sub(lambda part: f"(?P<{part[1]}>{'|'.join(self.choices.get(part[1], ('[^/]+',)))})", self.path)


_PART = re.compile(r"\{(\w+)\}")


class StreamWriter(Protocol):
    """Writes one streamed reply. `prompts` are the ids of the request's prompts.

    Output that may be large comes in pieces; between them the loop serves others. All are taken before the next call.
    """

    @property
    def headers(self) -> Headers:
        """The answer's headers, the content type among them."""
        ...

    def start(self, prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """The first events."""
        ...

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """The events for new output; nothing if a client would see nothing of it."""
        ...

    def end(self, replies: Sequence[ChatReply]) -> bytes | Iterator[bytes]:
        """The last events, the terminal one included."""
        ...

    def alive(self, prompts: Sequence["array[int]"]) -> bytes:
        """A sign of life after a long silence.

        It may come before `start`, and begin the reply itself where its events need it; `start` adds the rest then. A
        prompt's ids are empty until they are known. Where the reply has its engine's id (`keeps_engine_id`), another
        writer may go on from here: nothing is said of the reply then.
        """
        ...

    def failed(self, error: StenographError) -> bytes:
        """The last bytes instead of `end`: the error, without any sign of a whole reply."""
        ...


class Dialect(Protocol):
    """One kind of request on one server, from its bytes to its reply's."""

    @property
    def name(self) -> str:
        """The dialect of its requests' spelling."""
        ...

    @property
    def paths(self) -> Sequence[str]:
        """Regular expressions of its POST paths, each also below `/sessions/{id}`."""
        ...

    def decode(self, incoming: Incoming) -> Decoded:
        """Read a request. Raises CallerError, with `param` where a field is at fault."""
        ...

    def steps(self, incoming: Incoming) -> "Iterator[Decoded | None] | None":
        """The same in steps for the loop, because the work holds the GIL. None where a worker does as well."""
        ...

    def whole(self, reply_id: str, options: ReplyOptions, replies: Sequence[ChatReply], *, spelling: Spelling) -> Body:
        """A whole reply, not streamed, to a request of this spelling."""
        ...

    def stream(
        self, reply_id: str, options: ReplyOptions, *, created: int, spelling: Spelling, params: SamplingParams
    ) -> StreamWriter:
        """The writer of a streamed reply to a request of this spelling, sampled with `params`."""
        ...

    def refusal(self, error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
        """An error; `spelling` is the request's, None where none was read, and `request_id` the turn's, None before
        there is one."""
        ...


class HeldDialect(Protocol):
    """A dialect with held replies: a client can ask for one again for as long as its session holds it."""

    def turn_of(self, reply_id: str) -> str | None:
        """The turn named by a reply's id; None if the id is of no reply of this dialect."""
        ...

    def held(self, reply: ChatReply, request_json: bytes) -> Body:
        """A held reply, written anew from the record of its request."""
        ...


class CountDialect(Protocol):
    """One kind of request without a turn: its answer is the number of tokens in a chat's prompt."""

    @property
    def name(self) -> str:
        """The dialect of its requests' spelling."""
        ...

    @property
    def paths(self) -> Sequence[str]:
        """Regular expressions of its POST paths, each also below `/sessions/{id}`."""
        ...

    def decode(self, incoming: Incoming) -> ChatRequest:
        """Read a request, as the chat with the prompt to count. Raises CallerError, with `param` where a field is at
        fault."""
        ...

    def counted(self, num_tokens: int) -> Body:
        """The answer."""
        ...

    def refusal(self, error: StenographError, spelling: Spelling | None) -> Refusal:
        """As `Dialect.refusal`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The protocols of a server: for requests that make turns, for requests that only count, and for held replies."""

    turns: tuple[Dialect, ...]
    counters: tuple[CountDialect, ...] = ()
    held: HeldDialect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectRow:
    """One protocol: the maker of its dialects on one server, and its calls, those documented together in a group."""

    speak: Callable[..., Spoken]
    calls: tuple[tuple[DialectCall, ...], ...]
