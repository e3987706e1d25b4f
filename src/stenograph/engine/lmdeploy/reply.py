"""One reply of LMDeploy, whole or event by event, of either of its two routes, as chunks. Pure.

A stream has the new tokens in each event; they are held to the laws of `engine/rows.py`, since LMDeploy writes the same
rows as SGLang. Further laws are here:

    one_choice              an event of the chat route has one choice, or, with the usage, none
    has_usage               a reply of the chat route counts its tokens
    finish_is_last          nothing but the usage follows the part with the finish reason
    no_failure              the engine did not fail: LMDeploy reports a failure in a finish reason within a 200
    replay_shape            routed experts are numbers, for each token but the last, of each layer, as many each

Sources: LMDeploy's `serve/openai/protocol.py` (`GenerateReqOutput`), `serve/openai/endpoints/generate.py`,
`serve/openai/chat_completions/serving.py`, `serve/core/async_engine.py`.
"""

import re
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from stenograph.core.errors import ContextLengthExceeded, StenographError, UpstreamInvalid, UpstreamRefused
from stenograph.core.replay import PackedInts, Replay
from stenograph.core.types import Chunk, Finish, FinishReason
from stenograph.engine.http.adapter import EngineReading, told_too_long
from stenograph.engine.lmdeploy.request import JSON_TYPE, LMDeployRoute
from stenograph.engine.reported import alternatives
from stenograph.engine.rows import (
    META_LAWS,
    EngineUsage,
    ErrorWithin,
    Natural,
    Row,
    SampledTokens,
    TopRow,
    decoded,
    error_of,
    laws,
    other_prompt,
    reason_of,
    short,
)

TOO_LONG = (
    re.compile(
        rb"Input length \((?P<prompt>\d{1,9})\) must be smaller than the model context length \((?P<limit>\d{1,9})\)"
    ),
    re.compile(rb"The request exceeds the model context length"),
)
"""LMDeploy's messages for a request too long for its context, from 0.16 on. Source: its `serve/core/exceptions.py`."""
Experts = list[list[list[Natural]]] | str | None


class _LMDeployFinish(msgspec.Struct):
    type: str


class _LMDeployMeta(msgspec.Struct):
    completion_tokens: Natural
    prompt_tokens: Natural | None = None
    finish_reason: _LMDeployFinish | None = None
    output_token_logprobs: list[Row] | None = None
    output_top_logprobs: list[list[TopRow]] | None = None
    routed_experts: Experts = None


class _LMDeployGenerated(msgspec.Struct):
    meta_info: _LMDeployMeta | None = None
    output_ids: list[Natural] | None = None
    text: str = ""
    error: ErrorWithin | str | None = None


class _LMDeployMessage(msgspec.Struct):
    content: str | None = None


class _LMDeployChoice(msgspec.Struct):
    finish_reason: str | None = None
    output_ids: list[Natural] | None = None
    output_token_logprobs: list[Row] | None = None
    routed_experts: Experts = None
    message: _LMDeployMessage | None = None
    delta: _LMDeployMessage | None = None


class _LMDeployChat(msgspec.Struct):
    choices: list[_LMDeployChoice] | None = None
    usage: EngineUsage | None = None
    error: ErrorWithin | str | None = None


_GENERATED = msgspec.json.Decoder(_LMDeployGenerated)
_CHAT = msgspec.json.Decoder(_LMDeployChat)
_LAWS = [*META_LAWS, *laws((r"\.usage", "has_usage"), (r"\.choices`$", "one_choice"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LMDeployPart:
    """The content of a reply, or an event, of either route. `num_sampled` None: it is reported at the end."""

    rows: Sequence[Row] | None
    tops: Sequence[Sequence[TopRow] | None] | None
    output_ids: Sequence[int] | None
    num_sampled: int | None
    num_prompt: int | None
    finish: str | None
    experts: Experts
    text: str


class LMDeployReading(EngineReading):
    """The reader of one reply of either route.

    Its methods raise UpstreamInvalid, or the engine's error within a 200.
    """

    def __init__(
        self,
        *,
        route: LMDeployRoute,
        vocab_size: int,
        num_prompt: int,
        stop_ids: Collection[int],
        replays: bool = True,
        first_row: int = 0,
    ) -> None:
        """`stop_ids` are the model's own and the request's: one of them is the last id of a stopped reply.

        `replays`: routed experts were asked for; else they are left out where they come. Those of tokens before
        `first_row` come as well, and are left out.
        """
        self._replays = replays
        self._first_row = first_row
        self._route = route
        self._vocab_size = vocab_size
        self._num_prompt = num_prompt
        self._stop_ids = frozenset(stop_ids)
        self._sampled = SampledTokens(vocab_size=vocab_size, num_prompt=num_prompt)
        self._held: Chunk | None = None
        self._has_ended = False
        self._usage: EngineUsage | None = None

    def __repr__(self) -> str:
        return f"<LMDeployReading {self._route} {self._sampled!r}>"

    def event(self, data: bytes) -> Sequence[Chunk]:
        """The chunks of a part; the generation's last one is held until `end`."""
        part = self._generated(data) if self._route is LMDeployRoute.GENERATE else self._chat(data)
        if part is None:
            return ()
        if self._has_ended:
            raise UpstreamInvalid("finish_is_last", "the engine went on after the part that ended the generation")
        chunk = self._chunk(part)
        if chunk.finish is None:
            return (chunk,) if chunk.ids else ()
        self._has_ended, self._held = True, chunk
        return ()

    def end(self) -> Sequence[Chunk]:
        """The generation's last chunk, if it came. Raises UpstreamInvalid if the usage disagrees with it."""
        held, self._held = self._held, None
        if held is None:
            return ()
        if self._route is LMDeployRoute.CHAT:
            self._check_usage()
        cached = 0 if self._usage is None else self._usage.num_cached
        return (
            Chunk(
                ids=held.ids,
                logprobs=held.logprobs,
                top_logprobs=held.top_logprobs,
                finish=held.finish,
                num_cached_tokens=cached,
                replay=held.replay,
                unasked_replay=held.unasked_replay,
            ),
        )

    def _generated(self, data: bytes) -> _LMDeployPart:
        told = decoded(_GENERATED, data, _LAWS)
        if told.error is not None:
            raise self._error_within(told.error, data)
        meta = told.meta_info
        if meta is None:
            raise UpstreamInvalid("has_meta_info", "there is no meta_info")
        return _LMDeployPart(
            rows=meta.output_token_logprobs,
            tops=meta.output_top_logprobs,
            output_ids=told.output_ids,
            num_sampled=meta.completion_tokens,
            num_prompt=meta.prompt_tokens,
            finish=None if meta.finish_reason is None else meta.finish_reason.type,
            experts=meta.routed_experts,
            text=told.text,
        )

    def _chat(self, data: bytes) -> _LMDeployPart | None:
        told = decoded(_CHAT, data, _LAWS)
        if told.error is not None:
            raise self._error_within(told.error, data)
        self._usage = told.usage or self._usage
        if not told.choices and told.usage is not None:
            return None
        if not told.choices or len(told.choices) != 1:
            raise UpstreamInvalid("one_choice", f"one choice was asked for, {len(told.choices or ())} came")
        choice = told.choices[0]
        message = choice.message or choice.delta or _LMDeployMessage()
        return _LMDeployPart(
            rows=choice.output_token_logprobs,
            tops=None,
            output_ids=choice.output_ids,
            num_sampled=None,
            num_prompt=None,
            finish=choice.finish_reason,
            experts=choice.routed_experts,
            text=message.content or "",
        )

    def _chunk(self, part: _LMDeployPart) -> Chunk:
        reason = None if part.finish is None else self._reason(part)
        if part.rows is None and part.output_ids:
            raise UpstreamInvalid("has_logprobs", f"{len(part.output_ids)} tokens came without their logprobs")
        num_before, num_new = len(self._sampled.ids), len(part.rows or ())
        num_sampled = num_before + num_new if part.num_sampled is None else part.num_sampled
        if reason is FinishReason.LENGTH and num_sampled == 0:
            num_prompt = self._num_prompt
            raise ContextLengthExceeded(num_prompt_tokens=num_prompt, max_tokens=None, max_context_tokens=num_prompt)
        if num_sampled != num_before + num_new:
            detail = f"{short(num_sampled)} completion tokens, but {num_before} came before and {num_new} now"
            raise UpstreamInvalid("count_agrees", detail)
        ids, logprobs = self._sampled.take(
            part.rows or (), num_sampled=num_sampled, reason=reason, num_prompt=part.num_prompt
        )
        if part.output_ids is not None and list(part.output_ids) != ids.tolist():
            raise UpstreamInvalid("ids_agree", "output_ids are not the ids of the tokens' rows")
        is_told = reason is not None and part.experts is not None
        return Chunk(
            ids=ids,
            logprobs=logprobs,
            top_logprobs=alternatives(part.tops, num_sampled=num_sampled, num_new=num_new, vocab_size=self._vocab_size),
            finish=None if reason is None else self._finish(reason),
            replay=self._replay(part.experts, num_sampled) if is_told and self._replays else None,
            unasked_replay=("routed_experts",) if is_told and not self._replays else (),
        )

    def _reason(self, part: _LMDeployPart) -> FinishReason:
        if part.finish == "error":
            raise UpstreamInvalid("no_failure", f"the engine failed: {part.text[:200] or 'it does not say how'}")
        return reason_of(part.finish or "")

    def _finish(self, reason: FinishReason) -> Finish:
        """The stop token is the last id, if it is one: LMDeploy does not report the stop."""
        last = self._sampled.ids[-1] if self._sampled.ids else None
        matched = last if reason is FinishReason.STOP and last in self._stop_ids else None
        return Finish(reason=reason, matched=matched)

    def _check_usage(self) -> None:
        if self._usage is None:
            raise UpstreamInvalid("has_usage", "the reply does not count its tokens")
        if self._usage.completion_tokens != len(self._sampled.ids):
            detail = f"{short(self._usage.completion_tokens)} completion tokens, but {len(self._sampled.ids)} rows"
            raise UpstreamInvalid("count_agrees", detail)
        if self._usage.prompt_tokens != self._num_prompt:
            raise other_prompt(self._num_prompt, self._usage.prompt_tokens)

    def _replay(self, experts: Experts, num_sampled: int) -> Replay | None:
        """Experts of each token but the last, of the new rows."""
        if experts is None:
            return None
        if isinstance(experts, str):
            raise UpstreamInvalid("replay_shape", "routed_experts are a reference into the engine's own cluster")
        sizes = {(len(layers), *(len(chosen) for chosen in layers)) for layers in experts}
        is_even = len(sizes) <= 1 and all(len(set(size[1:])) <= 1 for size in sizes)
        if not is_even or len(experts) != self._num_prompt + num_sampled - 1:
            raise UpstreamInvalid(
                "replay_shape",
                f"routed_experts of {len(experts)} tokens came for a sequence of {self._num_prompt + num_sampled}",
            )
        try:
            flat = array(
                "i", (expert for layers in experts[self._first_row :] for chosen in layers for expert in chosen)
            )
        except OverflowError as error:
            raise UpstreamInvalid("replay_shape", "an expert's number is no int32") from error
        return Replay(routed_experts=PackedInts.of(np.frombuffer(flat, np.intc)), first_row=self._first_row)

    def _error_within(self, told: ErrorWithin | str, data: bytes) -> StenographError:
        """An error as an event; outside of a stream, the same has a status of its own."""
        status = error_of(told).status
        if not 400 <= status <= 599:
            return UpstreamInvalid("error_status", f"an error within a reply has the status {short(status)}")
        refused = told_too_long(data, TOO_LONG, self._num_prompt)
        return refused or UpstreamRefused(status=status, content_type=JSON_TYPE, headers=(), body=data)
