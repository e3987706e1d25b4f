"""The interface of an engine, and the invariants that every engine keeps.

The conformance suite (`check_engine`) tests these invariants:

1. `generate` yields chunks; joined, their ids are all the sampled tokens, stop token included, each with its logprob.
   Exactly the last chunk carries `finish`.
2. The prompt's ids reach the model as they are. Nothing is added, dropped or tokenized again.
3. Leaving the iterator early (`aclose`, cancellation) stops the generation at the engine.
4. `abort` ends a running generation soon, with `finish.reason == ABORT` and the ids sampled so far, maybe none.
5. Failures are `UpstreamError`s, `EngineUnavailable`, or a `CallerError` where the engine blames the request.
   After an error nothing more is yielded.
6. A text ended by a stop string still has all its ids, including those of the stop string.
"""

import enum
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

from msgspec import Struct

from stenograph.core.chat import ChatRequest
from stenograph.core.errors import InvalidRequest, RouteNotFound
from stenograph.core.json_types import Count
from stenograph.core.kinds import SaltMode
from stenograph.core.messages import MediaKind
from stenograph.core.routing import Routing, RoutingHint
from stenograph.core.telemetry import GrammarStep
from stenograph.core.trace_context import TraceContext
from stenograph.core.types import (
    RAW_LOGPROBS,
    Chunk,
    GrammarKind,
    LogprobsReport,
    Prompt,
    RepetitionOver,
    RequestId,
    SamplingParams,
)
from stenograph.core.weights import ControlAnswer, WeightCommand, without_weights
from stenograph.model.tokenizer import Span

if TYPE_CHECKING:
    from stenograph.engine.http.transport import HttpReply
    from stenograph.engine.scoring import ScoreRequest, Scores

AFFINITY_HEADER = "x-smg-routing-key"  # of every generation: routers keep a session on one engine by it


class EngineState(enum.StrEnum):
    """The state of an engine: does it accept requests?"""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


class EngineHealth(Struct, frozen=True, kw_only=True, gc=False):
    """An engine's state and, in one line, why it is not ready, or a remark on a ready one."""

    state: EngineState
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities of an engine. `max_context_tokens` counts prompt and completion together; None leaves it to the engine
    to refuse longer requests.

    `streams`: tokens come as they are sampled; else one chunk holds the whole reply. `parses`: the engine writes the
    client's reply itself (`Chunk.reply`), tool calls and reasoning included, and forces tool calls itself. Then both
    hold for chats alone: a request without a chat gets its tokens, as they are sampled if it wants them so.
    `takes_json`: it takes ids as JSON text, so it wants `Prompt.json`. `logprobs`: the distribution of its
    log-probabilities. `reports_support`: it reports the ids open to sampling, where it is asked for them and set up for
    it; with `max_support_top_k`, only where `top_k` cuts off all but so many. `salt_modes`: its ways to keep
    cached keys and values apart by the weights; none: by no policy. `repetition_over`: the tokens its repetition
    penalty counts. `hints`: the routing hints it takes. `note`: one line for the operator on its use, or nothing.
    `policy`: the engine's own name of the model, where it has another than `model`. `policies`: folders of the LoRAs
    listed last, by name; None: it takes none. `media`: the kinds that it takes in the place of placeholders, with a
    report of the effective ids; before it is up, those that it may take. `places_media_by_text`: it looks for the
    placeholders in the text of the ids, also where a text spells one.
    """

    engine: str
    model: str
    vocab_size: int
    max_context_tokens: int | None
    grammars: frozenset[GrammarKind]
    streams: bool
    parses: bool = False
    takes_json: bool = False
    logprobs: LogprobsReport = RAW_LOGPROBS
    reports_support: bool = False
    max_support_top_k: int | None = None
    salt_modes: frozenset[SaltMode] = frozenset()
    repetition_over: RepetitionOver = RepetitionOver.LINE
    hints: frozenset[RoutingHint] = frozenset()
    note: str = ""
    policy: str | None = None
    policies: Mapping[str, str] | None = None
    media: frozenset[MediaKind] = frozenset()
    places_media_by_text: bool = False


class GenerateRequest(Struct, frozen=True, kw_only=True, gc=False):
    """One generation: ids in, under a request id of our choice, for use in aborts.

    `params` are the effective ones. An engine whose own route takes chats (`Capabilities.parses`) gets the request as
    `chat`, for its parsing and for nothing else: `prompt` alone decides the ids the model sees. `affinity_key` is the
    same for all turns of a session, None for a turn without one. `streams`: somebody wants the tokens as they are
    sampled; else an engine may send all at once. `routing` has the client's hints, for an engine that takes them. Its
    cached tokens are for the same `cache_salt` alone. The LoRA `policy` samples; None: the engine's own model. `trace`
    is the span of this generation, where traces are made.
    """

    request_id: RequestId
    prompt: Prompt
    params: SamplingParams
    chat: ChatRequest | None = None
    affinity_key: str | None = None
    streams: bool = False
    routing: Routing | None = None
    cache_salt: str | None = None
    policy: str | None = None
    trace: TraceContext | None = None


class Outcome(enum.StrEnum):
    """Outcome of a request to one engine of several."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The engine blamed the request."""
    FAILED = "failed"
    MOVED = "moved"
    """The engine failed before the first token, and another one was tried."""
    LEFT = "left"
    """Whoever asked did not wait for the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """Counts of the requests to an engine of several: by outcome, and, of the answered ones, how many prompt tokens
    were expected to be cached there and how many were."""

    outcomes: Mapping[Outcome, int]
    num_expected_cached: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine's own word about its memory and its queue, at one time.

    `kv_usage` is the share of its keys and values, 0 to 1, that running requests hold; what is only cached does not
    count. `kv_tokens` is all of it in tokens, `max_running` its largest batch, `num_preemptions` the requests that it
    has computed again for want of memory since it began; None where it does not say. Raises ValueError for what no
    engine has.
    """

    kv_usage: float
    num_running: int
    num_waiting: int
    kv_tokens: int | None = None
    max_running: int | None = None
    num_preemptions: int | None = None

    def __post_init__(self) -> None:
        counts = (self.num_running, self.num_waiting, self.kv_tokens, self.max_running, self.num_preemptions)
        if not 0 <= self.kv_usage <= 1 or any(one is not None and not 0 <= one < 2**53 for one in counts):
            raise ValueError(f"no engine is so full: {self}")


class ShownEngine(TypedDict):
    """An engine as each answer shows it. A field that stands here, and in `EngineStatus.shown`, is in all of them.
    `kv_usage` is the share of its memory that running requests hold, and `num_waiting` counts the requests in its own
    queue, whoever sent them; null where it does not say, and of a single engine."""

    name: str
    engine: str
    detail: str
    kv_usage: float | None
    num_waiting: Count | None


class EngineRow(ShownEngine):
    """One engine. `state` is `stopped` while it leaves. `detail` is a line for the operator."""

    state: EngineState
    num_running: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine as people and monitors see it. `name` is its address, or what it is; `note` its capabilities'.

    `num_running` counts our requests; `counts` and `load` are there of an engine of several, its `load` while it says.
    """

    name: str
    engine: str
    health: EngineHealth
    note: str = ""
    num_running: int
    counts: EngineCounts | None = None
    load: EngineLoad | None = None

    def shown(self) -> EngineRow:
        """The status as an answer shows it."""
        return {
            "name": self.name,
            "engine": self.engine,
            "state": self.health.state,
            "detail": self.health.detail or self.note,
            "num_running": self.num_running,
            "kv_usage": None if self.load is None else round(self.load.kv_usage, 4),
            "num_waiting": None if self.load is None else self.load.num_waiting,
        }


class Engine(Protocol):
    """A sampler of tokens. An engine inherits from this class: abilities of only some have their defaults here."""

    @property
    def name(self) -> str:
        """Its address, or what it is. Known once `start` has returned."""
        return self.capabilities.engine

    @property
    def capabilities(self) -> Capabilities:
        """Known once `start` has returned."""
        ...

    @property
    def num_running(self) -> int:
        """Generations begun and not ended."""
        ...

    @property
    def addresses(self) -> Mapping[str, str]:
        """Names of the staying engines behind this one, by their addresses, where engines can join and leave."""
        return {}

    @property
    def members(self) -> "Mapping[str, Engine]":
        """The staying engines behind this one by name, or itself alone."""
        return {self.name: self}

    @property
    def forwards(self) -> bool:
        """Whether `forward` takes requests: the engine is a server. Known from the beginning."""
        return False

    @property
    def tokenizes(self) -> bool:
        """Whether `tokenize` takes text: the engine has workers for it. Known from the beginning."""
        return False

    async def start(self) -> None:
        """Make the engine usable. Raises StartupError where it cannot be."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Sample tokens; see the invariants above. Close the generator, or exhaust it."""
        ...

    async def score(self, request: "ScoreRequest") -> "Scores":
        """Log-probabilities of given tokens, by one teacher-forced pass. Leaving the wait ends it at the engine.

        Raises UpstreamError, EngineUnavailable, or InvalidRequest where the engine cannot do it.
        """
        able = "the embedded engine, vLLM and SGLang do"
        raise InvalidRequest(f"The engine {self.capabilities.engine} scores no tokens: {able}.")

    async def abort(self, request_id: RequestId) -> bool:
        """Ask for a generation's early end. Returns whether it was running; unknown ids are no error."""
        ...

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> "HttpReply":
        """Pass a request of another route on to the engine's server; `target` is path and query.

        Any status of the server is an answer. Raises UpstreamError where there is none, and RouteNotFound where the
        engine is no server.
        """
        path = target.partition("?")[0]
        raise RouteNotFound(f"The engine {self.capabilities.engine} is no server: it has no {method} {path}.")

    async def tokenize(self, spans: Sequence[Span]) -> "array[int]":
        """Ids [T], as made of these spans by our own tokenizer. The caller may leave at any time.

        Raises UnrenderableMessage, TokenizationFailed, or EngineUnavailable. Only where `tokenizes`.
        """
        raise AssertionError(f"the engine {self.capabilities.engine} does not tokenize")

    def end_session(self, key: str) -> None:
        """No more turns with this `affinity_key` come: its cached state can go. Does not wait, and never raises."""
        return

    def share_home(self, key: str, new: str) -> None:
        """Turns with the `affinity_key` `new` begin with the ids of those with `key`: cached state serves both."""
        return

    @property
    def num_waiting(self) -> int:
        """Turns that wait here until an engine has memory for them."""
        return 0

    async def find_load(self) -> EngineLoad | None:
        """The engine's own word about its memory and queue; None where it never says. Raises UpstreamError."""
        return None

    async def find_version(self) -> str | None:
        """Name of the engine's weights, by its own word; None where it does not say."""
        return None

    async def find_policies(self) -> None:
        """Ask the engine anew for its LoRAs (`Capabilities.policies`). One that does not answer is DOWN."""
        return

    def require_version(self, version: str) -> None:
        """Take no turns until the weights are those of this name: others have them, and this engine refused."""
        return

    def follow_version(self, version: str | None, lacking: Collection[str]) -> None:
        """Another process has told the engines to take the weights of this name, and those named in `lacking` have not:
        they take no turns until they have. None: nobody knows the name."""
        return

    async def control(self, command: WeightCommand) -> Sequence[ControlAnswer]:
        """Do as a trainer says about the weights; one answer for each engine. Returns when all have answered."""
        problem = without_weights(self.capabilities.engine, command)
        return (ControlAnswer(name=self.name, problem=problem),)

    def report_grammar_times(self, report: Callable[[GrammarStep, Sequence[float]], None]) -> None:
        """From now on call `report` with the durations of a step, in seconds, as they become known; it never raises.

        An engine that does not measure its grammars never calls it.
        """
        return

    def health(self) -> EngineHealth:
        """The health known now, without waiting."""
        ...

    def statuses(self) -> Sequence[EngineStatus]:
        """Each engine behind this one as it is now, or itself alone. Only once `start` has returned."""
        capabilities = self.capabilities
        status = EngineStatus(
            name=self.name,
            engine=capabilities.engine,
            health=self.health(),
            note=capabilities.note,
            num_running=self.num_running,
        )
        return (status,)

    async def aclose(self) -> None:
        """Stop everything this engine runs; generations under way end with EngineUnavailable."""
        ...
