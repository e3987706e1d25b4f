"""OpenAI's Responses, streamed replies: stream pieces to events. Pure.

Reasoning and text stream as they come. A reasoning item is done when the text begins; the text and the calls are done
after the commit, in the same order as in a whole reply. Each event has its number.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NotRequired, TypedDict

from stenograph.core.chat import ChatReply, ReplyOptions, StreamPiece
from stenograph.core.errors import (
    BudgetSpent,
    CallerError,
    ContextLengthExceeded,
    LimitExceeded,
    StenographError,
)
from stenograph.core.json_pieces import PIECE_VALUES, joined, json_pieces, json_whole
from stenograph.core.json_types import Count
from stenograph.core.sse import EVENT_STREAM_HEADERS
from stenograph.core.types import FinishReason, SamplingParams
from stenograph.dialects.common.reply_parts import ROWS_AT_ONCE, TokenText, parts_of
from stenograph.dialects.responses.ids import ItemId
from stenograph.dialects.responses.reply import (
    CustomCallOutput,
    FailedReason,
    FunctionCallOutput,
    ItemStatus,
    OutputItem,
    OutputToken,
    ResponseBody,
    SearchCallOutput,
    call_item,
    ended_response,
    logprob_rows,
    message_item,
    reasoning_item,
    response_head,
    shows_text,
    text_part,
    turn_of_reply,
)
from stenograph.dialects.responses.spelling import ReplyForm

Rows = Callable[[], Iterator[Sequence[OutputToken]]]
Event = Mapping[str, object]


class ResponseEvent(TypedDict):
    """An event. Those of a response have it whole; those of an item have its place, and its text or a piece of it."""

    type: str
    sequence_number: Count
    response: NotRequired[ResponseBody]
    item: NotRequired[Mapping[str, object]]
    item_id: NotRequired[str]
    output_index: NotRequired[Count]
    content_index: NotRequired[Count]
    part: NotRequired[Mapping[str, object]]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[Sequence[OutputToken]]


class _Begun:
    """An item begun in the stream: reasoning or text."""

    def __init__(self, kind: Literal["reasoning", "message"], index: int, item_id: ItemId) -> None:
        self.kind = kind
        self.index = index
        self.id = item_id
        self.texts: list[str] = []
        self.item: OutputItem | None = None  # once it is done

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.texts)


def no_rows() -> Iterator[Sequence[OutputToken]]:
    """The log-probabilities of a reply that shows none."""
    return iter(())


class ResponseWriter:
    """Writes one streamed reply: `start`, any number of `pieces`, then `end` after the commit, or `failed`."""

    headers = EVENT_STREAM_HEADERS

    def __init__(
        self,
        *,
        reply_id: str,
        created: int,
        model: str,
        options: ReplyOptions,
        form: ReplyForm,
        params: SamplingParams,
        token_text: TokenText,
    ) -> None:
        self._head = response_head(reply_id, created, model, form, params)
        self._turn = turn_of_reply(reply_id)
        self._form = form
        self._options = options
        self._token_text = token_text
        self._num_events = 0
        self._begun: list[_Begun] = []
        self._rows: list[OutputToken] = []

    def start(self, prompts: Sequence["array[int]"]) -> bytes:
        """The events of the response, unless a sign of life has sent them."""
        if self._num_events:
            return b""
        return self._of_response("response.created", self._head) + self.alive(prompts)

    def alive(self, prompts: Sequence["array[int]"]) -> bytes:
        """`response.in_progress`, once more: comments are nothing to the clients of this protocol."""
        if not self._num_events:
            return self.start(prompts)
        return self._of_response("response.in_progress", self._head)

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """New reasoning and text. Log-probabilities of many tokens come as several events."""
        if not self._options.logprobs:
            return b"".join(map(self._piece, pieces))
        cut = [part for piece in pieces for part in parts_of(piece)]
        events = map(self._piece, cut)
        return b"".join(events) if len(cut) == len(pieces) else events

    def end(self, replies: Sequence[ChatReply]) -> bytes | Iterator[bytes]:
        """The rest of each item, the calls, and the whole response."""
        (reply,) = replies
        num_sampled = len(reply.sampled.ids)
        num_ids = self._options.return_token_ids * (num_sampled + reply.prompt.num_tokens)
        fragments = self._end(reply)
        if num_ids > PIECE_VALUES or (self._options.logprobs and num_sampled > ROWS_AT_ONCE):
            return joined(fragments)
        return b"".join(fragments)

    def failed(self, error: StenographError) -> bytes:
        """`response.failed`, with the error in Responses' words."""
        why: FailedReason = {"code": failure_code(error), "message": error.message}
        output = [one.item for one in self._begun if one.item is not None]
        body = self._head.copy()
        body["status"], body["error"], body["output"] = "failed", why, output
        return self.start(()) + self._of_response("response.failed", body)

    def _piece(self, piece: StreamPiece) -> bytes:
        if self._options.logprobs and piece.chunks:
            rows = chain.from_iterable(logprob_rows(one, self._token_text, self._options) for one in piece.chunks)
            self._rows += chain.from_iterable(rows)
        events: list[bytes] = []
        if piece.delta.reasoning:
            events += self._reasoning(piece.delta.reasoning)
        if piece.delta.content or (self._rows and self._message() is not None):
            events += self._text(piece.delta.content)
        return b"".join(events)

    def _reasoning(self, text: str) -> Iterator[bytes]:
        last = self._begun[-1] if self._begun else None
        if last is None or last.kind != "reasoning" or last.item is not None:
            number = sum(one.kind == "reasoning" for one in self._begun)
            last = _Begun("reasoning", len(self._begun), ItemId(prefix="rs", turn=self._turn, number=number))
            self._begun.append(last)
            item = reasoning_item(self._turn, "", self._form, "in_progress", number)
            yield self._added(last.index, {**item, "content": []})
            yield self._of_part(last, "response.content_part.added", part={"type": "reasoning_text", "text": ""})
        last.texts.append(text)
        yield self._of_part(last, "response.reasoning_text.delta", delta=text)

    def _text(self, text: str) -> Iterator[bytes]:
        for one in self._begun:
            if one.kind == "reasoning" and one.item is None:
                yield from self._done(one, "completed", no_rows)
        message = self._message()
        if message is None:
            message = _Begun("message", len(self._begun), ItemId(prefix="msg", turn=self._turn))
            self._begun.append(message)
            item = message_item(self._turn, "", "in_progress", no_rows())
            yield self._added(message.index, {**item, "content": []})
            yield self._of_part(message, "response.content_part.added", part=text_part("", no_rows()))
        rows, self._rows = self._rows, []
        if text or rows:
            message.texts.append(text)
            yield self._of_part(message, "response.output_text.delta", delta=text, logprobs=rows)

    def _message(self) -> _Begun | None:
        return next((one for one in self._begun if one.kind == "message"), None)

    def _end(self, reply: ChatReply) -> Iterator[bytes]:
        message, options = reply.parsed.message, self._options

        def rows() -> Iterator[Sequence[OutputToken]]:
            return logprob_rows(reply.sampled, self._token_text, options) if options.logprobs else no_rows()

        yield self.start(())
        if shows_text(message) and self._message() is None:
            yield from self._text("")
        cut: ItemStatus = "completed" if reply.sampled.finish.reason is FinishReason.STOP else "incomplete"
        is_cut = self._message() is not None or not message.tool_calls
        for one in self._begun:
            if one.item is None:
                is_last = one.kind == "message" or (self._message() is None and is_cut)
                yield from self._done(one, cut if is_last else "completed", rows)
        calls: list[OutputItem] = []
        for number, call in enumerate(message.tool_calls):
            item = call_item(self._turn, number, call, self._form)
            yield from self._call(item, len(self._begun) + number)
            calls.append(item)
        output = [self._item(one, rows) for one in self._begun] + calls
        body = ended_response(self._head, output, reply, options)
        yield from self._written(f"response.{body['status']}", response=body)

    def _done(self, one: _Begun, status: ItemStatus, rows: Rows) -> Iterator[bytes]:
        """The events at the end of an item of reasoning or text."""
        text = one.text
        if one.kind == "reasoning":
            yield self._of_part(one, "response.reasoning_text.done", text=text)
            yield self._of_part(one, "response.content_part.done", part={"type": "reasoning_text", "text": text})
            one.item = reasoning_item(self._turn, text, self._form, status, one.id.number)
        else:
            where = {"item_id": str(one.id), "output_index": one.index, "content_index": 0}
            logprobs = text_part(text, rows())["logprobs"]
            yield from self._written("response.output_text.done", **where, text=text, logprobs=logprobs)
            yield from self._written("response.content_part.done", **where, part=text_part(text, rows()))
            one.item = message_item(self._turn, text, status, no_rows())
        yield from self._written("response.output_item.done", output_index=one.index, item=self._item(one, rows))

    def _item(self, one: _Begun, rows: Rows) -> OutputItem:
        """A done item, to be written once more."""
        assert one.item is not None, "an item is written when it is done"
        if one.item["type"] == "message":
            return message_item(self._turn, one.text, one.item["status"], rows())
        return one.item

    def _call(self, item: FunctionCallOutput | CustomCallOutput | SearchCallOutput, index: int) -> Iterator[bytes]:
        """The events of a call; it is whole."""
        where = {"item_id": item["id"], "output_index": index}
        match item["type"]:
            case "function_call":
                arguments = item["arguments"]
                yield self._added(index, {**item, "arguments": "", "status": "in_progress"})
                yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
                named = {"name": item["name"], "arguments": arguments}
                yield self._event("response.function_call_arguments.done", **where, **named)
            case "custom_tool_call":
                text = item["input"]
                yield self._added(index, {**item, "input": "", "status": "in_progress"})
                yield self._event("response.custom_tool_call_input.delta", **where, delta=text)
                yield self._event("response.custom_tool_call_input.done", **where, input=text)
            case "tool_search_call":
                yield self._added(index, {**item, "status": "in_progress"})
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _added(self, index: int, item: Event) -> bytes:
        return self._event("response.output_item.added", output_index=index, item=item)

    def _of_part(self, one: _Begun, kind: str, **fields: object) -> bytes:
        """An event of an item's one part."""
        return self._event(kind, item_id=str(one.id), output_index=one.index, content_index=0, **fields)

    def _of_response(self, kind: str, body: ResponseBody) -> bytes:
        return self._event(kind, response=body)

    def _event(self, kind: str, **fields: object) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_whole(self._numbered(kind, fields)))

    def _written(self, kind: str, **fields: object) -> Iterator[bytes]:
        """The same of an event, large or small, in fragments."""
        yield b"event: %b\ndata: " % kind.encode()
        yield from json_pieces(self._numbered(kind, fields))
        yield b"\n\n"

    def _numbered(self, kind: str, fields: Mapping[str, object]) -> dict[str, Any]:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}


def failure_code(error: StenographError) -> str:
    """The code of an error after the status was sent, in words for Responses' clients: some are final to them,
    `server_error` is tried again."""
    if isinstance(error, ContextLengthExceeded):
        return "context_length_exceeded"
    if isinstance(error, BudgetSpent):
        return "insufficient_quota"
    if isinstance(error, LimitExceeded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, CallerError) else "server_error"
