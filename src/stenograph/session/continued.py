"""A turn that continues a cut reply: the engine goes on after the tokens of a fork's beginning, and both together are
one reply. Loaded by the first turn of a fork.

A request continues the cut reply if it asks for it again: it attaches where the cut turn did, with the same messages.
Any other request of the fork is a turn as in every session.
"""

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import InvalidRequest, SessionInvariant
from stenograph.core.ids_json import encode_ids
from stenograph.core.loaded import entry
from stenograph.core.logprobs import known_logprobs, reported_kind
from stenograph.core.types import (
    Chunk,
    EffectivePrompt,
    LogprobsKind,
    SampledTurn,
    WeightSpan,
)
from stenograph.engine.validate import TurnCollector
from stenograph.session.reply_buffer import parts_of
from stenograph.session.steps import RunningTurn
from stenograph.text.reading import Parser
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.forks import ForkPoint
from stenograph.trajectory.history import Attachment, is_same
from stenograph.trajectory.matching import Matcher, load_matcher
from stenograph.trajectory.turn import CommittedTurn


def turn_of(options: SessionOptions) -> Callable[..., RunningTurn]:
    """Makes the turns of a fork with these options."""
    fork = options.fork
    if fork is None or fork.cut is None:
        return RunningTurn
    return partial(ContinuedTurn, fork, fork.cut, load_matcher(options.matcher))


class ContinuedTurn(RunningTurn):
    """A turn of a fork with a cut reply. Once positioned, it continues the cut reply or is a turn as any other."""

    def __init__(self, fork: ForkPoint, cut: CommittedTurn, matcher: Matcher, **options: Any) -> None:
        super().__init__(**options)
        self._fork, self._matcher = fork, matcher
        self._cut: CommittedTurn | None = cut
        self._has_read = False

    async def position(self) -> None:
        await super().position()
        at = self.attachment
        if self._cut is None or not self._asks_again(self._cut, at):
            self._cut = None
            return
        self.builder.context = self._cut.context
        self.attachment = replace(at, new_messages=self._cut.messages)

    def _asks_again(self, cut: CommittedTurn, at: Attachment) -> bool:
        """Whether the turn is the cut one once more. The turns before that have the first numbers of the session."""
        num_turns = self._fork.num_turns
        parent = None if at.parent is None else (at.parent.depth, at.parent.id)
        return (
            self._chat is not None
            and not at.adds_nothing
            and parent == ((num_turns, num_turns - 1) if num_turns else None)
            and len(at.new_messages) == len(cut.messages)
            and cut.context.is_same(self.builder.context)
            and all(map(partial(is_same, self._matcher), cut.messages, at.new_messages))
        )

    async def render(self) -> None:
        cut = self._cut
        if cut is not None:
            self._check(cut)
        await super().render()
        if cut is None:
            return
        prompt, ids = self.prompt, cut.sampled.ids
        if prompt.new_ids != cut.new_prompt_ids or prompt.num_trimmed != cut.num_trimmed:
            raise SessionInvariant("the prompt of a cut reply is rendered otherwise than it was")
        written = prompt.json_fragments
        self.sent = replace(
            prompt,
            new_ids=prompt.new_ids + ids,
            json_fragments=(*written, encode_ids(ids)) if written and ids else written,
        )
        self._chat = None  # an engine that parses would parse the rest alone
        params, num = self.params, len(ids)
        most = None if params.max_tokens is None else params.max_tokens - num
        self.params = replace(params, max_tokens=most, min_tokens=max(0, params.min_tokens - num))
        self._request = replace(self._request, params=self.params)

    def _check(self, cut: CommittedTurn) -> None:
        """Raise InvalidRequest where the rest of the reply would not be sampled as the whole."""
        params = self._request.params
        if params.grammar is not None or self.builder.tool_choice.forces:
            raise InvalidRequest(
                "This reply was cut at a token, and goes on from there: a grammar or a forced tool call would begin in"
                " its middle. Leave it out, or fork at a whole turn.",
                blame=Blame(RequestPart.TOOL_CHOICE if params.grammar is None else RequestPart.GRAMMAR),
            )
        num = len(cut.sampled.ids)
        if params.max_tokens is not None and params.max_tokens <= num:
            raise InvalidRequest(
                f"This reply begins with {num} tokens of the session before: max_tokens counts them, and must be above"
                f" {num}, got {params.max_tokens}.",
                blame=Blame(RequestPart.MAX_TOKENS),
            )
        kind = reported_kind(self.capabilities.logprobs, params)
        if kind is not cut.sampled.logprobs_kind and cut.sampled.ids:
            raise InvalidRequest(
                f"The tokens of this cut reply have {cut.sampled.logprobs_kind} log-probabilities, and the engine would"
                f" report {kind} ones of the rest: continue it with its sampling parameters.",
                blame=Blame(RequestPart.SAMPLING),
            )

    @property
    def num_new_tokens(self) -> int:
        return len(self.prompt.new_ids) - self.prompt.num_trimmed

    def grant(self, session_tokens: int | None) -> int | None:
        num = 0 if self._cut is None else len(self._cut.sampled.ids)
        return super().grant(None if session_tokens is None else session_tokens - num)

    def _is_held(self) -> bool:
        return self._cut is None and super()._is_held()

    def _take(self, effective: EffectivePrompt) -> None:
        super()._take(effective)
        if self._cut is not None and self._num_prompt is not None:
            self._num_prompt -= len(self._cut.sampled.ids)

    async def _read(self, parser: Parser, chunk: Chunk) -> None:
        if self._cut is not None and not self._has_read:
            self._has_read = True
            for part in parts_of(self._cut.sampled):
                await super()._read(parser, part)
        await super()._read(parser, chunk)

    def _end_reply(self, collector: TurnCollector, parser: Parser | None, num_changes: int) -> None:
        super()._end_reply(collector, parser, num_changes)
        if self._cut is not None and self.sampled is not None:
            num_cached = min(self.sampled.num_cached_tokens, self.prompt.num_expanded)
            self.sampled = joined(self._cut, replace(self.sampled, num_cached_tokens=num_cached))

    def made(self) -> CommittedTurn:
        made = super().made()
        if self._cut is not None and not made.num_inherited:
            made = self._made = replace(made, num_inherited=len(self._cut.sampled.ids))
        return made


def joined(cut: CommittedTurn, rest: SampledTurn) -> SampledTurn:
    """The tokens of a cut turn, and the rest sampled after them, as one turn. Of the weights of mixed ones nothing is
    known."""
    first, num = cut.sampled, len(cut.sampled.ids)
    if not num:
        return rest
    known = known_logprobs(first, cut.params)

    def column(kind: LogprobsKind, values: "array[float] | None") -> "array[float] | None":
        """Log-probabilities of a kind; 0 for the cut tokens where they have none: they are trained elsewhere."""
        if values is None:
            return None
        return known.get(kind, array("d", bytes(8 * num))) + values

    tops, before = rest.top_logprobs, first.top_logprobs
    spans = tuple(replace(span, start=span.start + num, end=span.end + num) for span in rest.weights)
    return replace(
        rest,
        ids=first.ids + rest.ids,
        logprobs=first.logprobs + rest.logprobs,
        tempered_logprobs=column(LogprobsKind.TEMPERED, rest.tempered_logprobs),
        sampling_logprobs=column(LogprobsKind.SAMPLING, rest.sampling_logprobs),
        top_logprobs=None if tops is None else (((),) * num if before is None else before) + tops,
        weights=() if rest.mixed is not None else _spans(first.weights, spans),
        forced=None if rest.forced is None else (first.forced or bytes(num)) + rest.forced,
        support=None
        if rest.support is None
        else entry("stenograph.core.support:joined_supports")(first.support, num, rest.support),
    )


def _spans(first: tuple[WeightSpan, ...], rest: tuple[WeightSpan, ...]) -> tuple[WeightSpan, ...]:
    """Spans of weights in order; two of one version side by side are one."""
    if first and rest and first[-1].version == rest[0].version and first[-1].end == rest[0].start:
        return (*first[:-1], replace(first[-1], end=rest[0].end), *rest[1:])
    return first + rest


def first_tokens(turn: CommittedTurn, num: int) -> CommittedTurn:
    """A turn cut after its first `num` sampled tokens."""
    sampled = turn.sampled
    tempered, sampling, tops = sampled.tempered_logprobs, sampled.sampling_logprobs, sampled.top_logprobs
    spans = (replace(span, end=min(span.end, num)) for span in sampled.weights if span.start < num)
    cut = replace(
        sampled,
        ids=sampled.ids[:num],
        logprobs=sampled.logprobs[:num],
        tempered_logprobs=None if tempered is None else tempered[:num],
        sampling_logprobs=None if sampling is None else sampling[:num],
        top_logprobs=None if tops is None else tops[:num],
        weights=tuple(spans),
        forced=None if sampled.forced is None else sampled.forced[:num],
        support=None
        if sampled.support is None
        else entry("stenograph.core.support:first_supports")(sampled.support, num),
        replay=None,
        times=None,
    )
    return replace(turn, sampled=cut, num_inherited=num)
