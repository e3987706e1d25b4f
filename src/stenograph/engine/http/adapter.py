"""The interface of an engine's adapter: it speaks to one kind of server over HTTP and reads its replies.

Owns the two interfaces, `EngineAdapter` and `EngineReading`, and helpers for all adapters. Holds no task and no
connection: `HttpEngine` does, and knows no engine.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Struct

from stenograph.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    StenographError,
    UpstreamInvalid,
    UpstreamRefused,
)
from stenograph.core.kinds import ReplyMode
from stenograph.core.loaded import entry
from stenograph.core.types import Chunk, LogprobsKind, RequestId
from stenograph.core.weights import WeightCommand, without_weights
from stenograph.engine.base import Capabilities, EngineLoad, GenerateRequest
from stenograph.engine.http.transport import Headers, HttpReply
from stenograph.engine.settings import ReplayKind

T = TypeVar("T")

MODELS_PATH = "/v1/models"
PROBE_PATHS = ("/health", MODELS_PATH)
"""The second is for routers without `/health`."""
NOT_THERE = (404, 405)
"""The statuses of a path unknown to a server."""


class Call(Struct, frozen=True, kw_only=True, gc=False):
    """A POST of JSON. `streams`: the reply is asked for as server-sent events. `note_if_refused`: the note of a
    command done without this call, where the server refuses it; empty where the call has to be done."""

    path: str
    body: bytes
    headers: Headers = ()
    streams: bool = False
    note_if_refused: str = ""


class ControlReply(Struct, frozen=True, kw_only=True, gc=False):
    """A server's answer to a command about the weights. `problem`: why it has not done it, in its own words; empty
    where it has. `note`: news for the trainer all the same. `then`: calls to follow."""

    problem: str = ""
    num_paused: int = 0
    note: str = ""
    then: Sequence[Call] = ()


class Ask(Protocol):
    """A request to the engine's server outside of generations. Raises UpstreamError."""

    async def __call__(self, method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply: ...


class EngineReading(Protocol):
    """One generation's reply as it is read. Every method raises UpstreamInvalid, naming the broken law, or the
    error reported by the engine within a 200. A reader inherits from this class for the defaults.

    A reader holds the chunk with `finish` back until the engine has sent everything of it, so the last chunk is
    the last: a connection cut after it loses nothing.
    """

    @property
    def has_enough(self) -> bool:
        """Whether nothing more is wanted of the stream before it ends; leaving it hangs up."""
        return False

    async def begin(self, ask: Ask) -> None:
        """Ask for the facts needed before a stream is requested. Raises UpstreamError."""
        return

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        """The chunks of a 200 received at once. By default it is read as the one event of a stream."""
        chunks = (*self.event(http.body), *self.end())
        if not chunks or chunks[-1].finish is None:
            raise UpstreamInvalid("finish_reason", "there is none")
        return chunks

    def event(self, data: bytes) -> Sequence[Chunk]:
        """The chunks in one event's data; `[DONE]` never comes here."""
        raise AssertionError("no stream was asked for")

    async def settle(self, ask: Ask) -> Sequence[Chunk]:
        """The chunks between the reply and `end`, if the engine has to be asked again for any.

        Raises UpstreamError.
        """
        return ()

    def end(self) -> Sequence[Chunk]:
        """Return the chunks held back until the stream's proper end; nothing the second time."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Facts of the model and settings of the server, for every adapter; each takes the ones it needs.

    `model` is its model's name at the engine. `logprobs`: the kind of its log-probabilities, None by its defaults.
    `replay` says what to ask for trainers to replay, and `reply_mode` whether clients get it too; `route_size` are the
    numbers in a token's routes, 0 where the model's files do not say. The context is
    `max_context_tokens` where the engine does not say; None: not known. `eos_token_ids` end a turn there.
    `states_vocab_size`: the model has exactly `vocab_size` ids; else at least as many.
    """

    model: str
    vocab_size: int
    logprobs: LogprobsKind | None = None
    replay: ReplayKind = ReplayKind.NONE
    route_size: int = 0
    reply_mode: ReplyMode = ReplyMode.PASSTHROUGH
    max_context_tokens: int | None = None
    eos_token_ids: Sequence[int] = ()
    tokenizer_json: str = ""
    states_vocab_size: bool = True


class EngineAdapter(Protocol):
    """One engine's HTTP: field mapping and quirks, and nothing else. Holds no task and no connection."""

    capabilities: Capabilities
    """Abilities of the engine; settled once `discover` has returned."""

    too_long: ClassVar[Sequence["re.Pattern[bytes]"]] = ()
    """The engine's messages for a request too long for its context, as `told_too_long` reads them."""

    scorer: ClassVar[str] = ""
    """The entry of `(adapter, ScoreRequest, Ask) -> Scores`, async; empty where the engine scores no tokens."""

    media_sampler: ClassVar[str] = ""
    """The entry of `(generate, GenerateRequest, was_aborted) -> chunks` that samples turns with media; empty:
    `generate` itself. `was_aborted` has a turn while it adds it, and says whether its end was asked for."""

    load_reader: ClassVar[str] = ""
    """The entry of `(Ask) -> EngineLoad`, async; empty where the engine does not say how full it is."""

    names_requests: ClassVar[bool] = True
    """Whether each reply names its request; where none does, no connection is used twice."""

    probe_paths: ClassVar[Sequence[str]] = PROBE_PATHS
    """Paths to GET for health; the next one is tried where the one before is not there, and one has to be."""

    info_path: ClassVar[str] = ""
    """The path that names the weights, in `weight_version`; empty where the server does not say."""

    async def discover(self, ask: Ask) -> None:
        """Find out this server's abilities, each time it comes up. Raises UpstreamError if it does not say."""
        ...

    def call(self, request: GenerateRequest) -> tuple[Call, EngineReading]:
        """The request of a generation, and the reader of its reply. Raises InvalidRequest if the engine cannot
        do it."""
        ...

    def refusal(self, http: HttpReply, request: GenerateRequest) -> StenographError:
        """The error for a status other than 200, as the answer to `request`."""
        patterns = self.too_long if http.status == 400 else ()
        return told_too_long(http.body, patterns, request.prompt.num_tokens) or passed_through(http)

    def abort_call(self, request_id: RequestId) -> Call | None:
        """The request to end a generation early; None where hanging up is the only way."""
        ...

    def close_call(self, session: str) -> Call | None:
        """The request to announce that no more turns of a session come; None where the server keeps nothing for it."""
        return None

    def control_calls(self, command: WeightCommand) -> Sequence[Call] | str:
        """The requests for a command about the weights, in order; a text says why it cannot be."""
        return without_weights(self.capabilities.engine, command)

    def control_reply(self, command: WeightCommand, call: Call, http: HttpReply) -> ControlReply:
        """The server's answer to one of those requests. A 200 is a yes, unless it says `success` false; any other
        status is a no."""
        return read_control(call, http)

    async def find_load(self, ask: Ask) -> EngineLoad | None:
        """The server's word about its memory and queue; None where it never says. Raises UpstreamError."""
        load: EngineLoad | None = await entry(self.load_reader)(ask) if self.load_reader else None
        return load

    async def find_version(self, ask: Ask) -> str | None:
        """The server's own name for its weights; None where it does not say. Raises UpstreamError."""
        return await stated_version(ask, self.info_path) if self.info_path else None


class _Info(Struct):
    weight_version: str | int | None = None


_INFO = msgspec.json.Decoder(_Info)


async def stated_version(ask: Ask, path: str) -> str | None:
    """The weights' name by a server's path; None where it does not say. Raises UpstreamError."""
    reply = await ask("GET", path)
    if reply.status != 200:
        return None
    try:
        version = _INFO.decode(reply.body).weight_version
    except msgspec.DecodeError:
        return None
    return None if version is None else str(version)


_SHOWN_BYTES = 300


class _ToldControl(Struct):
    success: bool | None = None
    message: str | None = None
    error_message: str | None = None
    error: str | None = None
    num_paused_requests: int | None = None


_TOLD = msgspec.json.Decoder(_ToldControl)


def read_control(call: Call, http: HttpReply) -> ControlReply:
    """The answer to a request of a command, as every engine but SGLang writes it."""
    try:
        told = _TOLD.decode(http.body)
    except msgspec.DecodeError:
        told = _ToldControl()
    if http.status == 200 and told.success is not False:
        return ControlReply(num_paused=max(told.num_paused_requests or 0, 0))
    if call.note_if_refused:
        return ControlReply(note=call.note_if_refused)
    words = told.message or told.error_message or told.error or http.body[:_SHOWN_BYTES].decode(errors="replace")
    return ControlReply(problem=f"{call.path} answered {http.status}: {' '.join(words.split())}")


class _Within(Struct):
    message: str | None = None
    code: msgspec.Raw = msgspec.Raw()


class _ToldRefusal(Struct):
    message: str | None = None
    error: _Within | None = None


_REFUSAL = msgspec.json.Decoder(_ToldRefusal)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def told_too_long(
    refusal: bytes, patterns: Sequence["re.Pattern[bytes]"], num_prompt: int = 0
) -> ContextLengthExceeded | None:
    """The error for an engine's refusal, where one of its words for a too long request is there.

    A pattern may have the groups `prompt`, `limit` and `sampled`, in tokens. Without them it is a prompt of
    `num_prompt` tokens, and the context has at most as many.
    """
    found = next((found for pattern in patterns if (found := pattern.search(refusal))), None)
    if found is None:
        return None
    told = {name: int(digits) for name, digits in found.groupdict().items() if digits is not None}
    num_prompt = told.get("prompt", num_prompt)
    return ContextLengthExceeded(
        num_prompt_tokens=num_prompt,
        max_tokens=told.get("sampled"),
        max_context_tokens=told.get("limit", num_prompt),
    )


def passed_through(http: HttpReply) -> UpstreamRefused:
    """A refusal passed to the client as the engine wrote it."""
    return _refused(http, http.body, _refusal_in(http.body))


def in_our_shape(http: HttpReply) -> UpstreamRefused:
    """A refusal by a route not for clients: an `error` without a code gets ours."""
    told, body = _refusal_in(http.body), http.body
    if told.error is not None and not bytes(told.error.code):
        members = _MEMBERS.decode(body)
        error = {"code": UpstreamRefused.code, **_MEMBERS.decode(members["error"])}
        body = msgspec.json.encode({**members, "error": error})
    return _refused(http, body, told)


def _refusal_in(body: bytes) -> _ToldRefusal:
    try:
        return _REFUSAL.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _ToldRefusal()


def _refused(http: HttpReply, body: bytes, told: _ToldRefusal) -> UpstreamRefused:
    said = told.message if told.error is None else told.error.message
    return UpstreamRefused(
        status=http.status, content_type=http.content_type, headers=http.headers, body=body, said=said or ""
    )


async def probed_fault(adapter: EngineAdapter, ask: Ask) -> str:
    """The fault reported by the first path found, or that no path was found; empty where nothing is wrong. Raises
    UpstreamError."""
    told: list[str] = []
    for path in adapter.probe_paths:
        status = (await ask("GET", path)).status
        if status >= 500:
            return f"GET {path} answered {status}"
        if status not in NOT_THERE:
            return ""
        told.append(f"GET {path} answered {status}")
    return f"{', '.join(told)}: there is no {adapter.capabilities.engine} server at this address"


async def carried_out(
    adapter: EngineAdapter, ask: Ask, command: WeightCommand, calls: Sequence[Call] | str
) -> ControlReply:
    """Make the requests of a command until one is refused; a text says why there are none. Raises UpstreamError."""
    if isinstance(calls, str):
        return ControlReply(problem=calls)
    num_paused, notes, left = 0, list[str](), deque(calls)
    while left:
        call = left.popleft()
        told = adapter.control_reply(command, call, await ask("POST", call.path, call.body, call.headers))
        if told.problem:
            return told
        num_paused += told.num_paused
        notes += [told.note] if told.note else []
        left.extendleft(reversed(told.then))
    return ControlReply(note="; ".join(notes), num_paused=num_paused)


class _Card(Struct):
    id: str
    root: str = ""
    parent: str | None = None


class _Cards(Struct):
    data: list[_Card] = []


_CARDS = msgspec.json.Decoder(_Cards)


async def list_models(ask: Ask) -> HttpReply:
    """The engine's answer to `GET /v1/models`, a 200. Raises UpstreamError, and UpstreamRefused for another status."""
    reply = await ask("GET", MODELS_PATH)
    if reply.status != 200:
        raise passed_through(reply)
    return reply


def loras_in(models: bytes) -> Mapping[str, str]:
    """The folders of LoRAs in a list of models, by name: a LoRA has a parent. Of another body none, and none with a
    name of the model: vLLM samples by the model for it."""
    try:
        cards = _CARDS.decode(models).data
    except (msgspec.DecodeError, RecursionError):
        return {}
    own = {card.id for card in cards if not card.parent}
    return {card.id: card.root for card in cards if card.parent and card.id not in own}


def known(found: T | None) -> T:
    """Return the findings of `discover`. Raises EngineUnavailable before it has found anything."""
    if found is None:
        raise EngineUnavailable("The engine has not been reached yet, so its abilities are unknown.")
    return found
