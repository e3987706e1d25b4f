"""How a turn opens: where it attaches, and the ids of its prompt. One class for each thing that can be asked for.

`ChatOpening` has messages, which are matched with those of the history and rendered; `CompletionOpening` has a prompt,
which is matched by its ids and goes to the engine as it is. Neither knows what becomes of the prompt.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stenograph.core.chat import Asked, ChatRequest, CompletionRequest, ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.ids_json import PIECE_IDS, encode_ids, join_ids, pieces_of
from stenograph.core.messages import Message
from stenograph.core.settings import OverBudget
from stenograph.core.types import Grammar, Prompt, RequestId, SamplingParams
from stenograph.engine.base import Capabilities
from stenograph.offload.loop_share import LoopShare
from stenograph.offload.pool import CpuPool
from stenograph.render.day import Day
from stenograph.render.parsers.harmony import HarmonyParser
from stenograph.render.parsers.plain import PlainParser
from stenograph.render.parsers.reading import Parser
from stenograph.render.renderer import PROMPT_END_TOKENS, Bridge, Renderer
from stenograph.session.history import Attachment, History, PromptContext, line_ids
from stenograph.session.line_json import LineJson
from stenograph.session.recent import RecentRequest
from stenograph.session.reply_grammar import BeforeAnswer, harmony_frame, open_reasoning

FRAME_BYTES = 32
"""What a message costs that says nothing."""

TAIL_TOKENS = 64
"""How many of a line's last ids a bridge is shown: more than any template writes between two messages."""


PROOF_BYTES = 1 << 20
"""As much as the proof costs that a template is append-only with arguments that are new: about 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a turn reads of its session, and is added to when it is committed."""

    history: History
    recent: RecentRequest
    line_json: LineJson


class Opening(Protocol):
    """What of a turn depends on what was asked for. Used by one turn, its steps in this order."""

    asked: Asked
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    prompt_param: str
    """The JSON pointer of what the prompt is made of."""

    context: PromptContext
    """What stands in the prompt beside the messages; settled by `position`."""

    async def position(self) -> Attachment:
        """Find where the turn attaches. Changes nothing. Raises CallerError."""
        ...

    async def render(self, attachment: Attachment) -> Prompt:
        """The ids of the prompt. Raises CallerError or TokenizationFailed."""
        ...

    def forced_grammar(self, prompt: Prompt) -> Grammar | None:
        """The grammar that the request's tools force upon the reply, beside the one that it may ask for itself."""
        ...

    def before_answer(self, prompt: Prompt) -> BeforeAnswer | None:
        """What comes before the answer, which alone is held to a grammar that the client asks for."""
        ...

    def parser(self, params: SamplingParams, request_id: RequestId, prompt: Prompt) -> Parser:
        """What reads the reply."""
        ...


class ChatOpening:
    """The next message of a conversation."""

    asked = Asked.CHAT
    prompt_param = "/messages"

    def __init__(
        self,
        request: ChatRequest,
        *,
        ledger: Ledger,
        renderer: Renderer,
        pool: CpuPool,
        share: LoopShare,
        capabilities: Capabilities,
        opened_at: float,
    ) -> None:
        self.tool_choice = request.tool_choice
        self.parallel_tool_calls = request.parallel_tool_calls
        self.context = PromptContext(
            tools=request.tools,
            template_kwargs=request.template_kwargs,
            day=Day.of(opened_at) if renderer.writer.reads_date else None,
        )
        self._request = request
        self._ledger = ledger
        self._renderer = renderer
        self._pool = pool
        self._share = share
        self._capabilities = capabilities

    async def position(self) -> Attachment:
        """Match the messages. Those that were read before, with the request before this one, are known good."""
        messages, context = self._request.messages, self.context
        history = self._ledger.history
        before = self._ledger.recent.node_of(self._request)
        num_known = 0 if before is None else before.num_messages - 1
        self._renderer.check_messages(messages, context.tools, first=num_known)
        attachment = None if before is None else history.position_after(before, messages, context)
        attachment = attachment or history.position(messages, context)
        if attachment.parent is not None and attachment.parent.turn.context.is_same(context):
            self.context = attachment.parent.turn.context  # one object for all turns of a line
        return attachment

    async def render(self, attachment: Attachment) -> Prompt:
        """The line's ids, untouched, and the bridge; or the whole conversation at first."""
        renderer, new, tools = self._renderer, attachment.new_messages, self.context.tools
        kwargs, parent = self.context.arguments, attachment.parent
        num_bytes = sum(map(_num_bytes, new))
        if parent is None or not renderer.family.tools_before_turns:
            num_bytes += self.context.num_bytes
        kept = line_ids(parent)
        if parent is None:
            num_bytes += 0 if renderer.is_known(kwargs) else PROOF_BYTES
            work: Callable[[], Bridge] = lambda: Bridge(ids=renderer.render(new, tools, kwargs))  # noqa: E731
        else:
            reply = parent.turn.reply.message
            work = lambda: renderer.bridge(kept[-TAIL_TOKENS:], reply, new, tools, kwargs)  # noqa: E731
        try:
            bridge = await self._pool.run(work, num_bytes=num_bytes)
        except RecursionError as error:
            raise UnrenderableMessage("A tool call's arguments are nested too deeply to be shown.") from error
        if bridge.num_trimmed:
            del kept[-bridge.num_trimmed :]
        at_hand = None if bridge.num_trimmed else self._ledger.line_json.of(parent)
        return Prompt(
            ids=kept + bridge.ids,
            num_kept=len(kept),
            num_trimmed=bridge.num_trimmed,
            ids_json=await _ids_json(self._share, at_hand, kept, bridge.ids) if self._capabilities.takes_json else None,
        )

    def forced_grammar(self, prompt: Prompt) -> Grammar | None:
        request = self._request
        return self._renderer.tool_grammar(
            request.tools, request.tool_choice, request.parallel_tool_calls, prompt_ids=prompt.ids
        )

    def before_answer(self, prompt: Prompt) -> BeforeAnswer | None:
        tokenizer, family = self._renderer.tokenizer, self._renderer.family
        if family.make_parser is HarmonyParser:
            return harmony_frame(tokenizer.added_tokens)
        prompt_end = tokenizer.decode(prompt.ids[-PROMPT_END_TOKENS:])
        return open_reasoning(family.syntax.reasoning, tokenizer.added_tokens, prompt_end)

    def parser(self, params: SamplingParams, request_id: RequestId, prompt: Prompt) -> Parser:
        tools = () if self.tool_choice.mode is ToolMode.NONE else self._request.tools
        return self._renderer.parser(params, tools, id_prefix=request_id[:12], prompt_ids=prompt.ids)


class CompletionOpening:
    """The continuation of one prompt of a request."""

    asked = Asked.COMPLETION
    tool_choice = ToolChoice()
    parallel_tool_calls = True
    context = PromptContext()

    def __init__(
        self,
        request: CompletionRequest,
        index: int,
        *,
        ledger: Ledger,
        renderer: Renderer,
        pool: CpuPool,
        share: LoopShare,
        capabilities: Capabilities,
        over_budget: OverBudget,
    ) -> None:
        self.prompt_param = request.prompt_param(index)
        self._request = request
        self._prompt = request.prompts[index]
        self._ledger = ledger
        self._renderer = renderer
        self._pool = pool
        self._share = share
        self._capabilities = capabilities
        self._over_budget = over_budget
        self._ids: array[int] | None = None

    async def position(self) -> Attachment:
        """Make ids of the prompt, and match them."""
        num_kept = self._num_kept()
        ids = self._truncated(await self._all_ids(), num_kept)
        if not ids:
            raise InvalidRequest("A prompt has at least one token.", param=self.prompt_param)
        self._ids = ids
        return self._ledger.history.position_ids(ids)

    async def render(self, attachment: Attachment) -> Prompt:
        """The ids as they are."""
        assert self._ids is not None, "a turn is positioned before it is rendered"
        ids, parent = self._ids, attachment.parent
        num_kept = 0 if parent is None else parent.num_tokens
        ids_json = None
        if self._capabilities.takes_json:
            ids_json = await _ids_json(self._share, self._ledger.line_json.of(parent), ids[:num_kept], ids[num_kept:])
        return Prompt(ids=ids, num_kept=num_kept, ids_json=ids_json)

    def forced_grammar(self, prompt: Prompt) -> Grammar | None:
        return None

    def before_answer(self, prompt: Prompt) -> BeforeAnswer | None:
        return None

    def parser(self, params: SamplingParams, request_id: RequestId, prompt: Prompt) -> Parser:
        request = self._request
        return PlainParser(
            self._renderer.tokenizer,
            stop=params.stop,
            skips_special=request.skips_special,
            keeps_stop=request.keeps_stop,
        )

    async def _all_ids(self) -> "array[int]":
        """The prompt's ids before any is left out. Raises InvalidRequest for one that the model does not have."""
        prompt = self._prompt
        if isinstance(prompt, str):
            tokenizer = self._renderer.tokenizer
            try:
                return await self._pool.run(lambda: tokenizer.encode(prompt), num_bytes=len(prompt))
            except UnrenderableMessage as error:
                error.param = self.prompt_param
                raise
        vocab_size = self._capabilities.vocab_size
        found = np.frombuffer(prompt, dtype=np.int32)
        if len(found) and not 0 <= found.min() <= found.max() < vocab_size:
            at = int(((found < 0) | (found >= vocab_size)).argmax())
            raise InvalidRequest(
                f"{prompt[at]} is no token id of a vocabulary of {vocab_size}.", param=f"{self.prompt_param}/{at}"
            )
        return prompt

    def _num_kept(self) -> int | None:
        """How many ids may be kept of the prompt; None for all. Less than 1 if the context leaves it no room.

        A `max_tokens` that fills the context by itself and is to be clamped counts as if it were absent: one token.

        Raises InvalidRequest if it is to be what the context leaves, and the engine does not tell its context.
        """
        truncation, limit = self._request.truncation, self._capabilities.max_context_tokens
        if truncation is None or truncation.num_tokens is not None:
            return None if truncation is None else truncation.num_tokens
        if limit is None:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at least 1 here: -1 keeps what the context leaves, and the engine"
                f" {self._capabilities.engine} does not tell how long its context is.",
                param="/truncate_prompt_tokens",
            )
        wanted = self._request.params.max_tokens or 1
        if wanted >= limit and self._over_budget is OverBudget.CLAMP:
            wanted = 1  # it is taken as the room that there is, so it may be as little
        return limit - wanted

    def _truncated(self, ids: "array[int]", num_kept: int | None) -> "array[int]":
        """What is kept of the prompt. One that has no room whatever is left out stays, to be refused as too long."""
        truncation = self._request.truncation
        if truncation is None or num_kept is None or not 0 < num_kept < len(ids):
            return ids
        return ids[-num_kept:] if truncation.keeps_end else ids[:num_kept]


async def _ids_json(share: LoopShare, at_hand: bytes | None, kept: "array[int]", new: "array[int]") -> bytes:
    """`kept` and `new` as JSON without brackets. `at_hand` is the text of `kept`; None if it has to be written too."""
    written = b"" if at_hand is None else at_hand
    ids = new if at_hand is not None else kept + new
    if len(ids) < PIECE_IDS:
        return join_ids((written, encode_ids(ids)))
    return join_ids([written, *[fragment async for fragment in share.pieces(map(encode_ids, pieces_of(ids)))]])


def _num_bytes(message: Message) -> int:
    """About how much work a message is for the template and the tokenizer, as bytes of text."""
    calls = sum(FRAME_BYTES + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return FRAME_BYTES + len(message.content or "") + len(message.reasoning or "") + calls


def openings(
    request: ChatRequest | CompletionRequest,
    *,
    ledger: Ledger,
    renderer: Renderer,
    pool: CpuPool,
    share: LoopShare,
    capabilities: Capabilities,
    over_budget: OverBudget,
    opened_at: float,
) -> list[Opening]:
    """How each turn of a request opens: a chat's one, or one for each prompt of a completion.

    `opened_at`, in seconds of the epoch, is when the session began, or a request that has none.
    """
    if isinstance(request, ChatRequest):
        return [
            ChatOpening(
                request,
                ledger=ledger,
                renderer=renderer,
                pool=pool,
                share=share,
                capabilities=capabilities,
                opened_at=opened_at,
            )
        ]
    return [
        CompletionOpening(
            request,
            index,
            ledger=ledger,
            renderer=renderer,
            pool=pool,
            share=share,
            capabilities=capabilities,
            over_budget=over_budget,
        )
        for index in range(len(request.prompts))
    ]
