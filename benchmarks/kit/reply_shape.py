"""The one reply that the engine stand-in gives, as bytes, but for the id and the prompt of its request. Pure.

Owns what a reply is made of: its size, and what most of it is. Wire shape: SGLang's `serving_chat.py`, as
`engine/sglang/chat_wire.py` reads it. Knows no socket.
"""

import random
import re
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pybase64

STOP_ID = 2
"""Ends the reply; `<|im_end|>` where a tokenizer has ChatML's control tokens first."""
FIRST_TEXT_ID = 3
RID = b'"bench-stand-in"'
"""The id of a reply, as JSON, to a request without one."""
_ID, _PROMPT, _TOTAL = b"\x00", b"\x01", b"\x02"
"""Stand where a request's own values will; JSON text has no such bytes."""


class ReplyShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reply of `num_tokens` tokens, with about `base64_bytes` characters of `routed_experts` if that is not 0.

    Rows are `[logprob, id, null]`. Ids are below `vocab_size`. The defaults make 4 KiB.
    """

    num_tokens: int = 101
    base64_bytes: int = 0
    content_bytes: int = 240
    vocab_size: int = 49152


def reply_content(shape: ReplyShape) -> str:
    """The assistant's one text."""
    text = "The answer is in the file that the tool has read, and it was changed by the last call. "
    return (text * (shape.content_bytes // len(text) + 1))[: shape.content_bytes].strip() or "ok"


def assistant_fragment(shape: ReplyShape) -> bytes:
    """The reply as the message that a client sends back, as JSON."""
    return msgspec.json.encode({"role": "assistant", "content": reply_content(shape)})


@dataclass(frozen=True, slots=True)
class ReplyTemplate:
    """A reply, cut where the values of a request stand: its id, the tokens of its prompt, and those of both."""

    pieces: tuple[bytes, ...]
    num_completion: int

    def filled(self, rid: bytes, num_prompt: int) -> list[bytes]:
        """The reply in pieces. Numbers are padded with spaces, so that all replies to ids of one length have one."""
        own = {_ID: rid, _PROMPT: b"%10d" % num_prompt, _TOTAL: b"%10d" % (num_prompt + self.num_completion)}
        return [own.get(piece, piece) for piece in self.pieces]


def reply_body(shape: ReplyShape, num_prompt: int = 1) -> bytes:
    """The body of the reply to a prompt of so many tokens; of one length, whatever their number."""
    return b"".join(chat_reply(shape).filled(RID, num_prompt))


def chat_reply(shape: ReplyShape) -> ReplyTemplate:
    """The reply to a chat. The same for the same shape."""
    meta = _meta_info(shape)
    if shape.base64_bytes:
        experts = np.frombuffer(random.Random(0).randbytes(max(3, shape.base64_bytes // 16 * 3)), np.uint8) % 128
        meta["routed_experts"] = pybase64.b64encode_as_string(experts.astype("<i4").tobytes())
    message = {"role": "assistant", "content": reply_content(shape), "reasoning_content": None, "tool_calls": None}
    choice: dict[str, object] = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": STOP_ID,
        "meta_info": meta,
    }
    usage = {"prompt_tokens": _raw(_PROMPT), "completion_tokens": shape.num_tokens, "total_tokens": _raw(_TOTAL)}
    whole = {
        "id": _raw(_ID),
        "object": "chat.completion",
        "created": 0,
        "model": "stand-in",
        "choices": [choice],
        "usage": usage,
        "metadata": {"weight_version": "default"},
    }
    return _template(shape, whole)


def native_reply(shape: ReplyShape) -> ReplyTemplate:
    """The same reply as the route that takes ids gives it."""
    meta = _meta_info(shape)
    rows: list[list[object]] = meta["output_token_logprobs"]
    ids = [row[1] for row in rows]
    return _template(shape, {"text": reply_content(shape), "output_ids": ids, "meta_info": meta})


def _raw(mark: bytes) -> msgspec.Raw:
    return msgspec.Raw(mark)


def _template(shape: ReplyShape, whole: object) -> ReplyTemplate:
    return ReplyTemplate(tuple(re.split(rb"([\x00-\x02])", msgspec.json.encode(whole))), shape.num_tokens)


def _meta_info(shape: ReplyShape) -> dict[str, Any]:
    rng = random.Random(0)
    # A float32 as Python writes it: some 18 digits. That is what an engine's tensors become.
    logprobs = array("f", (-3 * rng.random() for _ in range(shape.num_tokens)))
    ids = [rng.randrange(FIRST_TEXT_ID, shape.vocab_size) for _ in range(shape.num_tokens - 1)]
    rows = [[logprob, id_, None] for logprob, id_ in zip(logprobs, [*ids, STOP_ID], strict=True)]
    return {
        "id": _raw(_ID),
        "finish_reason": {"type": "stop", "matched": STOP_ID},
        "prompt_tokens": _raw(_PROMPT),
        "weight_version": "default",
        "completion_tokens": shape.num_tokens,
        "cached_tokens": 0,
        "output_token_logprobs": rows,
    }
