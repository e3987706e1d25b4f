"""The steps of one turn, taken by its request (turn.py) in this order: position, render, grant, sample, commit.

However a turn ends, the engine has been asked to stop by then: leaving the chunk iterator asks it.
"""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatReply, ChatRequest, ParsedReply, Remaining, TurnRequest
from stenograph.core.errors import BudgetSpent, ContextLengthExceeded, InvalidRequest, Limit, UpstreamInvalid
from stenograph.core.loaded import entry
from stenograph.core.logprobs import GREEDY_BELOW, is_held_by_engine, is_truncated, reported_kind
from stenograph.core.messages import Expansion
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.stages import StageTimes
from stenograph.core.trace_context import TraceContext
from stenograph.core.types import (
    Chunk,
    EffectivePrompt,
    EngineReply,
    Finish,
    FinishReason,
    Grammar,
    MixedWeights,
    Prompt,
    RepetitionOver,
    RequestId,
    SampledTurn,
    SamplingParams,
    Usage,
)
from stenograph.core.weights import FOLLOWING, CacheSalt
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.validate import TurnCollector
from stenograph.offload.memory import untrack
from stenograph.session.prompt_builder import PromptBuilder
from stenograph.session.reply_buffer import READ_AT_ONCE, ReplyBuffer, TurnMeter, parts_of
from stenograph.session.services import TurnServices
from stenograph.session.settings import OverBudget
from stenograph.text.grammar.held import Holder, held_grammar
from stenograph.text.reading import Parser
from stenograph.trajectory.history import Attachment
from stenograph.trajectory.strand import Leases
from stenograph.trajectory.turn import STATUS_OF, CommittedTurn, Node


class RunningTurn:
    """One turn: a prompt, its generation and its reply. `prompt` and `reply_id` are settled before the first piece is
    there."""

    def __init__(
        self,
        *,
        request_id: RequestId,
        reply_id: str,
        request: TurnRequest,
        request_json: bytes,
        builder: PromptBuilder,
        leases: Leases,
        affinity_key: str | None,
        stages: StageTimes,
        services: TurnServices,
        capabilities: Capabilities,
        wants_support: bool = False,
        cache_salt: CacheSalt = FOLLOWING,
        trace: TraceContext | None = None,
    ) -> None:
        self.request_id = request_id
        self.reply_id = reply_id
        self.buffer = ReplyBuffer()
        self.stages = stages
        self.meter = TurnMeter(started=stages.start)
        self._request = request
        self._chat = request if isinstance(request, ChatRequest) else None
        self._request_json = request_json
        self.builder = builder
        """Finds where it attaches: its strand is there, once it is positioned."""
        self.kind = leases.label.kind
        """The kind of its request by the rules; None if none holds."""
        self._leases = leases
        self._affinity_key = affinity_key
        self._services = services
        self._wants_support = wants_support
        self._cache_salt = cache_salt
        self._trace = trace
        self.requested_at = services.clock.wall()
        """Seconds of the epoch."""
        self.capabilities = capabilities
        """Those of the engine, as they are when the turn begins."""
        self.attachment: Attachment
        """The place where it attaches, once it is positioned."""
        self.is_open = False
        """Whether it has its prompt."""
        self.prompt: Prompt
        self.sent: Prompt
        """Its prompt, once it is open; as sent, with the tokens of a cut reply to be continued."""
        self.params = request.params
        """The effective parameters of its sampling, once they are granted."""
        self._forced: Grammar | None = None
        self.sampled: SampledTurn | None = None
        """Its tokens, once they are all there and checked, and parsed."""
        self._parsed: ParsedReply
        self._written: EngineReply | None = None
        self.media: tuple[Expansion, ...] | None = None
        self._num_prompt: int | None = None
        self._made: CommittedTurn | None = None
        self.policy = ""
        """The sampling model, by its engine's name for it; empty before the engine is asked."""
        self._ends_early = False
        self._has_sampled = False
        self.node_id: int | None = None
        """Its node in the session, once it is kept."""
        self.rewrites: tuple[AppliedRewrite, ...] = ()
        """The changes to its client's request, once it is kept."""
        self.discarded: tuple[CommittedTurn, ...] = ()
        """The turns taken out of the history by its commit."""

    def __repr__(self) -> str:
        return f"<RunningTurn {self.request_id}>"

    @property
    def num_new_tokens(self) -> int:
        """Tokens added to its line by its prompt, once it is open."""
        return len(self.prompt.new_ids) - self.prompt.num_trimmed

    def end_early(self) -> bool:
        """Sample nothing if it has not begun to. Returns whether that ends it now, without the engine's knowing."""
        was_left = not self._ends_early and not self._has_sampled
        self._ends_early = True
        return was_left

    async def position(self) -> None:
        """Find where the turn attaches. Changes nothing of the session. Raises CallerError."""
        self.attachment = await self.builder.position()

    async def render(self) -> None:
        """Make the ids of its prompt. Raises CallerError or TokenizationFailed."""
        prompt = await self.builder.render(self.attachment)
        if self.builder.tool_choice.forces:
            self._forced = await self.builder.forced_grammar(prompt)
        tokenization, now = self.builder.tokenization, self._services.clock.monotonic()
        if tokenization is None or tokenization.began_at is None:
            self.stages.render = now
        else:
            self.stages.render, self.stages.tokenize = tokenization.began_at, now
        self.prompt, self.sent, self.is_open = prompt, prompt, True

    def grant(self, session_tokens: int | None) -> int | None:
        """Settle the parameters: the request's, with the reply's constraints and the tokens left. Returns how many the
        context leaves; None if it has no limit. Raises ContextLengthExceeded or BudgetSpent."""
        request, prompt, capabilities = self._request, self.sent, self.capabilities
        limit = capabilities.max_context_tokens
        context_tokens = None if limit is None else limit - prompt.num_expanded
        left = Remaining(context_tokens=context_tokens, session_tokens=session_tokens)
        num = max_tokens(request, prompt, left, self._services.over_budget, part=self.builder.prompt_blame)
        grammar = asked = request.params.grammar
        if asked is not None or self._forced is not None:
            grammar = held_grammar(
                asked,
                self._forced,
                None if asked is None else self.builder.before_answer(prompt),
                Holder(engine=capabilities.engine, kinds=capabilities.grammars, parses=capabilities.parses),
            )
        num_least = request.params.min_tokens if num is None else min(request.params.min_tokens, num)
        over = capabilities.repetition_over if request.params.repetition_penalty != 1.0 else RepetitionOver.LINE
        granted, params = (grammar, num, num_least, self._wants_support, over), request.params
        if granted != (asked, params.max_tokens, params.min_tokens, params.support, params.repetition_over):
            self.params = replace(
                request.params,
                grammar=grammar,
                max_tokens=num,
                min_tokens=num_least,
                support=self._wants_support,
                repetition_over=over,
                top_k=supported_top_k(request.params, capabilities.max_support_top_k if self._wants_support else None),
            )
        return context_tokens

    async def sample(self) -> None:
        """Sample, validate and parse chunk by chunk, feeding the watchers. Raises UpstreamError and its kin.

        From the check for an early end to the engine's taking the request there is no await: no abort falls between.
        """
        services, params, request, prompt = self._services, self.params, self._request, self.sent
        capabilities, weights = self.capabilities, self._services.weights
        self.policy, num_changes = services.policy or capabilities.policy or capabilities.model, weights.num_changes
        salt = self._cache_salt.of(weights.cached_as, capabilities.salt_modes) if weights.cached_as else None
        collector = TurnCollector(
            vocab_size=capabilities.vocab_size,
            max_tokens=params.max_tokens,
            num_prompt=None if prompt.media else prompt.num_tokens,
            logprobs_kind=reported_kind(capabilities.logprobs, params, is_forced=self._is_held()),
            weight_version=weights.version,
            cached_from=salt,
        )
        parser: Parser | None = None
        generate = GenerateRequest(
            request_id=self.request_id,
            prompt=prompt,
            params=params,
            chat=self._chat,
            affinity_key=self._affinity_key,
            streams=request.reply.stream,
            routing=request.routing,
            cache_salt=salt,
            policy=services.policy,
            trace=self._trace,
        )
        try:
            async with aclosing(_nothing() if self._ends_early else services.engine.generate(generate)) as chunks:
                async for chunk in chunks:
                    self.meter.sampled(chunk.num_sampled, services.clock.monotonic(), chunk.unasked_replay)
                    taken = collector.add(chunk)
                    if taken.effective is not None:
                        self._take(taken.effective)
                    if (written := taken.reply or taken.written) is None:
                        parser = parser or self.builder.parser(params, self.request_id, prompt)
                        await self._read(parser, taken)
                    else:
                        self._written = taken.reply
                        if request.spelling.keeps_engine_id:
                            self.reply_id = written.id
                        if request.reply.stream:  # else nobody reads it in pieces
                            self.buffer.push(written.delta, taken)
        except ContextLengthExceeded as error:
            raise error.of(self.builder.prompt_blame) from error  # an engine does not know which of several it is
        except InvalidRequest as error:
            if error.blame is None and params.grammar is not None:  # the engine does not know where it came from
                error.blame = Blame(RequestPart.TOOLS if request.params.grammar is None else RequestPart.GRAMMAR)
            raise
        finally:
            self._has_sampled = True
        self._end_reply(collector, parser, num_changes)

    def _is_held(self) -> bool:
        """Whether an engine that parses calls constrains the reply by itself."""
        tools = self.builder.context.tools
        return self.capabilities.parses and bool(tools) and is_held_by_engine(tools, self.builder.tool_choice)

    def _take(self, effective: EffectivePrompt) -> None:
        """Take the engine's report of a prompt with media. Raises UpstreamInvalid."""
        if self.prompt.media:
            self.media = entry("stenograph.core.media:new_expansions")(self.sent, effective)
            self._num_prompt = len(effective.ids)

    def _end_reply(self, collector: TurnCollector, parser: Parser | None, num_changes: int) -> None:
        """Check and parse the end of the tokens sampled since the weights had changed `num_changes` times. Raises
        UpstreamInvalid."""
        weights = self._services.weights
        is_over = num_changes % 2 or num_changes != weights.num_changes
        sampled = collector.result(MixedWeights(oldest=weights.oldest_since(num_changes)) if is_over else None)
        weights.num_mixed_turns += sampled.mixed is not None
        if self.prompt.media and self.media is None and sampled.ids:
            raise UpstreamInvalid("prompt_agrees", "the engine does not report the ids of a prompt with media")
        now, times, stages = self._services.clock.monotonic(), sampled.times, self.stages
        if times is not None:
            stages.queue, stages.prefill = times.admitted, times.first_token
        stages.decode_tokens, stages.validate = now if times is None else times.finished, now
        if self._written is not None:
            self._parsed = ParsedReply(message=self._written.message)
        elif parser is not None:
            rest, self._parsed = parser.finish(sampled.finish)
            self.buffer.push(rest)
        else:  # its engine has streamed it
            self._parsed = ParsedReply(message=self.buffer.message)
        self.sampled = sampled

    def empty_reply(self, last: Node | None = None) -> ChatReply:
        """A reply without a sampled token, after the line down to `last`; None: after nothing."""
        reply: ChatReply = entry("stenograph.session.unsampled:empty_reply")(
            self.reply_id,
            created=self._services.clock.wall(),
            model=self.capabilities.model,
            params=self._request.params,
            stages_s=self.stages.durations_s(),
            last=last,
        )
        return reply

    async def _read(self, parser: Parser, chunk: Chunk) -> None:
        """Feed the watchers with a chunk: at once, or a long one in parts, with the loop going on in between."""
        if len(chunk.ids) <= READ_AT_ONCE:
            self.buffer.push(parser.feed(chunk.ids), chunk)
            return
        async for delta, part in self._services.share.pieces((parser.feed(one.ids), one) for one in parts_of(chunk)):
            self.buffer.push(delta, part)

    def commit(self, *, is_kept: bool) -> ChatReply:
        """The turn's reply; where `is_kept`, add the turn to its session. Raises SessionInvariant."""
        sampled, prompt, attachment = self.sampled, self.prompt, self.attachment
        assert sampled is not None, "a turn is sampled before it is committed"
        num_prompt = self._num_prompt or prompt.num_expanded
        self.stages.commit = self._services.clock.monotonic()
        if is_kept:
            turn, strand, label = self.made(), self.builder.strand, self._leases.label
            assert self._leases.strands is not None, "a turn without a session is not kept"
            node, replaced = self._leases.strands.commit(strand, attachment, turn, prompt, label, self._chat)
            self.node_id, self.rewrites = node.id, turn.rewrites
            if replaced:
                self.discarded = tuple(gone.turn for gone in replaced)
            untrack(node.tracked_parts)
        return ChatReply(
            id=self.reply_id,
            created=int(self._services.clock.wall() if self._made is None else self._made.committed_at),
            model=self.capabilities.model,
            prompt=prompt,
            params=self.params,
            parsed=self._parsed,
            sampled=sampled,
            usage=Usage(
                num_prompt=num_prompt,
                num_completion=len(sampled.ids),
                num_cached=sampled.num_cached_tokens,
                num_reasoning=self._parsed.num_reasoning_tokens,
            ),
            written=self._written,
            stages_s=self.stages.durations_s(),
            fills_context=num_prompt + len(sampled.ids) >= (self.capabilities.max_context_tokens or math.inf),
        )

    def stored(self) -> None:
        """Report the turn as durable."""
        self.stages.store = self._services.clock.monotonic()

    def made(self) -> CommittedTurn:
        """The turn as it is kept, settled the first time: a store has it before its session."""
        if self._made is not None:
            return self._made
        builder, prompt, attachment, sampled = self.builder, self.prompt, self.attachment, self.sampled
        assert sampled is not None, "a turn is sampled before it is made"
        params, tool_choice, request_json = self.params, builder.tool_choice, self._request_json
        if attachment.parent is not None:
            before = attachment.parent.turn
            # One object for all turns that have an equal one, as most turns of a session do.
            params = before.params if before.params == params else params
            tool_choice = before.tool_choice if before.tool_choice == tool_choice else tool_choice
            request_json = before.request_json if before.request_json == request_json else request_json
        self._made = CommittedTurn(
            request_id=self.request_id,
            new_prompt_ids=prompt.new_ids,
            num_trimmed=prompt.num_trimmed,
            sampled=sampled,
            status=STATUS_OF[sampled.finish.reason],
            messages=attachment.new_messages,
            reply=self._parsed,
            params=params,
            asked=builder.asked,
            tool_choice=tool_choice,
            parallel_tool_calls=builder.parallel_tool_calls,
            reply_id=self.reply_id,
            context=builder.context,
            request_json=request_json,
            rewrites=builder.rewrites,
            policy=self.policy,
            requested_at=self.requested_at,
            committed_at=self._services.clock.wall(),
            stages=self.stages,
            trace_id="" if self._trace is None else self._trace.trace_id,
            media=self.media or (),
        )
        return self._made


def max_tokens(
    request: TurnRequest, prompt: Prompt, remaining: Remaining, over_budget: OverBudget, *, part: Blame
) -> int | None:
    """The most tokens that the engine may sample; None leaves it to the engine. `remaining` counts the prompt, the
    `part` of the request.

    Without a `max_tokens`, it is the room in both context and session. A `max_tokens` above the context's room is
    refused or clamped, as the server is set; one above the session's is always clamped, since its limit is not the
    caller's. Raises ContextLengthExceeded, or BudgetSpent if the session leaves nothing.
    """
    wanted, room = request.params.max_tokens, remaining.context_tokens
    if room is not None and (room < 1 or (over_budget is OverBudget.REFUSE and (wanted or 1) > room)):
        raise ContextLengthExceeded(
            num_prompt_tokens=prompt.num_expanded,
            max_tokens=wanted,
            max_context_tokens=room + prompt.num_expanded,
            prompt=part,
        )
    if remaining.session_tokens is not None and remaining.session_tokens < 1:
        told = f"A prompt of {prompt.num_expanded} tokens leaves nothing of this session's max_total_tokens."
        raise BudgetSpent(Limit.SESSION_TOKENS, told)
    return min((most for most in (wanted, room, remaining.session_tokens) if most is not None), default=None)


def supported_top_k(params: SamplingParams, most: int | None) -> int:
    """The `top_k` of a turn, where its engine reports supports up to a `top_k` of `most` alone; None asks nothing of
    it.

    Sampling cut off by top_p or min_p alone gets `most`, as its row says. Raises InvalidRequest for a larger one.
    """
    if most is None or not (is_truncated(params) and params.temperature >= GREEDY_BELOW):
        return params.top_k
    if params.top_k > most:
        raise InvalidRequest(
            f"top_k must be at most {most} here, not {params.top_k}: the session keeps which ids could be sampled, and"
            " the engine reports them up to that.",
            blame=Blame(RequestPart.SAMPLING, path=("top_k",)),
        )
    return params.top_k or most


async def _nothing() -> AsyncGenerator[Chunk, None]:
    """The generation of a turn aborted before it reached the engine."""
    yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
