"""The embedded engine without a server: the ids that the server would send, given to the engine by this process.

A turn is rendered as the server renders it, but before its clock runs: what is left is the engine's own time.
"""

import time
from contextlib import aclosing

from stenograph.bench.serving_mix import Line, Mix, SessionPlan, TurnPlan
from stenograph.bench.serving_target import ChatFailed, Heard
from stenograph.core.errors import StenographError
from stenograph.core.messages import Message, Role
from stenograph.core.types import (
    EngineTimes,
    Finish,
    FinishReason,
    Prompt,
    RequestId,
    SamplingParams,
    Stage,
    token_ids,
)
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.protocol.openai_chat import decode_chat
from stenograph.render.renderer import Renderer
from stenograph.session.opening import TAIL_TOKENS

_REPLY = Message(role=Role.ASSISTANT, content="")
"""Stands for a reply in a bridge: of one without calls, nothing matters but that there was one."""


class EngineTarget:
    """An engine that runs, and the renderer of its model."""

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self._engine = engine
        self._renderer = renderer
        self._num_talks = 0

    def talk(self, number: int, mix: Mix, plan: SessionPlan) -> "EngineTalk":
        """The client of a session."""
        self._num_talks += 1
        return EngineTalk(number, f"bench-{self._num_talks}", Line(mix, plan), self._engine, self._renderer)

    async def collect(self, heard: list[Heard]) -> None:
        """The engine's times are in its replies."""

    async def aclose(self) -> None:
        """End the engine."""
        await self._engine.aclose()


class EngineTalk:
    """A session whose line of ids is kept here, as the server keeps it."""

    def __init__(self, number: int, name: str, line: Line, engine: Engine, renderer: Renderer) -> None:
        self._number = number
        self._name = name
        self._line = line
        self._engine = engine
        self._renderer = renderer
        self._ids = token_ids()
        self._turn = -1
        self._prompt = self._ids
        self._params = SamplingParams()

    def prepare(self, turn: TurnPlan) -> None:
        """Render the turn: the line's ids, untouched, and the bridge; or everything, at first."""
        self._turn += 1
        request = decode_chat(self._line.new_body(turn))
        self._params = request.params
        if not self._ids:
            self._prompt = self._renderer.render(request.messages, (), {})
            return
        bridge = self._renderer.bridge(self._ids[-TAIL_TOKENS:], _REPLY, request.messages, (), {})
        kept = self._ids[: len(self._ids) - bridge.num_trimmed]
        self._prompt = kept + bridge.ids

    async def ask(self, turn: TurnPlan, due_s: float) -> Heard:
        """Raises ChatFailed."""
        drawn, pieces_s, num_cached = token_ids(), list[float](), 0
        finish, times = Finish(reason=FinishReason.ABORT), None
        request = GenerateRequest(
            request_id=RequestId(f"{self._name}-{self._turn}"), prompt=Prompt(ids=self._prompt), params=self._params
        )
        sent_s = time.monotonic()
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.ids:
                        pieces_s.append(time.monotonic())
                        drawn.extend(chunk.ids)
                    if chunk.finish is not None:
                        finish, times, num_cached = chunk.finish, chunk.times, chunk.num_cached_tokens
        except StenographError as error:
            raise ChatFailed(f"{error.status} {error.code}", str(error)) from error
        end_s = time.monotonic()
        is_cut = finish.reason is FinishReason.LENGTH
        if not is_cut:
            self._line.answered(turn, "")
            self._ids = self._prompt + drawn
        return Heard(
            session=self._number,
            turn=self._turn,
            due_s=due_s,
            sent_s=sent_s,
            pieces_s=pieces_s,
            end_s=end_s,
            num_prompt=len(self._prompt),
            num_completion=len(drawn),
            num_cached=num_cached,
            is_cut=is_cut,
            request_id=request.request_id,
            stages_s={} if times is None else _stages(sent_s, times),
        )

    def close(self) -> None:
        """Nothing is held."""


def _stages(sent_s: float, times: EngineTimes) -> dict[str, float]:
    """The engine's stages under the server's names, from the same start: the request's leaving this process."""
    return {
        Stage.QUEUE: times.admitted - sent_s,
        Stage.PREFILL: times.first_token - times.admitted,
        Stage.DECODE_TOKENS: times.finished - times.first_token,
    }
