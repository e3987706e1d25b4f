"""What an engine is: one small interface, and the laws that every engine keeps.

Laws, which `stenograph.testing.check_engine` tests:

1. `generate` yields chunks; joined, their ids are all the tokens that were drawn, stop token included, each with its
   logprob. Exactly the last chunk carries `finish`.
2. The prompt's ids reach the model as they are. Nothing is added, dropped or tokenized again.
3. Leaving the iterator early (`aclose`, cancellation) stops the generation at the engine.
4. `abort` ends a running generation soon, with `finish.reason == ABORT` and the ids drawn so far, maybe none.
5. Failures are `UpstreamError`s, `EngineUnavailable`, or a `CallerError` where the engine blames the request.
   After an error nothing more is yielded.
6. A text that a stop string ends still has all its ids, those of the stop string included.
"""

import enum
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stenograph.core.chat import ChatRequest
from stenograph.core.types import Chunk, GrammarKind, Prompt, RequestId, SamplingParams


class EngineState(enum.StrEnum):
    """Whether an engine takes requests."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """An engine's state and, in one line, why it is not ready, or what there is to say of one that is."""

    state: EngineState
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do. `max_context_tokens` counts prompt and completion together;
    None leaves it to the engine to refuse what does not fit.

    `streams`: tokens come as they are drawn; else one chunk holds the whole reply. `parses`: the engine writes the
    client's reply itself (`Chunk.reply`), tool calls and reasoning included, and forces tool calls itself. Then both
    are said of chats alone: a request without a chat gets its tokens, as they are drawn if it wants them so.
    `takes_json`: it is sent ids as JSON text, so it wants `Prompt.ids_json`. `note`: in a line, what whoever runs it
    should know of how it is used; empty where there is nothing to say.
    """

    engine: str
    model: str
    vocab_size: int
    max_context_tokens: int | None
    grammars: frozenset[GrammarKind]
    streams: bool
    parses: bool = False
    takes_json: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation: ids in, under a request id that we chose and by which it can be aborted.

    `params` are the effective ones. An engine whose own route takes chats (`Capabilities.parses`) gets the request as
    `chat`, for what it parses and for nothing else: which ids the model sees, `prompt` alone says. `affinity_key` is
    the same for all turns of a session, None for a turn without one. `streams`: somebody wants the tokens as they are
    drawn; else an engine may send all at once.
    """

    request_id: RequestId
    prompt: Prompt
    params: SamplingParams
    chat: ChatRequest | None = None
    affinity_key: str | None = None
    streams: bool = False


class Engine(Protocol):
    """Whatever samples tokens."""

    @property
    def capabilities(self) -> Capabilities:
        """Known once `start` has returned."""
        ...

    async def start(self) -> None:
        """Make the engine usable. Raises StartupError where it cannot be."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Draw tokens; see the laws above. Close the generator, or exhaust it."""
        ...

    async def abort(self, request_id: RequestId) -> bool:
        """Ask that a generation end soon. Returns whether it was running; unknown ids are no error."""
        ...

    def health(self) -> EngineHealth:
        """What is known now, without waiting."""
        ...

    async def aclose(self) -> None:
        """Stop everything this engine runs; generations under way end with EngineUnavailable."""
        ...


class ForwardedAnswer(Protocol):
    """What an engine's server answered to a request that was passed on. `headers` are end-to-end ones."""

    @property
    def status(self) -> int: ...
    @property
    def content_type(self) -> str: ...
    @property
    def headers(self) -> Sequence[tuple[str, str]]: ...
    @property
    def body(self) -> bytes: ...


@runtime_checkable
class Forwards(Protocol):
    """An engine that is a server, to which other requests can be passed on as they come."""

    def forward(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Coroutine[None, None, ForwardedAnswer]:
        """Pass a request on; `target` is path and query. Raises UpstreamUnreachable, for no status of the engine."""
        ...


class Outcome(enum.StrEnum):
    """How a request to one engine of several ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The engine blamed the request."""
    FAILED = "failed"
    MOVED = "moved"
    """It failed before the first token, and another engine was tried."""
    LEFT = "left"
    """Whoever asked did not wait for the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """What came of the requests to an engine of several: how they ended, and, of those that were answered, how many
    prompt tokens were expected to be cached there and how many were."""

    outcomes: Mapping[Outcome, int]
    num_expected_cached: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine as people and monitors are shown it. `name` is its address, or what it is; `note` its capabilities'.

    `num_running` is of our requests, None where nobody counts; `counts` are there of an engine of several.
    """

    name: str
    engine: str
    health: EngineHealth
    note: str = ""
    num_running: int | None = None
    counts: EngineCounts | None = None


@runtime_checkable
class Several(Protocol):
    """An engine that is several."""

    def statuses(self) -> Sequence[EngineStatus]:
        """Each of them, as it is now."""
        ...


@runtime_checkable
class Located(Protocol):
    """An engine that has an address."""

    @property
    def url(self) -> str: ...


@runtime_checkable
class Counted(Protocol):
    """An engine that knows how many generations it runs."""

    @property
    def num_running(self) -> int: ...


def statuses_of(engine: Engine) -> Sequence[EngineStatus]:
    """Each engine behind `engine`: those that it is, or itself alone. Only once `start` has returned."""
    if isinstance(engine, Several):
        return engine.statuses()
    capabilities = engine.capabilities
    return (
        EngineStatus(
            name=engine.url if isinstance(engine, Located) else capabilities.engine,
            engine=capabilities.engine,
            health=engine.health(),
            note=capabilities.note,
            num_running=engine.num_running if isinstance(engine, Counted) else None,
        ),
    )
