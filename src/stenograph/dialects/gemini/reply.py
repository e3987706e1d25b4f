"""Gemini replies: `ChatReply` and stream pieces to bytes. Pure."""

import base64
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal, NotRequired, TypedDict

import msgspec

from stenograph.core.chat import ChatReply, StreamPiece
from stenograph.core.errors import StenographError
from stenograph.core.json_pieces import as_chunked_list, as_list
from stenograph.core.json_types import Count, Logprob
from stenograph.core.messages import ReplyDelta, ToolCallDelta, whole_delta
from stenograph.core.sse import EVENT_STREAM_HEADERS, data_event
from stenograph.core.types import FinishReason, SampledTurn, Usage
from stenograph.dialects.base import Headers
from stenograph.dialects.common.reply_parts import Drawn, TokenText, parts_of, reply_text, row_slices
from stenograph.dialects.gemini.errors import gemini_error
from stenograph.dialects.gemini.spelling import GeminiSpelling

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])

GeminiFinish = Literal["STOP", "MAX_TOKENS", "OTHER"]

_FINISHES: dict[FinishReason, GeminiFinish] = {
    FinishReason.STOP: "STOP",
    FinishReason.LENGTH: "MAX_TOKENS",
    FinishReason.ABORT: "OTHER",
}


class RepliedCall(TypedDict):
    """A function that the model calls."""

    id: str
    name: str
    args: dict[str, object]


class RepliedPart(TypedDict):
    """A text, or a call. `thought` says that the text is reasoning."""

    text: NotRequired[str]
    thought: NotRequired[Literal[True]]
    functionCall: NotRequired[RepliedCall]
    thoughtSignature: NotRequired[str]


class RepliedContent(TypedDict):
    """The model's message, or what an event adds to it."""

    role: Literal["model"]
    parts: Sequence[RepliedPart]


class CandidateToken(TypedDict):
    """A token and its logprob in nats."""

    token: str
    tokenId: Count
    logProbability: Logprob


class TopCandidates(TypedDict):
    """The likeliest tokens at one place."""

    candidates: Sequence[CandidateToken]


class ReplyLogprobsResult(TypedDict):
    """The sampled tokens, and with `logprobs` the alternatives to each."""

    chosenCandidates: Sequence[CandidateToken]
    topCandidates: NotRequired[Sequence[TopCandidates]]


class ReplyCandidate(TypedDict):
    """The reply. `finishReason` is `OTHER` for a turn that was aborted; in a stream the last event has it."""

    content: RepliedContent
    finishReason: NotRequired[GeminiFinish]
    index: Literal[0]
    logprobsResult: NotRequired[ReplyLogprobsResult]


class UsageMetadata(TypedDict):
    """Tokens of a turn. `candidatesTokenCount` is without those of the reasoning."""

    promptTokenCount: Count
    candidatesTokenCount: Count
    totalTokenCount: Count
    cachedContentTokenCount: NotRequired[Count]
    thoughtsTokenCount: NotRequired[Count]


class GenerateContentResponse(TypedDict):
    """A reply, or an event of a stream, of which the last has the usage."""

    candidates: Sequence[ReplyCandidate]
    usageMetadata: NotRequired[UsageMetadata]
    modelVersion: str
    responseId: str


_NO_TEXT: RepliedPart = {"text": ""}
"""Google's own package takes a content without parts for a failed reply, and forgets the turn."""


def encode_gemini(reply: ChatReply, spelling: GeminiSpelling, token_text: TokenText | None) -> bytes | Iterator[bytes]:
    """The body of a whole reply; in pieces if it is long. With `token_text` it has logprobs."""
    candidate = _candidate(_parts(whole_delta(reply.parsed.message), reply.id, shows=spelling.shows_thoughts))
    candidate["finishReason"] = _FINISHES[reply.sampled.finish.reason]
    if token_text is not None:
        candidate["logprobsResult"] = _whole_logprobs(reply.sampled, token_text)
    body: GenerateContentResponse = {
        "candidates": [candidate],
        "usageMetadata": usage_metadata(reply.usage),
        "modelVersion": reply.model,
        "responseId": reply.id,
    }
    return reply_text(body, num_ids=0, num_rows=0 if token_text is None else len(reply.sampled.ids))


class GeminiStream:
    """Writes one streamed reply: events, or without `alt=sse` the elements of a JSON list."""

    def __init__(self, *, reply_id: str, model: str, spelling: GeminiSpelling, token_text: TokenText | None) -> None:
        self._reply_id = reply_id
        self._model = model
        self._spelling = spelling
        self._token_text = token_text
        self._num_calls = 0
        self._has_element = False

    @property
    def headers(self) -> Headers:
        """The answer's headers."""
        if self._spelling.is_sse:
            return EVENT_STREAM_HEADERS
        return (("content-type", "application/json; charset=utf-8"), *EVENT_STREAM_HEADERS[1:])

    def start(self, prompts: Sequence["array[int]"]) -> bytes:
        """Nothing: Google's first event has text."""
        return b""

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """An event for each piece with something to see; log-probabilities of many tokens as several."""
        if self._token_text is None:
            return b"".join(map(self._piece, pieces))
        return map(self._piece, chain.from_iterable(map(parts_of, pieces)))

    def _piece(self, piece: StreamPiece) -> bytes:
        parts = _parts(
            piece.delta, self._reply_id, shows=self._spelling.shows_thoughts, is_first_call=not self._num_calls
        )
        self._num_calls += len(piece.delta.tool_calls)
        has_logprobs = self._token_text is not None and bool(piece.chunks)
        if not parts and not has_logprobs:
            return b""
        candidate = _candidate(parts)
        if self._token_text is not None and has_logprobs:
            candidate["logprobsResult"] = _joined([_logprobs(chunk, self._token_text) for chunk in piece.chunks])
        return self._element(msgspec.json.encode(self._body(candidate)))

    def alive(self, prompts: Sequence["array[int]"]) -> bytes:
        """An event without text."""
        return self._element(msgspec.json.encode(self._body(_candidate(()))))

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The finish and the usage. Send only after the commit."""
        (reply,) = replies
        candidate = _candidate(())
        candidate["finishReason"] = _FINISHES[reply.sampled.finish.reason]
        body = self._body(candidate)
        body["usageMetadata"] = usage_metadata(reply.usage)
        return self._element(msgspec.json.encode(body)) + (b"" if self._spelling.is_sse else b"]")

    def failed(self, error: StenographError) -> bytes:
        """The error as Google's clients look for it: in a stream of events bare, without `data:`."""
        written = gemini_error(error, self._spelling)
        return written + b"\n\n" if self._spelling.is_sse else self._element(written) + b"]"

    def _body(self, candidate: ReplyCandidate) -> GenerateContentResponse:
        return {"candidates": [candidate], "modelVersion": self._model, "responseId": self._reply_id}

    def _element(self, text: bytes) -> bytes:
        if self._spelling.is_sse:
            return data_event(text)
        before, self._has_element = b",\n" if self._has_element else b"[", True
        return before + text


def usage_metadata(usage: Usage) -> UsageMetadata:
    """The tokens of a turn."""
    body: UsageMetadata = {
        "promptTokenCount": usage.num_prompt,
        "candidatesTokenCount": usage.num_completion - usage.num_reasoning,
        "totalTokenCount": usage.num_prompt + usage.num_completion,
    }
    if usage.num_cached:
        body["cachedContentTokenCount"] = usage.num_cached
    if usage.num_reasoning:
        body["thoughtsTokenCount"] = usage.num_reasoning
    return body


def _candidate(parts: Sequence[RepliedPart]) -> ReplyCandidate:
    return {"content": {"role": "model", "parts": parts or [_NO_TEXT]}, "index": 0}


def _parts(delta: ReplyDelta, reply_id: str, *, shows: bool, is_first_call: bool = True) -> list[RepliedPart]:
    """The parts of a message, or of its new output; its reasoning only where it `shows`."""
    parts: list[RepliedPart] = []
    if delta.reasoning and shows:
        parts.append({"text": delta.reasoning, "thought": True})
    if delta.content:
        parts.append({"text": delta.content})
    calls = list(map(_call, delta.tool_calls))
    if calls and is_first_call and "functionCall" in calls[0]:
        calls[0]["thoughtSignature"] = base64.b64encode(f"stg1.{reply_id}".encode()).decode()
    return parts + calls


def _call(call: ToolCallDelta) -> RepliedPart:
    """A call; as text where its engine read arguments other than an object: Google's clients cannot take these."""
    name = call.name or ""
    try:
        args = _OBJECT.decode(call.arguments or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {"text": msgspec.json.encode({"name": name, "arguments": call.arguments}).decode()}
    return {"functionCall": {"id": call.id or "", "name": name, "args": dict(args)}}


def _whole_logprobs(sampled: SampledTurn, token_text: TokenText) -> ReplyLogprobsResult:
    body: ReplyLogprobsResult = {"chosenCandidates": as_chunked_list(_chosen(sampled, token_text))}
    if sampled.top_logprobs is not None:
        body["topCandidates"] = as_list(_tops(sampled, token_text))
    return body


def _logprobs(drawn: Drawn, token_text: TokenText) -> ReplyLogprobsResult:
    body: ReplyLogprobsResult = {"chosenCandidates": list(chain.from_iterable(_chosen(drawn, token_text)))}
    if drawn.top_logprobs is not None:
        body["topCandidates"] = list(_tops(drawn, token_text))
    return body


def _joined(results: Sequence[ReplyLogprobsResult]) -> ReplyLogprobsResult:
    if len(results) == 1:
        return results[0]
    body: ReplyLogprobsResult = {"chosenCandidates": [one for result in results for one in result["chosenCandidates"]]}
    tops = [one for result in results for one in result.get("topCandidates", ())]
    if tops:
        body["topCandidates"] = tops
    return body


def _chosen(drawn: Drawn, token_text: TokenText) -> Iterator[list[CandidateToken]]:
    for part in row_slices(drawn):
        rows = zip(drawn.ids[part], drawn.logprobs[part], strict=True)
        yield [_token(id_, logprob, token_text) for id_, logprob in rows]


def _tops(drawn: Drawn, token_text: TokenText) -> Iterator[TopCandidates]:
    for row in drawn.top_logprobs or ():
        yield {"candidates": [_token(top.id, top.logprob, token_text) for top in row]}


def _token(id_: int, logprob: float, token_text: TokenText) -> CandidateToken:
    return {"token": token_text(id_), "tokenId": id_, "logProbability": logprob}
