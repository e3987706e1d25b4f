"""The adapter of SGLang: chats go to the chat route, and its reply to the client; all else to `/generate`. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stenograph.core.errors import StenographError
from stenograph.core.kinds import ReplyMode
from stenograph.core.types import Chunk, EngineReply
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.adapter import (
    AdapterOptions,
    Ask,
    Call,
    EngineReading,
    passed_through,
)
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat_stream import OVERLAPPED, STREAM_PARTS, SGLangChatStream, streams_whole
from stenograph.engine.sglang.chat_wire import decode_reply, encode_request
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.sglang.generate_wire import too_long
from stenograph.engine.sglang.lean_copy import cut_replay
from stenograph.engine.sglang.request import tells_support

CHAT_PATH = "/v1/chat/completions"


class SGLangChat(SGLangGenerate):
    """A server with `input_ids` on its chat route. Its own route serves all but chats."""

    def __init__(self, options: AdapterOptions) -> None:
        super().__init__(options)
        self._reply_mode = options.reply_mode
        self._note = ""
        self._take_chats()

    async def discover(self, ask: Ask) -> None:
        """Find the context's length, and whether chats can be streamed."""
        await super().discover(ask)
        self._take_chats()

    def call(self, request: GenerateRequest) -> tuple[Call, EngineReading]:
        if request.chat is None:
            return super().call(request)
        vocab_size, num_prompt = self.capabilities.vocab_size, request.prompt.num_tokens - self._num_unreported
        if request.streams and self.capabilities.streams and streams_whole(request.params, self._replay):
            body = encode_request(request, model=self.capabilities.model, replay=self._replay, form=STREAM_PARTS)
            stream = SGLangChatStream(request, vocab_size=vocab_size, num_prompt=num_prompt, overlapped=self._overlap)
            return Call(path=CHAT_PATH, body=body, streams=True), stream
        body = encode_request(request, model=self.capabilities.model, replay=self._replay)
        return Call(path=CHAT_PATH, body=body), SGLangChatReading(
            request_id=request.request_id,
            vocab_size=vocab_size,
            num_prompt=num_prompt,
            replay=self._replay,
            first_row=request.prompt.first_new_row,
            row_size=self._route_size,
            reply_mode=self._reply_mode,
            wants_support=request.params.support and tells_support(request.params),
        )

    def refusal(self, http: HttpReply, request: GenerateRequest) -> StenographError:
        return super().refusal(http, request) if request.chat is None else too_long(http) or passed_through(http)

    def _overlap(self) -> None:
        """From now on ask for whole replies: they report the weights of each token."""
        self._note = OVERLAPPED
        self._take_chats()

    def _take_chats(self) -> None:
        self.capabilities = replace(
            self.capabilities,
            engine="sglang",
            streams=self._streams_chats and not self._note,
            parses=True,
            note=self._note,
            media=frozenset(),  # its chats go as ids alone
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangChatReading(EngineReading):
    """A whole reply: one chunk with everything."""

    request_id: str
    vocab_size: int
    num_prompt: int
    replay: ReplayKind
    first_row: int = 0
    row_size: int = 0
    reply_mode: ReplyMode = ReplyMode.PASSTHROUGH
    wants_support: bool = False

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        reply = decode_reply(
            http.body,
            request_id=self.request_id,
            vocab_size=self.vocab_size,
            num_prompt=self.num_prompt,
            replay=self.replay,
            first_row=self.first_row,
            row_size=self.row_size,
            wants_support=self.wants_support,
        )
        written = EngineReply(
            id=reply.id,
            body=http.body,
            content_type=http.content_type,
            headers=http.headers,
            message=reply.message,
        )
        if self.reply_mode is ReplyMode.LEAN:
            written = written.with_body(cut_replay(http.body))
        chunk = Chunk(
            ids=reply.ids,
            logprobs=reply.logprobs,
            sampling_logprobs=reply.sampling_logprobs,
            support=reply.support,
            top_logprobs=reply.top_logprobs,
            finish=reply.finish,
            num_cached_tokens=reply.num_cached_tokens,
            weight_version=reply.weight_version,
            is_version_of_reply=reply.weights is None,
            weights=reply.weights,
            reply=written,
            replay=reply.replay,
            unasked_replay=reply.unasked_replay,
        )
        return (chunk,)
