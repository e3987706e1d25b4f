"""A session as its trainer reads it: records, ids, metadata. Pure: session state to plain values.

The outer shape is the miles session server's (`session_id`, `records`, `metadata`; a record has `timestamp`,
`request_timestamp`, `method`, `path`, `status_code`, `request`, `response`). A record holds only what its turn added:
`request.num_kept_ids` ids and `request.num_kept_messages` messages stand in the records before it.
"""

import msgspec

from stenograph.core.chat import Message
from stenograph.protocol.openai_chat_reply import message_body
from stenograph.session.history import CommittedTurn
from stenograph.session.manager import Session


def session_view(session: Session) -> dict[str, object]:
    """The body of `GET /sessions/{id}`."""
    records: list[dict[str, object]] = []
    num_kept_ids = num_kept_messages = 0
    for turn in session.history.turns:
        records.append(_record(turn, num_kept_ids=num_kept_ids, num_kept_messages=num_kept_messages))
        num_kept_ids += turn.num_tokens
        num_kept_messages += len(turn.messages) + 1
    metadata: dict[str, object] = {
        **session.options.metadata,
        "accumulated_token_ids": session.history.line_ids().tolist(),
        "max_trim_tokens": 0,
    }
    return {"session_id": session.id, "records": records, "metadata": metadata}


def session_summary(session: Session) -> dict[str, object]:
    """One entry of `GET /sessions`."""
    turns = session.history.turns
    return {
        "session_id": session.id,
        "created_at": session.created_at,
        "num_turns": len(turns),
        "num_tokens": sum(turn.num_tokens for turn in turns),
        "busy": session.gate.is_busy,
        "metadata": session.options.metadata,
    }


def _record(turn: CommittedTurn, *, num_kept_ids: int, num_kept_messages: int) -> dict[str, object]:
    sampled = turn.sampled
    sampling = sampled.sampling_logprobs
    return {
        "timestamp": turn.committed_at,
        "request_timestamp": turn.requested_at,
        "method": "POST",
        "path": "/v1/chat/completions",
        "status_code": 200,
        "request_id": turn.request_id,
        "status": turn.status,
        "request": {
            "num_kept_messages": num_kept_messages,
            "messages": [_message(message) for message in turn.messages],
            "num_kept_ids": num_kept_ids,
            "input_ids": turn.new_prompt_ids.tolist(),
            "tools": [msgspec.Raw(tool.json.encode()) for tool in turn.context.tools],
            "parameters": msgspec.Raw(turn.request_json),
        },
        "response": {
            "message": _message(turn.reply.message),
            "parse_problem": turn.reply.problem,
            "finish_reason": sampled.finish.reason,
            "stop_reason": sampled.finish.matched,
            "output_ids": sampled.ids.tolist(),
            "logprobs": sampled.logprobs.tolist(),
            "sampling_logprobs": None if sampling is None else sampling.tolist(),
            "cached_tokens": sampled.num_cached_tokens,
        },
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in sampled.weights
        ],
        "stages": {str(stage): seconds for stage, seconds in turn.stages_s.items()},
    }


def _message(message: Message) -> dict[str, object]:
    body = message_body(message)
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body
