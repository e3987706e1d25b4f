"""SGLang's account of a generation, for its stand-in: the `meta_info` of every route, and the parts of `/generate`.

Wire shapes: SGLang's `managers/tokenizer_manager.py`.
"""

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stenograph.testing.standins.planned_server import Logprobs, version_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """Everything that was drawn for one request. `tops` are the alternatives at each position, empty for none.

    `versions` are those of the weights that drew each token. `supports` are the ids that could be drawn beside each, if
    they were asked for.
    """

    rid: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Logprobs]
    versions: Sequence[str | int | None]
    num_prompt: int
    num_cached: int
    routed_experts: bytes | None
    indexer_topk: bytes | None
    rows_have_text: bool
    supports: Sequence[Sequence[int]] | None = None


def finish_reason(finish: str, matched: int | str | None, num_drawn: int) -> dict[str, Any]:
    """The finish reason, in SGLang's words."""
    match finish:
        case "length":
            return {"type": "length", "length": num_drawn}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case _:
            return {"type": finish, "matched": matched}


def meta_info(
    sampled: SampledReply, num_drawn: int, finish: dict[str, Any] | None, *, first: int = 0, has_spans: bool = False
) -> dict[str, Any]:
    """The account after `num_drawn` sampled tokens; the lists begin with the token number `first`."""
    width = 3 if sampled.rows_have_text else 2
    version = sampled.versions[num_drawn - 1] if num_drawn else next(iter(sampled.versions), "default")
    info: dict[str, Any] = {
        "id": sampled.rid,
        "finish_reason": finish,
        "prompt_tokens": sampled.num_prompt,
        "weight_version": version,
        "completion_tokens": num_drawn,
        "cached_tokens": sampled.num_cached,
        "output_token_logprobs": [
            [logprob, id_, None][:width]
            for id_, logprob in zip(sampled.ids[first:num_drawn], sampled.logprobs[first:num_drawn], strict=True)
        ],
    }
    if sampled.tops:
        info["output_top_logprobs"] = [
            [[logprob, id_, None] for id_, logprob in row] for row in sampled.tops[first:num_drawn]
        ]
    if sampled.supports is not None:
        told = sampled.supports[first:num_drawn]
        info["output_token_sampling_mask"] = told
        info["output_token_sampling_logprobs"] = [-math.log(max(1, len(row))) for row in told]
        info["output_token_sampling_mask_length"] = num_drawn
    if has_spans:
        info["weight_versions"] = version_spans(sampled.versions[:num_drawn])
    for name, payload in (("routed_experts", sampled.routed_experts), ("indexer_topk", sampled.indexer_topk)):
        if payload is not None and finish is not None:
            info[name] = base64.b64encode(payload).decode()
    return info


def generate_part(
    sampled: SampledReply,
    num_drawn: int,
    finish: dict[str, Any] | None,
    decode: Callable[[Sequence[int]], str],
    *,
    first: int = 0,
    has_spans: bool = False,
) -> dict[str, Any]:
    """A whole reply of `/generate`, or the event of a stream that has the tokens from number `first` on."""
    ids = list(sampled.ids[first:num_drawn])
    info = meta_info(sampled, num_drawn, finish, first=first, has_spans=has_spans)
    return {"text": decode(ids), "output_ids": ids, "meta_info": info}


def chat_reply(
    sampled: SampledReply,
    *,
    text: str,
    reasoning: str | None,
    tool_calls: Sequence[tuple[str, str, str]],
    finish: str,
    matched: int | str | None,
    model: str,
    token_text: Callable[[int], str],
    has_spans: bool = False,
) -> dict[str, Any]:
    """A reply of the chat route. `tool_calls` are `(id, name, arguments)`."""
    num_drawn = len(sampled.ids)
    if tool_calls and finish == "stop":
        finish = "tool_calls"
    info = meta_info(sampled, num_drawn, {"type": finish, "matched": matched}, has_spans=has_spans)
    calls = [
        {"id": id_, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (id_, name, arguments) in enumerate(tool_calls)
    ]
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": calls or None}
    logprobs = [
        {"token": token_text(id_), "bytes": list(token_text(id_).encode()), "logprob": logprob, "top_logprobs": []}
        for id_, logprob in zip(sampled.ids, sampled.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs},
        "finish_reason": finish,
        "matched_stop": matched,
        "meta_info": info,
    }
    return {
        "id": sampled.rid,
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": sampled.num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": sampled.num_prompt + num_drawn,
        },
        "metadata": {"weight_version": info["weight_version"]},
    }
