"""START READING HERE. The turns of one request, from an admitted request to a committed reply.

    admit -> decode -> position -> render -> sample -> validate -> parse -> commit -> reply

`RequestRun.run` is that line, top to bottom: each step is one call, and says what it may fail with. A chat makes one
turn, a completion one for each of its prompts. Admission and decoding come before (manager.py), because they refuse
without making a turn; the reply is written by whoever watches (http/).

Laws kept here. The only thing held across an await is the session's lease. Nothing is committed unless everything
before it succeeded; the commit is one synchronous step, whatever the number of turns. However this ends, the engine has
been told to stop by then: leaving the chunk iterator tells it. Cancelling the task is how a request is abandoned; after
the commit there is nothing to cancel. An abort is asked of the engine, which answers with what it has drawn; only if it
does not, within the grace time, is the request ended without it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stenograph.core.chat import ChatReply, ChatRequest, ParsedReply, Remaining, ReplyDelta, TurnRequest, whole_delta
from stenograph.core.clock import Clock
from stenograph.core.errors import ContextLengthExceeded, InvalidRequest, StenographError, UpstreamTimeout
from stenograph.core.settings import OverBudget
from stenograph.core.types import (
    Chunk,
    EngineReply,
    EngineTimes,
    Finish,
    FinishReason,
    Prompt,
    RequestId,
    SampledTurn,
    Stage,
    StageTimes,
    Usage,
)
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.engine.validate import TurnCollector
from stenograph.offload.loop_share import LoopShare
from stenograph.offload.memory import untrack
from stenograph.offload.pool import CpuPool
from stenograph.render.parsers.reading import Parser
from stenograph.render.renderer import Renderer
from stenograph.session.budget import max_tokens
from stenograph.session.history import Attachment, CommittedTurn, TurnStatus
from stenograph.session.meter import TurnMeter
from stenograph.session.opening import Ledger, Opening
from stenograph.session.reply_buffer import ReplyBuffer
from stenograph.session.reply_grammar import reply_grammar

T = TypeVar("T")

NO_DEADLINE_S = 10 * 365 * 86400.0
"""Stands for no deadline: an abort can still bring it forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnServices:
    """What a turn works with; shared by all turns. `timeout_s` is a request's deadline, None for none.

    `abort_grace_s` is how long an aborted request waits for the engine's partial reply. `over_budget` says what becomes
    of a `max_tokens` that the context has no room for. `template_kwargs` are the template's arguments in every chat
    that does not set them, nor its session. `share` is where what holds the GIL is done in pieces.
    """

    engine: Engine
    renderer: Renderer
    pool: CpuPool
    clock: Clock
    timeout_s: float | None
    abort_grace_s: float = 5.0
    over_budget: OverBudget = OverBudget.REFUSE
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    share: LoopShare = field(default_factory=LoopShare)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """How a request ended that did end: a reply to each prompt, what is left after them, and whether they are kept."""

    replies: tuple[ChatReply, ...]
    committed: bool
    remaining: Remaining

    @property
    def reply(self) -> ChatReply:
        """The first; of most requests the only one."""
        return self.replies[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A turn that has its place and its prompt."""

    attachment: Attachment
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """What came of a generation, checked and parsed."""

    sampled: SampledTurn
    parsed: ParsedReply
    written: EngineReply | None


class RequestRun:
    """One request's turns. Made by the manager, run once, watched through the turns' buffers.

    `reply_id` is by which the client knows the reply, None if it is that of the one turn. `token_limit` is how many
    tokens the session may have, None for no limit. `remaining` is what is left before anything is drawn, known when the
    first piece is there.
    """

    def __init__(
        self,
        *,
        request: TurnRequest,
        reply_id: str | None,
        turns: "Sequence[TurnRun]",
        ledger: Ledger,
        may_commit: Callable[[], bool],
        token_limit: int | None,
        services: TurnServices,
    ) -> None:
        self.request = request
        self.turns = tuple(turns)
        self._reply_id = reply_id
        self.remaining = Remaining()
        self._ledger = ledger
        self._may_commit = may_commit
        self._token_limit = token_limit
        self._services = services
        self._deadline: asyncio.Timeout | None = None
        self._abort_error: StenographError | None = None
        self._abort_requested = False

    def __repr__(self) -> str:
        return f"<RequestRun {self.request_id}, {len(self.turns)} turns>"

    @property
    def request_id(self) -> RequestId:
        """By which the engine knows it; of several turns the first's."""
        return self.turns[0].request_id

    @property
    def reply_id(self) -> str:
        """By which the client knows the reply; settled when the first piece is there."""
        return self.turns[0].reply_id if self._reply_id is None else self._reply_id

    @property
    def is_timed_out(self) -> bool:
        """Whether its deadline has passed, and it is only waited for to end."""
        return self._deadline is not None and self._deadline.expired()

    def abort(self, unanswered: StenographError | None = None) -> Coroutine[None, None, int]:
        """End the turns with what they have drawn; one that has not reached the engine ends with nothing drawn.

        If the engine has not answered within the grace time, the request fails with `unanswered` (default:
        UpstreamTimeout): that much is settled when this returns. What it returns asks the engine, within that time
        too, and tells how many turns there were left to end.
        """
        was_new = not self._abort_requested
        self._abort_requested = True
        self._abort_error = unanswered or self._abort_error
        if was_new:
            self._begin_grace()
        left = [turn.end_early() for turn in self.turns]
        return self._ask_engine_to_end(left)

    async def run(self) -> TurnOutcome:
        """All turns. Raises StenographError; anything else is a bug of ours. Commits last, or not at all."""
        try:
            async with asyncio.timeout(self._services.timeout_s or NO_DEADLINE_S) as self._deadline:
                if self._abort_requested:  # before the first step
                    self._begin_grace()
                await _each(self.turns, TurnRun.open)  # position, render
                self._grant()
                await _each(self.turns, TurnRun.draw)  # sample, validate, parse
                return self._commit()
        except TimeoutError as error:
            if not self.is_timed_out:
                raise  # not ours: a bug of whoever let it out
            raise self._timeout_error() from error
        finally:
            self._deadline = None
            for turn in self.turns:
                turn.buffer.close()

    def _grant(self) -> None:
        """Settle how much each turn may draw. Of what the session leaves, each gets the same share."""
        limit, session = self._services.engine.capabilities.max_context_tokens, None
        if self._token_limit is not None:
            num_before = max(self._ledger.history.num_tokens_before(turn.attachment) for turn in self.turns)
            session = self._token_limit - num_before - sum(turn.num_new_tokens for turn in self.turns)
        context = None if limit is None else limit - max(len(turn.prompt.ids) for turn in self.turns)
        self.remaining = Remaining(context_tokens=context, session_tokens=session)
        for turn in self.turns:
            turn.grant(
                Remaining(
                    context_tokens=None if limit is None else limit - len(turn.prompt.ids),
                    session_tokens=None if session is None else session // len(self.turns),
                )
            )

    def _commit(self) -> TurnOutcome:
        """Keep the turns, unless their session is being deleted. Synchronous: nothing can come between."""
        committed = self._may_commit()
        replies = tuple(turn.commit(is_kept=committed) for turn in self.turns)
        before, drawn = self.remaining, [len(reply.sampled.ids) for reply in replies]
        limit = self._services.engine.capabilities.max_context_tokens
        longest = max(len(reply.prompt.ids) + num for reply, num in zip(replies, drawn, strict=True))
        remaining = Remaining(
            context_tokens=None if limit is None else limit - longest,
            session_tokens=None if before.session_tokens is None else before.session_tokens - sum(drawn),
        )
        return TurnOutcome(replies=replies, committed=committed, remaining=remaining)

    def _begin_grace(self) -> None:
        """Bring the deadline forward. One that has passed already ends the request as it is."""
        if self._deadline is not None and not self.is_timed_out and (when := self._deadline.when()) is not None:
            grace_end = asyncio.get_running_loop().time() + self._services.abort_grace_s
            self._deadline.reschedule(min(when, grace_end))

    async def _ask_engine_to_end(self, left: list[bool]) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._services.abort_grace_s):
                for index, turn in enumerate(self.turns):
                    left[index] |= await self._services.engine.abort(turn.request_id)
        return sum(left)

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


class TurnRun:
    """One turn: a prompt, its generation and its reply. Its request calls its steps: open, grant, draw, commit.

    `prompt_ids` are there before the first piece is, and `reply_id` is the one that the client is told by then.
    """

    def __init__(
        self,
        *,
        request_id: RequestId,
        reply_id: str,
        request: TurnRequest,
        request_json: bytes,
        opening: Opening,
        ledger: Ledger,
        affinity_key: str | None,
        stages: StageTimes,
        services: TurnServices,
    ) -> None:
        self.request_id = request_id
        self.reply_id = reply_id
        self.buffer = ReplyBuffer()
        self.stages = stages
        self.meter = TurnMeter(started=stages.start)
        self._request = request
        self._request_json = request_json
        self._opening = opening
        self._ledger = ledger
        self._affinity_key = affinity_key
        self._services = services
        self._requested_at = services.clock.wall()
        self._opened: _Opened | None = None
        self._params = request.params
        self._drawn: _Drawn | None = None
        self._ends_early = False
        self._has_sampled = False

    def __repr__(self) -> str:
        return f"<TurnRun {self.request_id}>"

    @property
    def is_open(self) -> bool:
        """Whether it has its prompt."""
        return self._opened is not None

    @property
    def prompt(self) -> Prompt:
        """Its prompt, once it is open."""
        assert self._opened is not None, "a turn is opened first"
        return self._opened.prompt

    @property
    def attachment(self) -> Attachment:
        """Where it attaches, once it is open."""
        assert self._opened is not None, "a turn is opened first"
        return self._opened.attachment

    @property
    def num_new_tokens(self) -> int:
        """Tokens that its prompt adds to its line, once it is open."""
        return len(self.prompt.ids) - self.prompt.num_kept - self.prompt.num_trimmed

    def end_early(self) -> bool:
        """Draw nothing if it has not begun to; tells whether that ends it now, which the engine does not know of."""
        was_left = not self._ends_early and not self._has_sampled
        self._ends_early = True
        return was_left

    async def open(self) -> None:
        """Find the turn's place, and make the ids of its prompt. Changes nothing of the session."""
        attachment = await self._opening.position()
        prompt = await self._opening.render(attachment)
        self._mark(Stage.RENDER)
        self._opened = _Opened(attachment=attachment, prompt=prompt)

    def grant(self, remaining: Remaining) -> None:
        """Settle the parameters: the request's, with what the reply is held to and the room that there is."""
        request, capabilities = self._request, self._services.engine.capabilities
        num = max_tokens(
            request, self.prompt, remaining, self._services.over_budget, prompt_param=self._opening.prompt_param
        )
        asked = request.params.grammar
        grammar = reply_grammar(
            asked,
            self._opening.forced_grammar(self.prompt),
            None if asked is None else self._opening.before_answer(self.prompt),
            capabilities,
            param=request.grammar_param,
        )
        self._params = replace(request.params, grammar=grammar, max_tokens=num)

    async def draw(self) -> None:
        """Draw, validate and parse chunk by chunk, feeding the watchers. Raises UpstreamError and its kin."""
        services, params, request = self._services, self._params, self._request
        collector = TurnCollector(vocab_size=services.engine.capabilities.vocab_size, max_tokens=params.max_tokens)
        reader = _ReplyReader(self._opening.parser(params, self.request_id, self.prompt))
        generate = GenerateRequest(
            request_id=self.request_id,
            prompt=self.prompt,
            params=params,
            chat=request if isinstance(request, ChatRequest) else None,
            affinity_key=self._affinity_key,
            streams=request.reply.stream,
        )
        try:
            # From this check to the engine's taking the request there is no await: no abort falls between.
            source = _nothing() if self._ends_early else services.engine.generate(generate)
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    self.meter.drew(len(chunk.ids), services.clock.monotonic())
                    collector.add(chunk)
                    if chunk.reply is not None:
                        self.reply_id = chunk.reply.id
                    self.buffer.push(reader.feed(chunk), chunk)
        except ContextLengthExceeded as error:
            raise error.in_terms_of(
                prompt_param=self._opening.prompt_param, max_tokens_param=request.max_tokens_param
            ) from error
        except InvalidRequest as error:
            if error.param is None and params.grammar is not None:  # the engine does not know where it came from
                error.param = "/tools" if request.params.grammar is None else request.grammar_param
            raise
        finally:
            self._has_sampled = True
        sampled = collector.result()
        self._mark_engine_times(sampled.times)
        self._mark(Stage.VALIDATE)
        rest, parsed = reader.finish(sampled.finish)
        self.buffer.push(rest)
        self._drawn = _Drawn(sampled=sampled, parsed=parsed, written=reader.written)

    def commit(self, *, is_kept: bool) -> ChatReply:
        """The turn's reply; where `is_kept`, add the turn to its session. Raises SessionInvariant."""
        assert self._drawn is not None, "a turn is drawn before it is committed"
        self._mark(Stage.COMMIT)
        now = self._services.clock.wall()
        sampled, parsed, prompt = self._drawn.sampled, self._drawn.parsed, self.prompt
        if is_kept:
            self._keep(sampled, parsed, now)
        return ChatReply(
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
            written=self._drawn.written,
            stages_s=self.stages.durations_s(),
        )

    def _keep(self, sampled: SampledTurn, parsed: ParsedReply, now: float) -> None:
        opening, prompt, ledger = self._opening, self.prompt, self._ledger
        params, tool_choice, request_json = self._params, opening.tool_choice, self._request_json
        if self.attachment.parent is not None:
            before = self.attachment.parent.turn
            params = _kept_once(params, before.params)
            tool_choice = _kept_once(tool_choice, before.tool_choice)
            request_json = _kept_once(request_json, before.request_json)
        turn = CommittedTurn(
            request_id=self.request_id,
            new_prompt_ids=prompt.ids[prompt.num_kept :],
            num_trimmed=prompt.num_trimmed,
            sampled=sampled,
            status=TurnStatus.of(sampled.finish.reason),
            messages=self.attachment.new_messages,
            reply=parsed,
            params=params,
            asked=opening.asked,
            tool_choice=tool_choice,
            parallel_tool_calls=opening.parallel_tool_calls,
            reply_id=self.reply_id,
            context=opening.context,
            request_json=request_json,
            requested_at=self._requested_at,
            committed_at=now,
            stages=self.stages,
        )
        node = ledger.history.commit(self.attachment, turn)
        untrack(node)
        ledger.line_json.extend(prompt, sampled, node)
        if isinstance(self._request, ChatRequest):
            ledger.recent.extend(self._request, node)

    def _mark(self, stage: Stage) -> None:
        self.stages.mark(stage, self._services.clock.monotonic())

    def _mark_engine_times(self, times: EngineTimes | None) -> None:
        if times is not None:
            self.stages.mark(Stage.QUEUE, times.admitted)
            self.stages.mark(Stage.PREFILL, times.first_token)
            self.stages.mark(Stage.DECODE_TOKENS, times.finished)
        else:
            self._mark(Stage.DECODE_TOKENS)


def _kept_once(new: T, before: T) -> T:
    """What most turns of a session have alike, as the turn before has it, if it is equal."""
    return before if before == new else new


class _ReplyReader:
    """Chunks to a message: parsed from the ids, or, where the engine writes the reply itself, taken from it."""

    def __init__(self, parser: Parser) -> None:
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


async def _each(turns: Sequence[TurnRun], step: Callable[[TurnRun], Coroutine[None, None, None]]) -> None:
    """Take a step of all turns side by side. The first that fails stops the others, and its error is raised."""
    if len(turns) == 1:
        await step(turns[0])
        return
    failed: list[Exception] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for turn in turns:
                tasks.create_task(step(turn), name=f"turn-{turn.request_id}")
    except* Exception as group:  # noqa: BLE001 -- raised again, the first of them
        failed += group.exceptions
    if failed:
        raise failed[0]


async def _nothing() -> AsyncGenerator[Chunk, None]:
    """The generation of a turn that was aborted before it reached the engine."""
    yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
