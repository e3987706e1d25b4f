"""The equipment of the engine tests: an engine, its tester's controls, and ways to ask it."""

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from stenograph.core.chat import ChatRequest
from stenograph.core.errors import CallerError, UpstreamRefused
from stenograph.core.ids_json import encode_ids
from stenograph.core.logprobs import reported_kind
from stenograph.core.messages import Message, Role
from stenograph.core.types import Chunk, FinishReason, Prompt, RequestId, SampledTurn, SamplingParams, token_ids
from stenograph.engine.base import Capabilities, Engine, GenerateRequest
from stenograph.engine.validate import TurnCollector

POLL_S = 0.005
"""Between two looks at a state without notification."""

_CHAT = ChatRequest(
    messages=(Message(role=Role.USER, content="hi"),), messages_json=b'[{"role":"user","content":"hi"}]'
)

Act = Callable[[], Awaitable[None]]


class NotOffered(Exception):
    """Neither the engine nor its tester has a law's requirement; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    """A started engine, with its tester's knowledge and means beyond the interface.

    `prompt` is ids for the model to go on from, `decode` the text of sampled ids, control tokens left out. Turns have
    `num_tokens` tokens, and `num_long_tokens` where something has to happen before they end. Logprobs of the same
    tokens agree to `tolerance_nats`, and of two tokens equally likely to this precision either may be the greedy one.
    `not_offered` names laws known to be broken by this engine, and why.

    Hooks; None: the engine does not offer it. `seen_ids`: the prompt as the model got it. `score`: (ids, n) to the
    teacher-forced ln p of `ids[n:]` in the softmax of the logits; `score_at`: the same with the logits divided by a
    temperature. `num_running`: the engine's own count of generations, not the adapter's. `pause` and `resume`: nothing
    is sampled in between. `set_weight_version`: the weights of the next tokens. `kill` and `revive`: the engine dies
    without a word, paused or not, and comes back, perhaps after a while. `max_sequence_tokens`: the longest sequence,
    where it is short enough to be tried. `stops_beside_ignore_eos`: stop tokens end a turn also where the model's own
    end is to be ignored. `aborts_in_pause`: an abort is not forgotten where its turn has not begun because the engine
    is paused.
    """

    engine: Engine
    prompt: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    eos_ids: Collection[int]
    num_tokens: int = 16
    num_long_tokens: int = 200
    tolerance_nats: float = 0.0
    not_offered: Mapping[str, str] = field(default_factory=dict[str, str])
    max_sequence_tokens: int | None = None
    stops_beside_ignore_eos: bool = True
    aborts_in_pause: bool = True
    seen_ids: Callable[[RequestId], Sequence[int]] | None = None
    score: Callable[[Sequence[int], int], Awaitable[Sequence[float]]] | None = None
    score_at: Callable[[Sequence[int], int, float], Awaitable[Sequence[float]]] | None = None
    num_running: Callable[[], Awaitable[int]] | None = None
    pause: Act | None = None
    resume: Act | None = None
    set_weight_version: Callable[[str], Awaitable[None]] | None = None
    kill: Act | None = None
    revive: Act | None = None

    def __post_init__(self) -> None:
        if (self.pause is None) != (self.resume is None) or (self.kill is None) != (self.revive is None):
            raise ValueError("pause comes with resume, and kill with revive")


class Lab:
    """One engine under test: requests are made and sampled here, and their outcomes compared."""

    def __init__(self, under_test: EngineUnderTest) -> None:
        self.under_test = under_test
        self._numbers = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine itself."""
        return self.under_test.engine

    @property
    def capabilities(self) -> Capabilities:
        """Its reported capabilities."""
        return self.under_test.engine.capabilities

    @property
    def long_tokens(self) -> dict[str, Any]:
        """Parameters of a turn still under way when something is done to it."""
        return {"max_tokens": self.under_test.num_long_tokens}

    @property
    def endless(self) -> dict[str, Any]:
        """Parameters of a turn that stop tokens may end, and nothing of the model's own."""
        if self.under_test.stops_beside_ignore_eos:
            return {"ignore_eos": True}
        return {"ignore_eos": False, "logit_bias": tuple((id_, -100.0) for id_ in sorted(self.under_test.eos_ids))}

    def request(self, prompt: Sequence[int] = (), *, streams: bool = True, **params: Any) -> GenerateRequest:
        """A request under a new id; greedy and without an end of its own, unless `params` say otherwise."""
        ids = token_ids(prompt or self.under_test.prompt)
        own: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": self.under_test.num_tokens}
        return GenerateRequest(
            request_id=RequestId(f"law-{next(self._numbers)}"),
            prompt=Prompt(new_ids=ids, json_fragments=(encode_ids(ids),) if self.capabilities.takes_json else None),
            params=SamplingParams(**own | params),
            chat=_CHAT if self.capabilities.parses else None,
            streams=streams,
        )

    async def draw(self, request: GenerateRequest) -> SampledTurn:
        """The whole turn, checked as the server checks it. Raises as `generate` does, and UpstreamInvalid."""
        async with aclosing(self.engine.generate(request)) as chunks:
            return await self.rest(request, chunks)

    async def rest(self, request: GenerateRequest, chunks: AsyncGenerator[Chunk, None], *taken: Chunk) -> SampledTurn:
        """A turn with some chunks taken already."""
        collector = TurnCollector(
            vocab_size=self.capabilities.vocab_size,
            max_tokens=request.params.max_tokens,
            logprobs_kind=reported_kind(self.capabilities.logprobs, request.params),
        )
        for chunk in taken:
            collector.add(chunk)
        async for chunk in chunks:
            collector.add(chunk)
        return collector.result()

    async def greedy(self, prompt: Sequence[int] = (), **params: Any) -> SampledTurn:
        """A greedily sampled turn."""
        return await self.draw(self.request(prompt, **params))

    def text(self, turn: SampledTurn) -> str:
        """A turn's text, without its end token."""
        ends_in_token = turn.finish.reason is FinishReason.STOP and isinstance(turn.finish.matched, int)
        return self.under_test.decode(turn.ids[: len(turn.ids) - ends_in_token])

    async def check_refused(self, request: GenerateRequest, what: str) -> None:
        """The engine blames the request: a CallerError, or a status from 400 to 499 of its own."""
        status, drawn = 0, 0
        try:
            drawn = len((await self.draw(request)).ids)
        except CallerError as error:
            status = error.status
        except UpstreamRefused as error:
            status = error.engine_status
        assert status, f"{what} was to be refused, and {drawn} tokens came"
        assert 400 <= status < 500, f"{what} was answered with the status {status}"

    async def wait(self) -> None:
        """Let a while pass between two looks at a state without notification."""
        await asyncio.sleep(POLL_S)

    async def until_idle(self) -> None:
        """Wait until the engine itself counts none running. Raises NotOffered where it does not say."""
        if self.under_test.num_running is None:
            raise NotOffered("a count of what the engine runs: num_running")
        while await self.under_test.num_running() != 0:
            await self.wait()

    def check_same(self, what: str, one: SampledTurn, other: SampledTurn) -> None:
        """Two greedy turns are the same, to the engine's precision. Raises AssertionError."""
        self.check_begins(what, one, other)
        is_tie = list(one.ids) != list(other.ids)[: len(one.ids)]
        if not is_tie:
            assert len(one.ids) == len(other.ids), f"{what}: {len(one.ids)} tokens, and {len(other.ids)}"
            assert one.finish == other.finish, f"{what}: {one.finish}, and {other.finish}"

    def check_begins(self, what: str, one: SampledTurn, other: SampledTurn) -> None:
        """A turn is the beginning of another, to the engine's precision. Raises AssertionError."""
        tolerance = self.under_test.tolerance_nats
        assert len(one.ids) <= len(other.ids), f"{what}: {len(one.ids)} tokens are no beginning of {len(other.ids)}"
        for at, (mine, theirs) in enumerate(zip(one.ids, other.ids, strict=False)):
            apart = abs(one.logprobs[at] - other.logprobs[at])
            if mine != theirs:
                assert 0 < tolerance >= apart, f"{what}: token {at} is {mine}, and {theirs}"
                return  # a tie: what follows has another history
            assert apart <= tolerance, f"{what}: logprobs of token {at} are {apart:g} nats apart"


def without(turn: SampledTurn, num_first: int) -> SampledTurn:
    """A turn without its first tokens, its weights and its alternatives."""
    return SampledTurn(
        ids=turn.ids[num_first:],
        logprobs=turn.logprobs[num_first:],
        sampling_logprobs=None,
        top_logprobs=None,
        finish=turn.finish,
        weights=(),
        num_cached_tokens=turn.num_cached_tokens,
        times=None,
    )


def check_close(what: str, one: Sequence[float], other: Sequence[float], *, tolerance: float) -> None:
    """Two rows of logprobs agree. Raises AssertionError."""
    assert len(one) == len(other), f"{what}: {len(one)} logprobs, and {len(other)}"
    worst = max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
    assert worst <= tolerance or math.isclose(worst, tolerance), f"{what}: {worst:g} nats apart"
