"""A session as its trainer reads it: records, ids, metadata. Pure: session state to values for `json_pieces`.

The shapes are the miles session server's: `session_id`, `records`, `metadata`; a record has `timestamp`,
`request_timestamp`, `method`, `path`, `status_code`, `request` as it went to the engine, `response` in the shape of
SGLang's chat route. `records=delta` leaves out what stands in the records before: messages and ids of earlier turns.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

import msgspec

from stenograph.core.chat import Asked
from stenograph.core.ids_json import encode_ids, pieces_of
from stenograph.core.json_pieces import PIECE_VALUES, Written, joined, json_pieces, list_pieces
from stenograph.core.messages import Message
from stenograph.core.types import SampledTurn
from stenograph.protocol.openai_chat_reply import message_body
from stenograph.session.history import CommittedTurn, Node, line_ids
from stenograph.session.session import Session

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def records(line: Sequence[Node], *, delta: bool) -> Iterator[dict[str, object]]:
    """The records of a line, oldest first, for `json_pieces`: a long session's are many megabytes.

    `delta`: each with only what its turn added, and how much it did not. Else what an earlier record has written is
    joined, not written again: so write each record before the next one is taken. A completion's has no messages, and
    nothing but completions follows it.
    """
    ids, messages = _GrowingList(), _GrowingList()
    num_ids = num_messages = 0
    for node in line:
        turn = node.turn
        if turn.num_trimmed:
            ids = _GrowingList()
            ids.extend(_ids_text(line_ids(node.parent)[: -turn.num_trimmed]))
            num_ids -= turn.num_trimmed
        if turn.asked is Asked.COMPLETION:
            messages, num_messages = _GrowingList(), 0
        request: dict[str, object]
        if delta:
            request = {"num_kept_ids": num_ids, "num_kept_messages": num_messages}
            request["messages"] = map(_message, turn.messages)
            request["input_ids"] = turn.new_prompt_ids
        else:
            messages.extend(_messages_text(turn.messages))
            ids.extend(_ids_text(turn.new_prompt_ids))
            request = {"messages": Written(messages.pieces()), "input_ids": Written(ids.pieces())}
        yield _record(node, request)
        ids.extend(_ids_text(turn.sampled.ids))
        num_ids = node.num_tokens
        if turn.asked is Asked.CHAT:
            messages.extend(_messages_text((turn.reply.message,)))
            num_messages = node.num_messages


class _GrowingList:
    """A JSON list that is written again with more at its end: only what is new is written, the rest is at hand."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._new: list[Iterable[Iterable[bytes]]] = []
        self._is_empty = True

    def extend(self, elements: Iterable[Iterable[bytes]]) -> None:
        """Add elements, each of them text in pieces; they are written when `pieces` comes to them."""
        self._new.append(elements)

    def pieces(self) -> Iterator[bytes]:
        """The whole list. To be read to its end."""
        yield b"["
        yield from self._pieces
        for piece in joined(self._new_text()):
            self._pieces.append(piece)
            yield piece
        yield b"]"

    def _new_text(self) -> Iterator[bytes]:
        new, self._new = self._new, []
        for element in chain.from_iterable(new):
            if not self._is_empty:
                yield b","
            self._is_empty = False
            yield from element


def _ids_text(ids: "array[int]") -> Iterator[tuple[bytes]]:
    return ((encode_ids(piece),) for piece in pieces_of(ids))


def _messages_text(messages: Iterable[Message]) -> Iterator[Iterator[bytes]]:
    return (json_pieces(_message(message)) for message in messages)


def session_summary(session: Session) -> dict[str, object]:
    """One entry of `GET /sessions`."""
    nodes = session.history.nodes
    return {
        "session_id": session.id,
        "created_at": session.created_at,
        "history": session.options.history,
        "num_turns": len(nodes),
        "num_tokens": session.history.num_tokens,
        "busy": session.gate.is_busy,
        "metadata": session.options.metadata,
    }


def _record(node: Node, request: dict[str, object]) -> dict[str, object]:
    turn = node.turn
    stages = turn.stages
    of_chats: dict[str, object] = {
        "tool_choice": msgspec.to_builtins(turn.tool_choice),
        "parallel_tool_calls": turn.parallel_tool_calls,
        "chat_template_kwargs": turn.context.template_kwargs,
    }
    return {
        "timestamp": turn.committed_at,
        "request_timestamp": turn.requested_at,
        "method": "POST",
        "path": "/v1/chat/completions" if turn.asked is Asked.CHAT else "/v1/completions",
        "status_code": 200,
        "request_id": turn.request_id,
        "node_id": node.id,
        "status": turn.status,
        "request": {
            **request,
            "tools": [msgspec.Raw(tool.json.encode()) for tool in turn.context.tools],
            "parameters": {
                **_OBJECT.decode(turn.request_json),
                "sampling_params": msgspec.to_builtins(turn.params),
                **(of_chats if turn.asked is Asked.CHAT else {}),
            },
        },
        "response": _response(node),
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in turn.sampled.weights
        ],
        "stages": {"start": stages.start, **{str(stage): end for stage, end in stages.ends.items()}},
        "stage_seconds": {str(stage): seconds for stage, seconds in stages.durations_s().items()},
    }


def _response(node: Node) -> dict[str, object]:
    turn, sampled = node.turn, node.turn.sampled
    num_prompt, num_drawn = node.num_tokens - len(sampled.ids), len(sampled.ids)
    is_chat = turn.asked is Asked.CHAT
    shown: dict[str, object] = (
        {"message": _message(turn.reply.message)} if is_chat else {"text": turn.reply.message.content}
    )
    return {
        "id": turn.reply_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(turn.committed_at),
        "choices": [
            {
                "index": 0,
                **shown,
                "parse_problem": turn.reply.problem,
                "parse_faults": [
                    {"problem": fault.problem, "seen": fault.seen, "start": fault.start, "end": fault.end}
                    for fault in turn.reply.faults
                ],
                "finish_reason": _finish_reason(turn),
                "stop_reason": sampled.finish.matched,
                "meta_info": {"prompt_tokens": num_prompt, **_meta_info(turn)},
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": num_prompt + num_drawn,
        },
    }


def _meta_info(turn: CommittedTurn) -> dict[str, object]:
    sampled = turn.sampled
    meta: dict[str, object] = {
        "id": turn.request_id,
        "finish_reason": {"type": sampled.finish.reason, "matched": sampled.finish.matched},
        "completion_tokens": len(sampled.ids),
        "cached_tokens": sampled.num_cached_tokens,
        "output_token_logprobs": Written(_triples(sampled.ids, sampled.logprobs)),
    }
    if sampled.sampling_logprobs is not None:
        meta["output_token_sampling_logprobs"] = sampled.sampling_logprobs
    if sampled.weights:
        meta["weight_version"] = sampled.weights[-1].version
    return meta | _replay(sampled)


def _replay(sampled: SampledTurn) -> dict[str, object]:
    if sampled.replay is None:
        return {}
    found = {"routed_experts": sampled.replay.routed_experts, "indexer_topk": sampled.replay.indexer_topk}
    return {name: payload for name, payload in found.items() if payload is not None}


def _triples(ids: "array[int]", logprobs: "array[float]") -> Iterator[bytes]:
    starts = range(0, len(ids), PIECE_VALUES)
    spans = (slice(start, start + PIECE_VALUES) for start in starts)
    return list_pieces(list(zip(logprobs[span], ids[span], repeat(None))) for span in spans)


def _finish_reason(turn: CommittedTurn) -> str:
    if turn.sampled.finish.reason == "stop" and turn.reply.message.tool_calls:
        return "tool_calls"
    return str(turn.sampled.finish.reason)


def _message(message: Message) -> dict[str, object]:
    body = message_body(message)
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body
