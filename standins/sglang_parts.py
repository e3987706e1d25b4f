"""SGLang's account of a generation, for its stand-in: the `meta_info` of every route, and the events of its streams.

Its keys and their types are those that a real one was recorded with (tests/service/test_sglang_stand_in.py).
"""

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from standins.planned_server import Logprobs
from standins.weight_versions import version_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """Everything that was drawn for one request. `tops` are the alternatives at each position, empty for none.

    `versions` are those of the weights that drew each token. `num_image` tokens of the prompt stand for images.
    `supports` are the ids that could be drawn beside each, if they were asked for.
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
    num_image: int = 0


def finish_reason(finish: str, matched: int | str | None, num_drawn: int) -> dict[str, Any]:
    """The finish reason, in SGLang's words."""
    match finish:
        case "length":
            return {"type": "length", "length": num_drawn}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case _:
            return {"type": finish, "matched": matched}


_BEFORE = {
    "num_retractions": 0,
    "storage_prefetch_wait": 0.0,
    "storage_staging_wait": 0.0,
    "forward_entry_time": 1.25,
    "prefill_finished_time": 1.5,
    "queue_time": 0.25,
    "input_token_logprobs": list[object](),
}
_AT_END = {
    "e2e_latency": 1.0,
    "request_received_ts": 1.0,
    "first_token_latency": 0.5,
    "api_server_dispatch_finish_ts": 1.0,
    "request_finished_ts": 2.0,
    "decode_throughput": 2.0,
    "response_sent_to_client_ts": 2.0,
}
"""Members that a real one measures, with made-up values."""


def meta_info(
    sampled: SampledReply,
    num_drawn: int,
    finish: dict[str, Any] | None,
    *,
    first: int = 0,
    has_spans: bool = False,
    token_text: Callable[[int], str | None] = lambda _: None,
) -> dict[str, Any]:
    """The account after `num_drawn` sampled tokens; the lists begin with the token number `first`.

    Rows have their token's text on the chat route alone, and spans of weights come with the end.
    """
    version = sampled.versions[num_drawn - 1] if num_drawn else next(iter(sampled.versions), "default")

    def rows(pairs: Iterable[tuple[int, float]]) -> Sequence[Sequence[object]]:
        return [[logprob, id_, token_text(id_)][: 3 if sampled.rows_have_text else 2] for id_, logprob in pairs]

    info: dict[str, Any] = {
        "id": sampled.rid,
        "finish_reason": finish,
        "prompt_tokens": sampled.num_prompt,
        "weight_version": version,
        **_BEFORE,
        "output_token_logprobs": rows(
            zip(sampled.ids[first:num_drawn], sampled.logprobs[first:num_drawn], strict=True)
        ),
        "output_token_logprobs_length": num_drawn,
    }
    if sampled.tops:
        info["input_top_logprobs"] = []
        info["output_top_logprobs"] = [rows(row) for row in sampled.tops[first:num_drawn]]
    if sampled.supports is not None:
        told = sampled.supports[first:num_drawn]
        info["output_token_sampling_mask"] = told
        info["output_token_sampling_logprobs"] = [-math.log(max(1, len(row))) for row in told]
        info["output_token_sampling_mask_length"] = num_drawn
    num_cached = sampled.num_cached
    info |= {"reasoning_tokens": 0, "completion_tokens": num_drawn, "cached_tokens": num_cached, "dp_rank": None}
    info["cached_tokens_details"] = {"device": num_cached, "host": 0} if num_cached else None
    if sampled.num_image:
        info["image_tokens"] = sampled.num_image
    if finish is None:
        return info
    if has_spans:
        info["weight_versions"] = version_spans(sampled.versions[:num_drawn])
    for name, payload in (("routed_experts", sampled.routed_experts), ("indexer_topk", sampled.indexer_topk)):
        if payload is not None:
            info[name] = base64.b64encode(payload).decode()
    return info | _AT_END


def _info_of_queued(sampled: SampledReply, *, has_spans: bool) -> dict[str, Any]:
    """The account of a request that was aborted in the queue: not even its prompt is counted."""
    version = next(iter(sampled.versions), "default")
    info: dict[str, Any] = {
        "id": sampled.rid,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": version,
        **dict.fromkeys(("e2e_latency", "response_sent_to_client_ts"), 2.0),
        **{name: list[object]() for name in ("input_token_logprobs", "output_token_logprobs")},
        **dict.fromkeys(("output_token_logprobs_length", "completion_tokens"), 0),
    }
    return info | ({"weight_versions": [{"version": version, "start": 0, "end": 0}]} if has_spans else {})


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
    if not num_drawn and finish is not None and finish["type"] == "abort":
        info = _info_of_queued(sampled, has_spans=has_spans)
    else:
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
    told = finish_reason(finish, matched, num_drawn)
    if tool_calls and finish == "stop":
        told = {"type": "tool_calls", "matched": None}
    info = meta_info(sampled, num_drawn, told, has_spans=has_spans, token_text=token_text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": reasoning}
    if tool_calls:
        message["tool_calls"] = [
            {"id": id_, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (id_, name, arguments) in enumerate(tool_calls)
        ]

    def shown(id_: int, logprob: float) -> dict[str, Any]:
        return {"token": token_text(id_), "bytes": list(token_text(id_).encode()), "logprob": logprob}

    tops = sampled.tops or [()] * num_drawn
    logprobs = [
        shown(id_, logprob) | {"top_logprobs": [shown(*top) for top in row]}
        for id_, logprob, row in zip(sampled.ids, sampled.logprobs, tops, strict=True)
    ]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs},
        "finish_reason": told["type"],
        "matched_stop": told.get("matched"),
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
            "total_tokens": sampled.num_prompt + num_drawn,
            "completion_tokens": num_drawn,
            "prompt_tokens_details": {"cached_tokens": sampled.num_cached},
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        },
        "metadata": {name: info[name] for name in ("weight_version", "weight_versions") if name in info},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedStep:
    """Tokens `[num_sent, num_drawn)` of a streamed chat, and the text that they add. `calls` come with the last."""

    num_sent: int
    num_drawn: int
    text: str
    reasoning: str | None
    calls: Sequence[tuple[str, str, str]]
    finish: str | None
    matched: int | str | None


def chat_events(
    sampled: SampledReply,
    step: StreamedStep,
    *,
    model: str,
    token_text: Callable[[int], str],
    has_parser: bool,
    reports_cache: bool,
    asked: dict[str, Any],
) -> list[dict[str, Any]]:
    """The events of one step of a streamed chat, in their order; after the last, the finish, the ids and the usage.

    A step's log-probabilities are in its first event with text; where calls are looked for, and in a step without text,
    they come alone, with a parser, and else not at all.
    """

    def event(**changes: Any) -> dict[str, Any]:
        base = {"id": sampled.rid, "object": "chat.completion.chunk", "created": 0, "model": model}
        return {**base, "choices": [], **changes}

    def choice(delta: dict[str, Any], **changes: Any) -> dict[str, Any]:
        shown = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None, **changes}
        return event(choices=[shown])

    events: list[dict[str, Any]] = []
    if not step.num_sent:
        events.append(choice({"reasoning_content": None, "role": "assistant", "content": ""}))
    logprobs = _step_logprobs(sampled, step, token_text)
    if step.reasoning:
        events.append(choice({"reasoning_content": step.reasoning}, logprobs=logprobs))
        logprobs = None
    if step.text and has_parser and asked.get("tools"):
        events.append(choice({"role": None, "content": step.text, "reasoning_content": None}))
    elif step.text:
        events.append(choice({"reasoning_content": None, "content": step.text}, logprobs=logprobs))
        logprobs = None
    events += [choice({"role": None, "content": None, "tool_calls": [piece]}) for piece in _call_pieces(step.calls)]
    if logprobs is not None and has_parser:
        events.append(choice({"reasoning_content": None}, logprobs=logprobs))
    if step.finish is None:
        return events
    finish = "tool_calls" if step.calls and step.finish == "stop" else step.finish
    matched = step.matched if step.finish == "stop" else None
    events.append(choice({"reasoning_content": None}, finish_reason=finish, matched_stop=matched))
    extension: dict[str, Any] = {}
    if asked.get("return_cached_tokens_details") and sampled.num_cached:
        extension["cached_tokens_details"] = {"device": sampled.num_cached, "host": 0}
    if asked.get("return_input_ids_in_sglext"):
        extension["input_ids"] = asked["input_ids"]
    if asked.get("return_output_ids_in_sglext"):
        extension["output_ids"] = [list(sampled.ids[: step.num_drawn])]
    if extension:
        events.append(event(usage=None, sglext=extension))
    if asked.get("stream_options", {}).get("include_usage"):
        counts: dict[str, Any] = {
            "prompt_tokens": sampled.num_prompt,
            "total_tokens": sampled.num_prompt + step.num_drawn,
            "completion_tokens": step.num_drawn,
            "prompt_tokens_details": {"cached_tokens": sampled.num_cached} if reports_cache else None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }
        events.append(event(usage=counts))
    return events


def _step_logprobs(sampled: SampledReply, step: StreamedStep, token_text: Callable[[int], str]) -> Any:
    """The log-probabilities of a step's tokens, which have no ids; None where it has none."""
    told = [
        {"token": token_text(id_), "bytes": list(token_text(id_).encode()), "logprob": logprob, "top_logprobs": []}
        for id_, logprob in zip(
            sampled.ids[step.num_sent : step.num_drawn], sampled.logprobs[step.num_sent : step.num_drawn], strict=True
        )
    ]
    return {"content": told} if told else None


def _call_pieces(calls: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Each call as its name, then its arguments in two pieces."""
    pieces: list[dict[str, Any]] = []
    for index, (id_, name, arguments) in enumerate(calls):
        middle = len(arguments) // 2
        for at, part in enumerate(("", arguments[:middle], arguments[middle:])):
            told = {"name": None if at else name, "arguments": part}
            pieces.append({"id": None if at else id_, "index": index, "type": "function", "function": told})
    return pieces
