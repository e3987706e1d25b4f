"""The embedded engine without a server: the ids that the server would send, given to the engine by this process.

A turn is rendered as the server renders it, but before its clock runs: what is left is the engine's own time.
"""

from benchmarks.kit.client import RequestFailed
from benchmarks.kit.requests import GeneratedReply, TimedReply, read_reply
from benchmarks.serving.mix import CHAT, History, Mix, SessionPlan, TextHistory, TurnPlan, make_history
from stenograph.core.chat import TextView
from stenograph.core.errors import StenographError
from stenograph.core.messages import Message, Role
from stenograph.core.types import Prompt, RequestId, SamplingParams, token_ids
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.openai.completions import decode_completion
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.session.prompt_builder import TAIL_TOKENS
from stenograph.text.renderer import Renderer
from stenograph.text.reply_text import PlainParser

_REPLY = Message(role=Role.ASSISTANT, content="")
"""Stands for a reply in a bridge: of one without calls, nothing matters but that there was one."""


class EngineTarget:
    """An engine, and the renderer of its model."""

    def __init__(self, engine: EmbeddedEngine, renderer: Renderer, *, endpoint: str = CHAT) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._renderer = renderer
        self._num_talks = 0

    def talk(self, mix: Mix, plan: SessionPlan) -> "EngineTalk":
        """The client of a session."""
        self._num_talks += 1
        history = make_history(self._endpoint, mix, plan)
        return EngineTalk(f"bench-{self._num_talks}", history, self._engine, self._renderer)

    async def collect(self, heard: list[TimedReply]) -> None:
        """The engine's times are in its replies."""

    async def start(self) -> None:
        """Start the engine. Raises StartupError."""
        await self._engine.start()

    async def aclose(self) -> None:
        """End the engine."""
        await self._engine.aclose()


class EngineTalk:
    """A session whose line of ids is kept here, as the server keeps it."""

    def __init__(self, name: str, history: History, engine: Engine, renderer: Renderer) -> None:
        self._name = name
        self._history = history
        self._engine = engine
        self._renderer = renderer
        self._ids = token_ids()
        self._turn = -1
        self._prompt = self._ids
        self._params = SamplingParams()

    def prepare(self, turn: TurnPlan) -> None:
        """Render the turn: the line's ids, untouched, and the bridge; or everything, at first, and of a completion."""
        self._turn += 1
        body = self._history.body(turn, only_new=True)
        if isinstance(self._history, TextHistory):
            completion = decode_completion(body)
            (text,) = completion.prompts
            assert isinstance(text, str), "a client says text"
            self._prompt, self._params = self._renderer.tokenizer.encode(text), completion.params
            return
        request = decode_chat(body)
        self._params = request.params
        if not self._ids:
            self._prompt = self._renderer.render(request.messages, (), {})
            return
        bridge = self._renderer.bridge(self._ids[-TAIL_TOKENS:], _REPLY, request.messages, (), {})
        kept = self._ids[: len(self._ids) - bridge.num_trimmed]
        self._prompt = kept + bridge.ids

    async def ask(self, turn: TurnPlan) -> TimedReply:
        """Raises RequestFailed."""
        request = GenerateRequest(
            request_id=RequestId(f"{self._name}-{self._turn}"), prompt=Prompt(new_ids=self._prompt), params=self._params
        )
        try:
            reply = await read_reply(self._engine, request, lambda chunk: None)
        except StenographError as error:
            raise RequestFailed(f"{error.status} {error.code}", str(error)) from error
        if not reply.is_cut:
            self._history.answered(turn, self._said(reply))
            self._ids = self._prompt + reply.ids
        return reply

    def _said(self, reply: GeneratedReply) -> str:
        """The reply's text, of which only a completion's next turn knows."""
        parser = PlainParser(self._renderer.tokenizer, stop=self._params.stop, view=TextView())
        parser.feed(reply.ids)
        return parser.finish(reply.finish)[1].message.content or ""

    def close(self) -> None:
        """Nothing is held."""
