"""Steps 4 and 5 of a turn: where it attaches, and the ids of its prompt.

A chat's messages are matched with those of its strand's history, and the new ones rendered. A completion's prompt is
matched by its ids (completion.py). Neither builder knows the prompt's fate.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import (
    Asked,
    ChatRequest,
    ToolChoice,
    ToolMode,
    Truncation,
)
from stenograph.core.clock import Clock
from stenograph.core.day import Day
from stenograph.core.errors import InvalidRequest, TruncatedGeneration, UnrenderableMessage
from stenograph.core.ids_json import PIECE_IDS, encode_ids, pieces_of
from stenograph.core.kinds import Compat
from stenograph.core.loaded import entry
from stenograph.core.messages import Message
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.types import Grammar, Prompt, RequestId, SamplingParams, token_ids
from stenograph.engine.base import Capabilities, Engine
from stenograph.model.tokenizer import Span
from stenograph.offload.pool import INLINE_BELOW_BYTES, LoopShare
from stenograph.session.reply_buffer import READ_AT_ONCE
from stenograph.session.services import TurnServices
from stenograph.session.settings import OverBudget
from stenograph.text.grammar.held import BeforeAnswer, Holder
from stenograph.text.reading import Parser
from stenograph.text.renderer import Bridge
from stenograph.trajectory.history import Attachment
from stenograph.trajectory.latest import LineText
from stenograph.trajectory.matching import num_compared, rewrites_after
from stenograph.trajectory.strand import Leases, Strand, chapter_of
from stenograph.trajectory.turn import Node, PromptContext, TurnStatus, last_line_ids, line_ids

FRAME_BYTES = 32
"""The cost of an empty message for the template and the tokenizer."""

CHECK_BYTES = 4
"""The cost of a compared and checked message."""

TAIL_TOKENS = 64
"""Number of a line's last ids given to a bridge: more than any template writes between two messages."""

PROOF_BYTES = 1 << 20
"""Cost of proving a template append-only with new arguments: about 0.1 s."""


class Tokenization:
    """One turn's text to ids, on the engine's workers. `began_at` is when its text was there; None before."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.began_at: float | None = None
        self._engine = engine
        self._clock = clock

    async def ids(self, spans: Sequence[Span]) -> "array[int]":
        """Ids [T], as our own tokenizer makes them. Raises as `Engine.tokenize` does."""
        self.began_at = self._clock.monotonic()
        return await self._engine.tokenize(spans)


class PromptBuilder(Protocol):
    """The request-dependent steps of a turn. Used by one turn, in this order."""

    asked: Asked
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    prompt_blame: Blame
    """Its prompt, as a part of the request."""

    context: PromptContext
    """Everything in the prompt beside the messages; settled by `position`."""

    tokenization: Tokenization | None
    """Makes ids of text where our own tokenizer does not do it."""

    rewrites: tuple[AppliedRewrite, ...]
    """The changes to the client's request; settled by `position`."""

    @property
    def strand(self) -> Strand:
        """Its strand, once it is positioned."""
        ...

    async def position(self) -> Attachment:
        """Find where the turn attaches. Changes nothing. Raises CallerError."""
        ...

    async def render(self, attachment: Attachment) -> Prompt:
        """The ids of the prompt. Raises CallerError or TokenizationFailed."""
        ...

    async def forced_grammar(self, prompt: Prompt) -> Grammar | None:
        """The grammar of a call forced by the request's `tool_choice`, beside one asked for by the request itself."""
        ...

    def before_answer(self, prompt: Prompt) -> BeforeAnswer | None:
        """The part before the answer; a grammar asked for by the client constrains the answer alone."""
        ...

    def parser(self, params: SamplingParams, request_id: RequestId, prompt: Prompt) -> Parser:
        """The reader of the reply."""
        ...


class ChatPromptBuilder:
    """The next message of a conversation."""

    asked = Asked.CHAT
    rewrites: tuple[AppliedRewrite, ...] = ()
    prompt_blame = Blame(RequestPart.PROMPT)

    def __init__(
        self,
        request: ChatRequest,
        *,
        leases: Leases,
        services: TurnServices,
        capabilities: Capabilities,
        opened_at: float,
    ) -> None:
        self.tokenization: Tokenization | None = None
        if leases.strands is None and services.tokenizer is not None:
            self.tokenization = Tokenization(services.tokenizer, services.clock)
        self.tool_choice = request.tool_choice
        self.parallel_tool_calls = request.parallel_tool_calls
        self.context = PromptContext(
            tools=request.tools,
            template_kwargs=request.template_kwargs,
            day=Day.of(opened_at) if services.renderer.writer.reads_date else None,
        )
        self.strand = leases.of_chat(request, self.context)
        self._leases = leases
        self._request = request
        self._services = services
        self._renderer = services.renderer
        self._capabilities = capabilities

    async def position(self) -> Attachment:
        """Match the messages. Only new ones are checked, against the stored ones before them: a client's copy may lack
        the messages they answer."""
        messages, context = self._request.messages, self.context
        if self._renderer.family.keeps_reasoning_apart:
            self._check_view()
        strand, history = self.strand, self.strand.history
        before = strand.line.node_of(self._request)
        # Calls that are spelled anew cost more than their length. A worker may read the history: on a line the lease
        # keeps it as it is, and a tree only grows.
        num_known = 0 if before is None else before.num_messages - 1
        unknown = messages[num_known:]
        num_bytes = CHECK_BYTES * len(unknown) + (0 if history.latest is None else num_compared(unknown))

        takes_any_result = self._leases.strands is not None and self._leases.strands.compat is Compat.MILES
        others = [] if strand.number is not None else self._leases.before(strand, messages)
        for _, line in others:
            num_bytes += CHECK_BYTES * len(line)

        def position() -> tuple[Attachment, Strand | None]:
            attachment = None if before is None else history.position_after(before, messages, context)
            attachment = attachment or history.position(messages, context)
            if attachment.adds_nothing:
                return attachment, None
            earlier = chapter_of(others, self._request, context) if others else None
            if attachment.has_other_reply and strand.key is not None:
                earlier = self._leases.continued_by_fork(strand, attachment, self._request, context)
                attachment = replace(attachment, parent=None, new_messages=messages, revision=0)
            parent = attachment.parent
            self._renderer.check_messages(
                attachment.new_messages,
                context.tools,
                first=0 if parent is None else parent.num_messages,
                follows_call=takes_any_result or (parent is not None and parent.has_calls),
            )
            return attachment, earlier

        attachment, earlier = await self._services.pool.run(position, num_bytes=num_bytes)
        if attachment.adds_nothing:
            return attachment
        if attachment.has_other_reply and strand.key is not None:
            self.strand = self._leases.fork(strand)
        if earlier is not None:
            self.strand.continues, self.strand.chapter = earlier, earlier.chapter + 1
        parent = attachment.parent
        replayed = None if parent is None else messages[parent.num_messages - 1].content
        if self._request.rewrites or (parent is not None and replayed != parent.turn.reply.message.content):
            self.rewrites = rewrites_after(self._request, parent)
        if parent is not None:
            self.context = parent.turn.context  # an equal one, and one object for all turns of a line
        if parent is not None and parent.turn.status is TurnStatus.TRUNCATED:
            await self._check_closable(parent)
        return attachment

    async def _check_closable(self, cut: Node) -> None:
        """Raise TruncatedGeneration if a reply was cut off where closing its turn does not make it whole.

        Reads the reply once more, a piece at a time: an engine writing replies does not report where it was cut.
        """
        turn = cut.turn
        tools = () if turn.tool_choice.mode is ToolMode.NONE else turn.context.tools + self._request.late_tools
        end = self._renderer.prompt_end(turn.new_prompt_ids)
        parser = self._renderer.parser(turn.params, tools, prompt_end=end)
        starts = range(0, len(turn.sampled.ids), READ_AT_ONCE)
        work = (parser.feed(turn.sampled.ids[start : start + READ_AT_ONCE]) for start in starts)
        async for _ in self._services.share.pieces(work):
            pass
        if (inside := parser.ends_inside(turn.sampled.finish)) is not None:
            raise TruncatedGeneration(
                f"The turn to go on after was cut off by its token limit {inside}, which cannot be closed for the"
                " model. Leave the reply out to generate it again, with a larger max_tokens.",
                blame=Blame(RequestPart.MESSAGES, cut.num_messages - 1),
            )

    async def render(self, attachment: Attachment) -> Prompt:
        """The line's ids, untouched, and the bridge; or the whole conversation at first."""
        renderer, new, tools = self._renderer, attachment.new_messages, self.context.tools
        kwargs, parent = self.context.arguments, attachment.parent
        tail = last_line_ids(parent, TAIL_TOKENS)
        num_bytes = _num_bytes(new)
        if parent is None or not renderer.family.tools_before_turns:
            num_bytes += self.context.num_bytes
        if parent is None:
            num_bytes += 0 if renderer.is_known(kwargs) else PROOF_BYTES
        try:
            if parent is not None:
                reply = parent.turn.reply.message
                work = partial(renderer.bridge, tail[-TAIL_TOKENS:], reply, new, tools, kwargs)
                bridge = await self._services.pool.run(work, num_bytes=num_bytes)
            elif self.tokenization is not None:
                spans = await self._services.pool.run(partial(renderer.spans, new, tools, kwargs), num_bytes=num_bytes)
                bridge = Bridge(ids=await self.tokenization.ids(spans))
            else:
                ids = await self._services.pool.run(partial(renderer.render, new, tools, kwargs), num_bytes=num_bytes)
                bridge = Bridge(ids=ids)
        except RecursionError as error:
            raise UnrenderableMessage("A tool call's arguments are nested too deeply to be shown.") from error
        if parent is None and not bridge.ids:
            raise UnrenderableMessage("The model's chat template writes nothing for these messages: no prompt is left.")
        if self._request.truncation is not None:  # there is no line: a session keeps its ids
            if self._request.media:
                raise InvalidRequest(
                    "truncate_prompt_tokens is not for a chat with images: ids that are left out may be their places.",
                    blame=Blame(RequestPart.TRUNCATION),
                )
            return await self._truncated(bridge.ids)
        num_trimmed = bridge.num_trimmed
        at_hand = self.strand.line.text_of(parent, num_trimmed)
        of_kept = None if parent is None else partial(_line_without, parent, num_trimmed)
        prompt = Prompt(
            new_ids=bridge.ids,
            end=renderer.prompt_end(tail[: len(tail) - num_trimmed] + bridge.ids[-TAIL_TOKENS:]),
            num_kept=0 if parent is None else parent.num_tokens - num_trimmed,
            num_trimmed=num_trimmed,
            of_kept=of_kept,
            json_fragments=await json_of(self._services.share, at_hand, of_kept, bridge.ids)
            if self._capabilities.takes_json
            else None,
        )
        if (parent is None or not parent.media) and not self._request.media:
            return prompt
        placed: Prompt = entry("stenograph.session.media:with_media")(
            prompt, attachment, self._request, renderer, self._capabilities
        )
        return placed

    async def _truncated(self, ids: "array[int]") -> Prompt:
        """A prompt of its own, without the ids that the client wants left out."""
        request, capabilities = self._request, self._capabilities
        num_kept = num_kept_of(request.truncation, request.params, capabilities, self._services.over_budget)
        ids = truncated(ids, request.truncation, num_kept)
        fragments = await json_of(self._services.share, None, None, ids) if capabilities.takes_json else None
        return Prompt(new_ids=ids, end=self._renderer.prompt_end(ids), json_fragments=fragments)

    def _check_view(self) -> None:
        """Raise InvalidRequest for a message that could not be sent back: its family keeps reasoning apart."""
        if not (self._request.text.separates_reasoning or self._capabilities.parses):
            raise InvalidRequest(
                f"separate_reasoning must be true for {self._renderer.family.name}: its chat template refuses a message"
                " whose content has the marks of its channels.",
                blame=Blame(RequestPart.TEXT_VIEW, path=("separates_reasoning",)),
            )

    async def forced_grammar(self, prompt: Prompt) -> Grammar | None:
        request, renderer = self._request, self._renderer
        choice, tools, parallel = request.tool_choice, request.tools + request.late_tools, request.parallel_tool_calls
        able = self._capabilities
        holder = Holder(engine=able.engine, kinds=able.grammars, parses=able.parses)
        return await self._services.pool.run(
            lambda: renderer.tool_grammar(tools, choice, parallel, prompt_end=prompt.end, holder=holder),
            num_bytes=self.context.num_bytes,
        )

    def before_answer(self, prompt: Prompt) -> BeforeAnswer | None:
        return self._renderer.before_answer(prompt.end)

    def parser(self, params: SamplingParams, request_id: RequestId, prompt: Prompt) -> Parser:
        tools = () if self.tool_choice.mode is ToolMode.NONE else self._request.tools + self._request.late_tools
        return self._renderer.parser(
            params, tools, id_prefix=request_id[:12], prompt_end=prompt.end, text=self._request.text
        )


def num_kept_of(
    truncation: Truncation | None, params: SamplingParams, capabilities: Capabilities, over_budget: OverBudget
) -> int | None:
    """Maximum number of ids kept of a prompt; None for all. Less than 1 if the context has none left for it.

    A `max_tokens` as large as the context, if it is to be clamped, counts as if it were absent: one token.

    Raises InvalidRequest if it depends on the context, and the engine does not report its context.
    """
    if truncation is None or truncation.num_tokens is not None:
        return None if truncation is None else truncation.num_tokens
    limit = capabilities.max_context_tokens
    if limit is None:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1 here: -1 keeps what the context leaves, and the engine"
            f" {capabilities.engine} does not report how long its context is.",
            blame=Blame(RequestPart.TRUNCATION),
        )
    wanted = params.max_tokens or 1
    if wanted >= limit and over_budget is OverBudget.CLAMP:
        wanted = 1  # it is clamped to what the context leaves, so it may be as little
    return limit - wanted


def truncated(ids: "array[int]", truncation: Truncation | None, num_kept: int | None) -> "array[int]":
    """The kept ids of a prompt. If it cannot fit, however short, it stays whole, to be refused as too long."""
    if truncation is None or num_kept is None or not 0 < num_kept < len(ids):
        return ids
    return ids[-num_kept:] if truncation.keeps_end else ids[:num_kept]


def _line_without(parent: Node, num_trimmed: int) -> "array[int]":
    """The ids of the line down to `parent` but for the last ones."""
    ids = line_ids(parent)
    return ids[: len(ids) - num_trimmed] if num_trimmed else ids


async def json_of(
    share: LoopShare, at_hand: LineText | None, of_kept: "Callable[[], array[int]] | None", new: "array[int]"
) -> tuple[bytes, ...]:
    """The fragments of a prompt. `at_hand` is the text of its kept ids; None if all have to be written."""
    written, kept = at_hand or ((), token_ids() if of_kept is None else of_kept())
    ids = kept + new if kept else new
    if len(ids) < PIECE_IDS:
        return (*written, encode_ids(ids))
    return (*written, *[one async for one in share.pieces(map(encode_ids, pieces_of(ids)))])


def _num_bytes(messages: Sequence[Message]) -> int:
    """About how much work messages are for the template and the tokenizer, as bytes of text; of a long conversation the
    frames alone say enough."""
    num_bytes = FRAME_BYTES * len(messages)
    if num_bytes >= INLINE_BELOW_BYTES:
        return num_bytes
    for message in messages:
        num_bytes += len(message.content or "") + len(message.reasoning or "")
        for call in message.tool_calls:
            num_bytes += FRAME_BYTES + len(call.name) + len(call.arguments)
    return num_bytes
