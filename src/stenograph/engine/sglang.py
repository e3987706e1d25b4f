"""SGLang's chat route as a dialect: one chat request a turn, whose reply the client gets unchanged. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stenograph.core.errors import StenographError
from stenograph.core.settings import ReplayKind
from stenograph.core.types import Chunk, EngineReply, GrammarKind, RequestId
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http_engine import Ask, Call, passed_through
from stenograph.engine.sglang_wire import GRAMMARS, decode_reply, encode_abort, encode_request
from stenograph.engine.transport import HttpReply

CHAT_PATH = "/v1/chat/completions"
ABORT_PATH = "/abort_request"
PROBE_PATHS = ("/health", "/v1/models")
"""The second is for routers that have no `/health`."""


class SGLangChat:
    """A server whose chat route knows `input_ids`."""

    def __init__(
        self,
        *,
        model: str,
        vocab_size: int,
        grammars: frozenset[GrammarKind] = GRAMMARS,
        replay: ReplayKind = ReplayKind.NONE,
    ) -> None:
        """`model` is its model's name there. `replay` says what is asked for that trainers replay."""
        self._replay = replay
        self._capabilities = Capabilities(
            engine="sglang",
            model=model,
            vocab_size=vocab_size,
            max_context_tokens=None,
            grammars=grammars,
            streams=False,
            parses=True,
            takes_json=True,
        )

    def __repr__(self) -> str:
        return f"<SGLangChat {self._capabilities.model}>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def probe_paths(self) -> Sequence[str]:
        return PROBE_PATHS

    async def discover(self, ask: Ask) -> None:
        """Nothing: `/health` does not tell what the chat route knows, and a reply without its fields is refused."""

    def call(self, request: GenerateRequest) -> Call:
        key = request.affinity_key
        return Call(
            path=CHAT_PATH,
            body=encode_request(request, model=self._capabilities.model, replay=self._replay),
            headers=() if key is None else (("x-smg-routing-key", key),),
        )

    def reading(self, request: GenerateRequest) -> "SGLangChatReading":
        return SGLangChatReading(vocab_size=self._capabilities.vocab_size, num_prompt=len(request.prompt.ids))

    def refusal(self, http: HttpReply) -> StenographError:
        return passed_through(http)

    def abort_call(self, request_id: RequestId) -> Call:
        return Call(path=ABORT_PATH, body=encode_abort(request_id))


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
