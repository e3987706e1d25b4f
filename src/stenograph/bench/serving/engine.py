"""The embedded engine without a server: the ids that the server would send, given to the engine by this process.

A turn is rendered as the server renders it, but before its clock runs: what is left is the engine's own time.
"""

from stenograph.bench.kit.client import RequestFailed
from stenograph.bench.kit.timed_reply import TimedReply, read_reply
from stenograph.bench.serving.mix import CHAT, COMPLETIONS, ChatHistory, Mix, SessionPlan, TextHistory, TurnPlan
from stenograph.bench.serving.target import ServedReply
from stenograph.core.chat import TextView
from stenograph.core.errors import StenographError
from stenograph.core.messages import Message, Role
from stenograph.core.types import (
    EngineTimes,
    FinishReason,
    Prompt,
    RequestId,
    SamplingParams,
    Stage,
    token_ids,
)
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.openai.completions import decode_completion
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.render.renderer import Renderer
from stenograph.reply.plain import PlainParser
from stenograph.session.opening import TAIL_TOKENS

_REPLY = Message(role=Role.ASSISTANT, content="")
"""Stands for a reply in a bridge: of one without calls, nothing matters but that there was one."""


class EngineTarget:
    """An engine that runs, and the renderer of its model."""

    def __init__(self, engine: Engine, renderer: Renderer, *, endpoint: str = CHAT) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._renderer = renderer
        self._num_talks = 0

    def talk(self, number: int, mix: Mix, plan: SessionPlan) -> "EngineTalk":
        """The client of a session."""
        self._num_talks += 1
        line = TextHistory(mix, plan) if self._endpoint == COMPLETIONS else ChatHistory(mix, plan)
        return EngineTalk(number, f"bench-{self._num_talks}", line, self._engine, self._renderer)

    async def collect(self, heard: list[ServedReply]) -> None:
        """The engine's times are in its replies."""

    async def aclose(self) -> None:
        """End the engine."""
        await self._engine.aclose()


class EngineTalk:
    """A session whose line of ids is kept here, as the server keeps it."""

    def __init__(
        self, number: int, name: str, line: ChatHistory | TextHistory, engine: Engine, renderer: Renderer
    ) -> None:
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
        """Render the turn: the line's ids, untouched, and the bridge; or everything, at first, and of a completion."""
        self._turn += 1
        if isinstance(self._line, TextHistory):
            completion = decode_completion(self._line.new_body(turn))
            (text,) = completion.prompts
            assert isinstance(text, str), "a client says text"
            self._prompt, self._params = self._renderer.tokenizer.encode(text), completion.params
            return
        request = decode_chat(self._line.new_body(turn))
        self._params = request.params
        if not self._ids:
            self._prompt = self._renderer.render(request.messages, (), {})
            return
        bridge = self._renderer.bridge(self._ids[-TAIL_TOKENS:], _REPLY, request.messages, (), {})
        kept = self._ids[: len(self._ids) - bridge.num_trimmed]
        self._prompt = kept + bridge.ids

    async def ask(self, turn: TurnPlan, due_s: float) -> ServedReply:
        """Raises RequestFailed."""
        request = GenerateRequest(
            request_id=RequestId(f"{self._name}-{self._turn}"), prompt=Prompt(ids=self._prompt), params=self._params
        )
        try:
            reply = await read_reply(self._engine, request, lambda chunk: None)
        except StenographError as error:
            raise RequestFailed(f"{error.status} {error.code}", str(error)) from error
        is_cut = reply.finish.reason is FinishReason.LENGTH
        if not is_cut:
            self._line.answered(turn, self._said(reply))
            self._ids = self._prompt + reply.ids
        return ServedReply(
            session=self._number,
            turn=self._turn,
            due_s=due_s,
            sent_s=reply.sent_s,
            pieces_s=reply.pieces_s,
            end_s=reply.end_s,
            num_prompt=len(self._prompt),
            num_completion=len(reply.ids),
            num_cached=reply.num_cached,
            is_cut=is_cut,
            request_id=request.request_id,
            stages_s={} if reply.times is None else _stages(reply.sent_s, reply.times),
        )

    def _said(self, reply: TimedReply) -> str:
        """The reply's text, of which only a completion's next turn knows."""
        parser = PlainParser(self._renderer.tokenizer, stop=self._params.stop, view=TextView())
        parser.feed(reply.ids)
        return parser.finish(reply.finish)[1].message.content or ""

    def close(self) -> None:
        """Nothing is held."""


def _stages(sent_s: float, times: EngineTimes) -> dict[str, float]:
    """The engine's stages under the server's names, from the same start: the request's leaving this process."""
    return {
        Stage.QUEUE: times.admitted - sent_s,
        Stage.PREFILL: times.first_token - times.admitted,
        Stage.DECODE_TOKENS: times.finished - times.first_token,
    }
