"""Plays a session of several turns with a real engine through the server's own code, and checks the engine's input.

Owns the script of the session and the checks of its turns. They are about tokens, not about content: a long reply is
requested again with stop strings, as a client would. Knows nothing of settings or printing.
"""

import json
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

from stenograph.core.clock import Clock
from stenograph.core.errors import (
    EngineUnavailable,
    StenographError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from stenograph.core.messages import Message, Role
from stenograph.core.stages import StageTimes
from stenograph.core.types import Chunk, FinishReason, RequestId, all_finite, token_ids
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.settings import UnknownFields
from stenograph.engine.base import Capabilities, Engine, EngineHealth, GenerateRequest
from stenograph.offload.pool import CpuPool
from stenograph.session.admission import Admission, Limits
from stenograph.session.facts import line_drift
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices
from stenograph.session.turn import TurnOutcome
from stenograph.text.conversations import WEATHER, call
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import SessionOptions
from stenograph.verify.findings import Check, Finding, first_difference

MAX_TOKENS = 64
"""Most tokens of a reply; with a short context an eighth of it, so all turns fit."""
STOPS = (" ", ".", "e", "\n")
"""Strings of nearly every reply: a session cannot go on from a cut reply."""
MAX_ATTEMPTS = 6
MAX_RESULT_TURNS = 2

NO_WORD_OF_EXACTNESS = (EngineUnavailable, UpstreamRefused, UpstreamTimeout, UpstreamUnreachable)
"""Errors of an engine without a reply to check."""

WireMessage: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTurn:
    """One generation. `num_kept` of the prompt's ids were there before; `finding` is its fault, if any."""

    name: str
    num_prompt: int
    num_kept: int
    num_sampled: int
    ended_by: str
    finding: Finding | None


@dataclass(slots=True, kw_only=True)
class LiveSession:
    """The result, grown turn by turn. `broke` is why it ended before its time; `engine_failed`: for a reason unrelated
    to exactness, because the engine was away, refused a turn or took too long."""

    engine: str
    turns: list[LiveTurn] = field(default_factory=list[LiveTurn])
    notes: list[str] = field(default_factory=list[str])
    broke: str = ""
    engine_failed: bool = False

    @property
    def holds(self) -> bool:
        """Whether it was played to its end, and all of it is as it has to be."""
        return not self.broke and not any(turn.finding for turn in self.turns)


async def play(
    renderer: Renderer,
    engine: Engine,
    *,
    where: str,
    clock: Clock,
    timeout_s: float,
    kwargs: Mapping[str, object],
    told: Callable[[int, int], None],
) -> LiveSession:
    """Play a session with a started engine. Never raises an engine's error.

    `told` is called with the progress; `where` is the engine's address, for messages.
    """
    heard = _Heard(engine)
    pool = CpuPool(1)
    services = TurnServices(engine=heard, renderer=renderer, pool=pool, clock=clock, timeout_s=timeout_s)
    player = _Player(services, heard, kwargs, where)
    try:
        await player.play(told)
    except StenographError as error:
        player.live.broke = f"{error.code}: {error}"
        player.live.engine_failed = isinstance(error, NO_WORD_OF_EXACTNESS)
    except _NoEnd as error:
        player.live.broke = str(error)
    finally:
        pool.close()
    return player.live


class _NoEnd(Exception):
    """The model ends no reply."""


class _Heard(Engine):
    """An engine recording its latest prompt and ids, independently of the session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prompt_ids = token_ids()
        self.ids = token_ids()

    def __repr__(self) -> str:
        return f"<_Heard {self._engine!r}>"

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.prompt_ids, self.ids = request.prompt.ids[:], token_ids()
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                self.ids.extend(chunk.ids)
                yield chunk

    async def abort(self, request_id: RequestId) -> bool:
        return await self._engine.abort(request_id)

    def health(self) -> EngineHealth:
        return self._engine.health()

    async def aclose(self) -> None:
        await self._engine.aclose()


class _Player:
    """One session on its way. `_line` are the ids, as the engine knows them, for the next prompt to begin with."""

    def __init__(self, services: TurnServices, heard: _Heard, kwargs: Mapping[str, object], where: str) -> None:
        self._services = services
        self._renderer = services.renderer
        self._heard = heard
        self._manager = SessionManager(services=services, limits=Limits(max_sessions=1, max_in_flight=1))
        self._session = self._manager.sessions.create(SessionOptions(template_kwargs=kwargs))
        self._has_tools = bool(self._renderer.family.shows_tools)
        self._max_tokens = min(MAX_TOKENS, (heard.capabilities.max_context_tokens or 8 * MAX_TOKENS) // 8)
        self._messages: list[WireMessage] = []
        self._line: array[int] = token_ids()
        self._reply: Message | None = None
        self.live = LiveSession(engine=f"{heard.capabilities.engine} {where}")

    def __repr__(self) -> str:
        return f"<_Player {len(self.live.turns)} turns>"

    async def play(self, told: Callable[[int, int], None]) -> None:
        """Every turn. Raises StenographError, and _NoEnd."""
        num_steps = 5
        told(0, num_steps)
        await self._turn("first", _user("Say hello."))
        told(1, num_steps)
        await self._turn("second", _user("Say it once more."))
        told(2, num_steps)
        self._messages.pop()
        await self._sample("second, retried", is_retry=True)
        told(3, num_steps)
        if self._has_tools:
            await self._turn("tool result", *_looked_up())
        else:
            self.live.notes.append("There is no turn with a tool's result: the template shows no tools.")
        told(4, num_steps)
        await self._turn("last", _user("Thank you."))
        told(num_steps, num_steps)

    async def _turn(self, name: str, *new: WireMessage) -> None:
        """Go on from the last reply, with results for the model's own calls."""
        self._line = self._heard.prompt_ids + self._heard.ids
        for _ in range(MAX_RESULT_TURNS):
            if self._reply is None or not self._reply.tool_calls:
                break
            self._messages += [_result(one.id) for one in self._reply.tool_calls]
            await self._sample("result of its call")
            self._line = self._heard.prompt_ids + self._heard.ids
        if self._reply is not None and self._reply.tool_calls:
            self._messages += [_result(one.id) for one in self._reply.tool_calls]
        self._messages += new
        await self._sample(name)

    async def _sample(self, name: str, *, is_retry: bool = False) -> None:
        """Sample the next reply until it has an end; every attempt must have the same prompt."""
        first_prompt = self._heard.prompt_ids if is_retry else None
        for attempt in range(MAX_ATTEMPTS):
            outcome = await self._ask(with_stops=attempt > 0)
            self._look_at(name if attempt == 0 else f"{name}, again", outcome, first_prompt)
            first_prompt = self._heard.prompt_ids
            if outcome.reply.sampled.finish.reason is FinishReason.STOP:
                written = outcome.reply.written
                self._reply = outcome.reply.parsed.message if written is None else written.message
                self._messages.append(_wire(self._reply))
                return
        raise _NoEnd(
            f"in {MAX_ATTEMPTS} attempts of {self._max_tokens} tokens the reply ended neither by itself nor by one of"
            f" the stop strings {list(STOPS)}"
        )

    async def _ask(self, *, with_stops: bool) -> TurnOutcome:
        asked: dict[str, object] = {"messages": self._messages, "max_tokens": self._max_tokens}
        if self._has_tools:
            asked["tools"] = [json.loads(WEATHER.json)]
        if with_stops:
            asked["stop"] = list(STOPS)
        body = json.dumps(asked).encode()
        admission = self._manager.admit(self._session, stages=StageTimes(start=self._services.clock.monotonic()))
        assert isinstance(admission, Admission), "a request without an identity repeats none"
        with admission:
            watch = self._manager.begin(admission, (decode_chat(body, unknown_fields=UnknownFields.REFUSE), b"{}"))
        try:
            return await watch.result()
        finally:
            watch.leave()

    def _look_at(self, name: str, outcome: TurnOutcome, first_prompt: Sequence[int] | None) -> None:
        """Check a turn, and record it."""
        reply, prompt = outcome.reply, self._heard.prompt_ids
        before = self._line[: len(self._line) - reply.prompt.num_trimmed]
        matched = reply.sampled.finish.matched
        ended_by = matched if isinstance(matched, str) else "" if matched is None else self._token_text(matched)
        finding = None
        if prompt[: len(before)] != before:
            finding = self._finding(name, "its prompt does not begin with the ids of the turn before", before, prompt)
        elif first_prompt is not None and prompt != first_prompt:
            finding = self._finding(name, "its second attempt has another prompt than its first", first_prompt, prompt)
        elif reply.sampled.ids != self._heard.ids:
            finding = self._finding(
                name, "the record's ids are not the sampled ones", self._heard.ids, reply.sampled.ids
            )
        elif not all_finite(reply.sampled.logprobs):
            finding = self._finding(name, "a logprob is not finite")
        else:
            finding = self._drift(name)
        self.live.turns.append(
            LiveTurn(
                name=name,
                num_prompt=len(prompt),
                num_kept=reply.prompt.num_kept,
                num_sampled=len(reply.sampled.ids),
                ended_by=repr(ended_by) if ended_by else reply.sampled.finish.reason.value,
                finding=finding,
            )
        )

    def _drift(self, name: str) -> Finding | None:
        """Drift not caused by a model. Any template rewrites a reply cut within a block."""
        latest = self._session.latest
        if latest is None:
            return self._finding(name, "the turn was not committed")
        if any(node.turn.reply.faults for node in latest.line()):
            return None
        report = line_drift(latest, self._renderer)
        if report.unrenderable is None and not report.is_forbidden:
            return None
        return self._finding(name, report.unrenderable or "; ".join(drift.detail for drift in report.drifts))

    def _finding(self, name: str, problem: str, expected: Sequence[int] = (), actual: Sequence[int] = ()) -> Finding:
        difference = None
        if expected or actual:
            difference = first_difference(self._renderer.tokenizer, expected=expected, actual=actual)
        return Finding(check=Check.LIVE, conversation=name, problem=problem, difference=difference)

    def _token_text(self, token_id: int) -> str:
        return self._renderer.tokenizer.token_text(token_id)


def _user(text: str) -> WireMessage:
    return {"role": Role.USER.value, "content": text}


def _result(call_id: str) -> WireMessage:
    return {"role": Role.TOOL.value, "tool_call_id": call_id, "content": "It is sunny."}


def _looked_up() -> tuple[WireMessage, ...]:
    """A call made by no model, and its result: to have one, whatever the model does."""
    asked = Message(role=Role.ASSISTANT, tool_calls=(call(1),))
    return _user("Look up the weather."), _wire(asked), _result(call(1).id)


def _wire(message: Message) -> WireMessage:
    """A reply as a client sends it back."""
    wire: WireMessage = {"role": Role.ASSISTANT.value, "content": message.content or ""}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in message.tool_calls
        ]
    return wire
