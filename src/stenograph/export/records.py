"""A session as its trainer reads it: records, ids, metadata. Pure: session state to plain values.

The shapes are the miles session server's: `session_id`, `records`, `metadata`; a record has `timestamp`,
`request_timestamp`, `method`, `path`, `status_code`, `request` as it went to the engine, `response` in the shape of
SGLang's chat route. `records=delta` leaves out what stands in the records before: messages and ids of earlier turns.
"""

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from stenograph.core.ids_json import encode_ids, join_ids
from stenograph.core.messages import Message
from stenograph.core.types import SampledTurn
from stenograph.protocol.openai_chat_reply import message_body
from stenograph.session.history import CommittedTurn, Node, line_ids
from stenograph.session.session import Session

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encoded_records(line: Sequence[Node], *, delta: bool) -> Iterator[bytes]:
    """The records of a line as JSON, oldest first, one at a time: a long session's are many megabytes.

    `delta`: each with only what its turn added, and how much it did not. What an earlier record has written is joined,
    not written again. May run on workers, one call of `next` after the other.
    """
    ids, messages = b"", b""
    num_ids = num_messages = 0
    for node in line:
        turn = node.turn
        if turn.num_trimmed:
            ids = encode_ids(line_ids(node.parent)[: -turn.num_trimmed])
            num_ids -= turn.num_trimmed
        new_ids = encode_ids(turn.new_prompt_ids)
        new_messages = join_ids(msgspec.json.encode(_message(message)) for message in turn.messages)
        request: dict[str, object] = {"num_kept_ids": num_ids, "num_kept_messages": num_messages} if delta else {}
        ids, messages = join_ids((ids, new_ids)), join_ids((messages, new_messages))
        request["messages"] = _raw_list(new_messages if delta else messages)
        request["input_ids"] = _raw_list(new_ids if delta else ids)
        yield msgspec.json.encode(_record(node, request))
        ids = join_ids((ids, encode_ids(turn.sampled.ids)))
        messages = join_ids((messages, msgspec.json.encode(_message(turn.reply.message))))
        num_ids, num_messages = node.num_tokens, node.num_messages


def _raw_list(elements: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"[" + elements + b"]")


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
    return {
        "timestamp": turn.committed_at,
        "request_timestamp": turn.requested_at,
        "method": "POST",
        "path": "/v1/chat/completions",
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
                "tool_choice": msgspec.to_builtins(turn.tool_choice),
                "parallel_tool_calls": turn.parallel_tool_calls,
                "chat_template_kwargs": turn.context.template_kwargs,
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
    return {
        "id": turn.reply_id,
        "object": "chat.completion",
        "created": int(turn.committed_at),
        "choices": [
            {
                "index": 0,
                "message": _message(turn.reply.message),
                "parse_problem": turn.reply.problem,
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
        "output_token_logprobs": _triples(sampled.ids, sampled.logprobs),
    }
    if sampled.sampling_logprobs is not None:
        meta["output_token_sampling_logprobs"] = sampled.sampling_logprobs.tolist()
    if sampled.weights:
        meta["weight_version"] = sampled.weights[-1].version
    return meta | _replay(sampled)


def _replay(sampled: SampledTurn) -> dict[str, object]:
    if sampled.replay is None:
        return {}
    found = {"routed_experts": sampled.replay.routed_experts, "indexer_topk": sampled.replay.indexer_topk}
    return {name: payload for name, payload in found.items() if payload is not None}


def _triples(ids: "array[int]", logprobs: "array[float]") -> list[tuple[float, int, None]]:
    return [(logprob, id_, None) for logprob, id_ in zip(logprobs, ids, strict=True)]


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
