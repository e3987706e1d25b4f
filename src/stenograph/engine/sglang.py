"""SGLang as a dialect: a chat goes to the chat route, whose reply its client gets unchanged, all else to `/generate`.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stenograph.core.errors import StenographError
from stenograph.core.settings import ReplayKind
from stenograph.core.types import Chunk, EngineReply, RequestId
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http_engine import Ask, Call, Reading, passed_through, routing_headers
from stenograph.engine.sglang_generate import SGLangGenerate
from stenograph.engine.sglang_wire import decode_reply, encode_request
from stenograph.engine.transport import HttpReply

CHAT_PATH = "/v1/chat/completions"


class SGLangChat:
    """A server whose chat route knows `input_ids`. What is no chat, its own route serves (`SGLangGenerate`)."""

    def __init__(self, *, model: str, vocab_size: int, replay: ReplayKind = ReplayKind.NONE) -> None:
        """`model` is its model's name there. `replay` says what is asked for that trainers replay."""
        self._model = model
        self._replay = replay
        self._native = SGLangGenerate(model=model, vocab_size=vocab_size, replay=replay)
        self._capabilities = self._own_capabilities()

    def __repr__(self) -> str:
        return f"<SGLangChat {self._model}>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def probe_paths(self) -> Sequence[str]:
        return self._native.probe_paths

    async def discover(self, ask: Ask) -> None:
        """How long the context is. Nothing tells what the chat route knows; a reply without its fields is refused."""
        await self._native.discover(ask)
        self._capabilities = self._own_capabilities()

    def call(self, request: GenerateRequest) -> Call:
        if request.chat is None:
            return self._native.call(request)
        body = encode_request(request, model=self._model, replay=self._replay)
        return Call(path=CHAT_PATH, body=body, headers=routing_headers(request))

    def reading(self, request: GenerateRequest) -> Reading:
        if request.chat is None:
            return self._native.reading(request)
        return SGLangChatReading(vocab_size=self._capabilities.vocab_size, num_prompt=len(request.prompt.ids))

    def refusal(self, http: HttpReply, request: GenerateRequest) -> StenographError:
        return self._native.refusal(http, request) if request.chat is None else passed_through(http)

    def abort_call(self, request_id: RequestId) -> Call:
        return self._native.abort_call(request_id)

    def _own_capabilities(self) -> Capabilities:
        return replace(self._native.capabilities, engine="sglang", streams=False, parses=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangChatReading:
    """One chunk with everything: `return_meta_info` excludes streams."""

    vocab_size: int
    num_prompt: int

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        reply = decode_reply(http.body, vocab_size=self.vocab_size, num_prompt=self.num_prompt)
        written = EngineReply(
            id=reply.id,
            body=http.body,
            content_type=http.content_type,
            headers=http.headers,
            message=reply.message,
        )
        chunk = Chunk(
            ids=reply.ids,
            logprobs=reply.logprobs,
            top_logprobs=reply.top_logprobs,
            finish=reply.finish,
            num_cached_tokens=reply.num_cached_tokens,
            weight_version=reply.weight_version,
            reply=written,
            replay=reply.replay,
        )
        return (chunk,)

    def event(self, data: bytes) -> Sequence[Chunk]:
        raise AssertionError("no stream was asked for")

    def end(self) -> Sequence[Chunk]:
        return ()
