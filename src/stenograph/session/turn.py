"""START READING HERE. One turn, from an admitted request to a committed reply.

    admit -> decode -> position -> render -> sample -> validate -> parse -> commit -> reply

`TurnRun.run` is that line, top to bottom: each step is one call, and says what it may fail with. Admission and decoding
come before (manager.py), because they refuse without making a turn; the reply is written by whoever watches (http/).

Laws kept here. The only thing held across an await is the session's lease. Nothing is committed unless everything
before it succeeded; the commit is one synchronous step. However this ends, the engine has been told to stop by then:
leaving the chunk iterator tells it. Cancelling the task is how a turn is abandoned; after the commit there is nothing
to cancel. An abort is asked of the engine, which answers with what it has drawn; only if it does not, within the grace
time, is the turn ended without it.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from stenograph.core.chat import ChatReply, ChatRequest, ParsedReply, ReplyDelta, ToolMode, whole_delta
from stenograph.core.clock import Clock
from stenograph.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    StenographError,
    UnrenderableMessage,
    UpstreamTimeout,
)
from stenograph.core.ids_json import PIECE_IDS, encode_ids, join_ids, pieces_of
from stenograph.core.messages import Message
from stenograph.core.types import (
    Chunk,
    EngineReply,
    EngineTimes,
    Finish,
    FinishReason,
    Prompt,
    RequestId,
    SampledTurn,
    SamplingParams,
    Stage,
    StageTimes,
    Usage,
)
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.engine.validate import TurnCollector
from stenograph.offload.pool import CpuPool
from stenograph.render.parsers.reply import ReplyParser
from stenograph.render.renderer import Bridge, Renderer
from stenograph.session.history import Attachment, CommittedTurn, History, Node, PromptContext, TurnStatus, line_ids
from stenograph.session.line_json import LineJson
from stenograph.session.meter import TurnMeter
from stenograph.session.recent import RecentRequest
from stenograph.session.reply_buffer import ReplyBuffer

NO_DEADLINE_S = 10 * 365 * 86400.0
"""Stands for no deadline: an abort can still bring it forward."""

FRAME_BYTES = 32
"""What a message costs that says nothing."""

TAIL_TOKENS = 64
"""How many of a line's last ids a bridge is shown: more than any template writes between two messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnServices:
    """What a turn works with; shared by all turns. `timeout_s` is a turn's deadline, None for none.

    `abort_grace_s` is how long an aborted turn waits for the engine's partial reply.
    """

    engine: Engine
    renderer: Renderer
    pool: CpuPool
    clock: Clock
    timeout_s: float | None
    abort_grace_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """How a turn ended that did end: the reply, and whether the session keeps it."""

    reply: ChatReply
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """What came of a generation, checked and parsed, and the parameters that it was asked for with."""

    params: SamplingParams
    sampled: SampledTurn
    parsed: ParsedReply
    written: EngineReply | None


class TurnRun:
    """One generation on one session. Made by the manager, run once, watched through `buffer`.

    `prompt` is there before the first piece is, and `reply_id` is the one that the client is told by then.
    """

    def __init__(
        self,
        *,
        request_id: RequestId,
        request: ChatRequest,
        request_json: bytes,
        history: History,
        recent: RecentRequest,
        line_json: LineJson,
        may_commit: Callable[[], bool],
        affinity_key: str | None,
        stages: StageTimes,
        services: TurnServices,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.buffer = ReplyBuffer()
        self.prompt: Prompt | None = None
        self.reply_id = f"chatcmpl-{request_id}"
        self.stages = stages
        self.meter = TurnMeter(started=stages.start)
        self._request_json = request_json
        self._history = history
        self._recent = recent
        self._line_json = line_json
        self._may_commit = may_commit
        self._affinity_key = affinity_key
        self._services = services
        self._requested_at = services.clock.wall()
        self._deadline: asyncio.Timeout | None = None
        self._abort_error: StenographError | None = None
        self._abort_requested = False
        self._has_sampled = False

    def __repr__(self) -> str:
        return f"<TurnRun {self.request_id}>"

    @property
    def streams(self) -> bool:
        """Whether tokens come as they are drawn."""
        return self._services.engine.capabilities.streams

    @property
    def is_timed_out(self) -> bool:
        """Whether its deadline has passed, and it is only waited for to end."""
        return self._deadline is not None and self._deadline.expired()

    def abort(self, unanswered: StenographError | None = None) -> Coroutine[None, None, bool]:
        """End the turn with what it has drawn; one that has not reached the engine ends with nothing drawn.

        If the engine has not answered within the grace time, the turn fails with `unanswered` (default:
        UpstreamTimeout): that much is settled when this returns. What it returns asks the engine, within that time
        too, and tells whether there was anything left to end.
        """
        was_new = not self._abort_requested
        self._abort_requested = True
        self._abort_error = unanswered or self._abort_error
        if was_new:
            self._begin_grace()
        return self._ask_engine_to_end(was_left=was_new and not self._has_sampled)

    async def run(self) -> TurnOutcome:
        """The turn. Raises StenographError; anything else is a bug of ours. Commits last, or not at all."""
        try:
            async with asyncio.timeout(self._services.timeout_s or NO_DEADLINE_S) as self._deadline:
                if self._abort_requested:  # before the first step
                    self._begin_grace()
                context = PromptContext(tools=self.request.tools, template_kwargs=self.request.template_kwargs)
                attachment = self._position(context)
                if attachment.parent is not None and attachment.parent.turn.context.is_same(context):
                    context = attachment.parent.turn.context  # one object for all turns of a line
                prompt = await self._render(attachment, context)
                params = self._effective_params(prompt)
                self.prompt = prompt
                drawn = await self._sample(prompt, params)
                return self._commit(attachment, context, prompt, drawn)
        except TimeoutError as error:
            if not self.is_timed_out:
                raise  # not ours: a bug of whoever let it out
            raise self._timeout_error() from error
        finally:
            self._deadline = None
            self.buffer.close()

    def _position(self, context: PromptContext) -> Attachment:
        """Where the turn attaches. Messages that were read before, with the request before this one, are known good."""
        before = self._recent.node_of(self.request)
        num_known = 0 if before is None else before.num_messages - 1
        self._services.renderer.check_messages(self.request.messages, self.request.tools, first=num_known)
        attachment = None if before is None else self._history.position_after(before, self.request.messages, context)
        return attachment or self._history.position(self.request.messages, context)

    def _begin_grace(self) -> None:
        """Bring the deadline forward. One that has passed already ends the turn as it is."""
        if self._deadline is not None and not self.is_timed_out and (when := self._deadline.when()) is not None:
            grace_end = asyncio.get_running_loop().time() + self._services.abort_grace_s
            self._deadline.reschedule(min(when, grace_end))

    async def _ask_engine_to_end(self, *, was_left: bool) -> bool:
        was_running = False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._services.abort_grace_s):
                was_running = await self._services.engine.abort(self.request_id)
        return was_running or was_left

    async def _render(self, attachment: Attachment, context: PromptContext) -> Prompt:
        """Ids of this turn's prompt: the line's, untouched, and the bridge; or the whole conversation at first."""
        renderer, new, tools = self._services.renderer, attachment.new_messages, context.tools
        kwargs, parent = context.template_kwargs, attachment.parent
        num_bytes = sum(map(_num_bytes, new))
        if parent is None or not renderer.family.tools_before_turns:
            num_bytes += context.num_bytes
        kept = line_ids(parent)
        if parent is None:
            work: Callable[[], Bridge] = lambda: Bridge(ids=renderer.render(new, tools, kwargs))  # noqa: E731
        else:
            reply = parent.turn.reply.message
            work = lambda: renderer.bridge(kept[-TAIL_TOKENS:], reply, new, tools, kwargs)  # noqa: E731
        try:
            bridge = await self._services.pool.run(work, num_bytes=num_bytes)
        except RecursionError as error:
            raise UnrenderableMessage("A tool call's arguments are nested too deeply to be shown.") from error
        self._mark(Stage.RENDER)
        if bridge.num_trimmed:
            del kept[-bridge.num_trimmed :]
        return Prompt(
            ids=kept + bridge.ids,
            num_kept=len(kept),
            num_trimmed=bridge.num_trimmed,
            ids_json=await self._ids_json(parent, kept, bridge),
        )

    async def _ids_json(self, parent: Node | None, kept: "array[int]", bridge: Bridge) -> bytes | None:
        """The prompt's ids as text, if the engine takes text: what is at hand of the line, and the rest written."""
        if not self._services.engine.capabilities.takes_json:
            return None
        at_hand = None if bridge.num_trimmed else self._line_json.of(parent)
        fragments = [] if at_hand is None else [at_hand]
        for piece in pieces_of(bridge.ids if at_hand is not None else kept + bridge.ids):
            if len(piece) == PIECE_IDS:
                await asyncio.sleep(0)  # many: let the loop serve others in between
            fragments.append(encode_ids(piece))
        return join_ids(fragments)

    def _effective_params(self, prompt: Prompt) -> SamplingParams:
        """The request's parameters with the tool grammar and the room that the context leaves."""
        request, capabilities = self.request, self._services.engine.capabilities
        params, limit = request.params, capabilities.max_context_tokens
        room = None if limit is None else limit - len(prompt.ids)
        if limit is not None and room is not None and (room < 1 or (params.max_tokens or 1) > room):
            raise ContextLengthExceeded(
                num_prompt_tokens=len(prompt.ids),
                max_tokens=params.max_tokens,
                max_context_tokens=limit,
                max_tokens_param=request.max_tokens_param,
            )
        grammar = self._services.renderer.tool_grammar(request.tools, request.tool_choice, request.parallel_tool_calls)
        if grammar is not None and params.grammar is not None:
            raise InvalidRequest(
                "response_format cannot be held together with a forced tool call", param="/tool_choice"
            )
        # An engine that parses forces the call itself: it gets the tools and the choice.
        grammar = params.grammar if capabilities.parses else grammar or params.grammar
        if grammar is not None and grammar.kind not in capabilities.grammars:
            raise InvalidRequest(f"the engine {capabilities.engine} has no {grammar.kind} grammars")
        return replace(params, grammar=grammar, max_tokens=params.max_tokens or room)

    async def _sample(self, prompt: Prompt, params: SamplingParams) -> _Drawn:
        """Draw, validate and parse chunk by chunk, feeding the watchers. Raises UpstreamError and its kin."""
        services = self._services
        collector = TurnCollector(vocab_size=services.engine.capabilities.vocab_size, max_tokens=params.max_tokens)
        reader = self._reader(params)
        generate = GenerateRequest(
            request_id=self.request_id,
            prompt=prompt,
            params=params,
            chat=self.request,
            affinity_key=self._affinity_key,
        )
        try:
            # From this check to the engine's taking the request there is no await: no abort falls between.
            source = _nothing() if self._abort_requested else services.engine.generate(generate)
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    self.meter.drew(len(chunk.ids), services.clock.monotonic())
                    collector.add(chunk)
                    if chunk.reply is not None:
                        self.reply_id = chunk.reply.id
                    self.buffer.push(reader.feed(chunk), chunk)
        except InvalidRequest as error:
            if error.param is None and params.grammar is not None:  # the engine does not know where it came from
                error.param = "/tools" if self.request.params.grammar is None else "/response_format"
            raise
        finally:
            self._has_sampled = True
        sampled = collector.result()
        self._mark_engine_times(sampled.times)
        self._mark(Stage.VALIDATE)
        rest, parsed = reader.finish(sampled.finish)
        self.buffer.push(rest)
        return _Drawn(params=params, sampled=sampled, parsed=parsed, written=reader.written)

    def _reader(self, params: SamplingParams) -> "_ReplyReader":
        tools = () if self.request.tool_choice.mode is ToolMode.NONE else self.request.tools
        return _ReplyReader(self._services.renderer.parser(params, tools, id_prefix=self.request_id[:12]))

    def _commit(self, attachment: Attachment, context: PromptContext, prompt: Prompt, drawn: _Drawn) -> TurnOutcome:
        """Keep the turn, unless its session is being deleted. Synchronous: nothing can come between."""
        self._mark(Stage.COMMIT)
        now = self._services.clock.wall()
        sampled, parsed, request = drawn.sampled, drawn.parsed, self.request
        committed = self._may_commit()
        if committed:
            turn = CommittedTurn(
                request_id=self.request_id,
                new_prompt_ids=prompt.ids[prompt.num_kept :],
                num_trimmed=prompt.num_trimmed,
                sampled=sampled,
                status=TurnStatus.of(sampled.finish.reason),
                messages=attachment.new_messages,
                reply=parsed,
                params=drawn.params,
                tool_choice=request.tool_choice,
                parallel_tool_calls=request.parallel_tool_calls,
                reply_id=self.reply_id,
                context=context,
                request_json=self._request_json,
                requested_at=self._requested_at,
                committed_at=now,
                stages=self.stages,
            )
            node = self._history.commit(attachment, turn)
            self._line_json.extend(prompt, sampled, node)
            self._recent.extend(self.request, node)
        reply = ChatReply(
            id=self.reply_id,
            created=int(now),
            model=self._services.engine.capabilities.model,
            prompt=prompt,
            parsed=parsed,
            sampled=sampled,
            usage=Usage(
                num_prompt=len(prompt.ids),
                num_completion=len(sampled.ids),
                num_cached=sampled.num_cached_tokens,
                num_reasoning=parsed.num_reasoning_tokens,
            ),
            written=drawn.written,
            stages_s=self.stages.durations_s(),
        )
        return TurnOutcome(reply=reply, committed=committed)

    def _timeout_error(self) -> StenographError:
        if self._abort_error is not None:
            return self._abort_error
        if self._abort_requested:
            return UpstreamTimeout(
                f"The turn was aborted, but the engine gave no reply within {self._services.abort_grace_s:g} s;"
                " nothing of it was kept."
            )
        return UpstreamTimeout(
            f"The turn took longer than {self._services.timeout_s:g} s; it was stopped, nothing of it was kept."
        )

    def _mark(self, stage: Stage) -> None:
        self.stages.mark(stage, self._services.clock.monotonic())

    def _mark_engine_times(self, times: EngineTimes | None) -> None:
        if times is not None:
            self.stages.mark(Stage.QUEUE, times.admitted)
            self.stages.mark(Stage.PREFILL, times.first_token)
            self.stages.mark(Stage.DECODE_TOKENS, times.finished)
        else:
            self._mark(Stage.DECODE_TOKENS)


class _ReplyReader:
    """Chunks to a message: parsed from the ids, or, where the engine writes the reply itself, taken from it."""

    def __init__(self, parser: ReplyParser) -> None:
        self.written: EngineReply | None = None
        self._parser = parser

    def feed(self, chunk: Chunk) -> ReplyDelta:
        """What a chunk adds to the message."""
        if chunk.reply is None:
            return self._parser.feed(chunk.ids)
        self.written = chunk.reply
        return whole_delta(chunk.reply.message)

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The rest, and the whole message."""
        if self.written is not None:
            return ReplyDelta(), ParsedReply(message=self.written.message)
        return self._parser.finish(finish)


async def _nothing() -> AsyncGenerator[Chunk, None]:
    """The generation of a turn that was aborted before it reached the engine."""
    yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))


def _num_bytes(message: Message) -> int:
    """About how much work a message is for the template and the tokenizer, as bytes of text."""
    calls = sum(FRAME_BYTES + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return FRAME_BYTES + len(message.content or "") + len(message.reasoning or "") + calls
