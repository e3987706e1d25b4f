"""The one reply that the engine stand-in gives, as bytes, but for the count of its prompt. Pure.

Owns what a reply is made of: its size, and what most of it is. Wire shape: SGLang's `serving_chat.py`, as
`engine/sglang/chat_wire.py` reads it. Knows no socket.
"""

import random
from array import array
from typing import Any

import msgspec

STOP_ID = 2
"""Ends the reply; `<|im_end|>` where a tokenizer has ChatML's control tokens first."""
FIRST_TEXT_ID = 3
_CUT = msgspec.Raw(b"\x00")
"""Stands where a number will; JSON text has no such byte."""


_NAME = "bench-stand-in"
RID = b'"bench-stand-in"'
"""The id of a reply, as JSON, where the stand-in puts that of the request."""


class ReplyShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reply of `num_tokens` tokens, with `base64_bytes` characters of `routed_experts` if that is not 0.

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


def reply_body(shape: ReplyShape, num_prompt: int = 1) -> bytes:
    """The body of the reply to a prompt of so many tokens; of one length, whatever their number."""
    return b"".join(fill(reply_parts(shape), shape, num_prompt))


def fill(parts: tuple[bytes, bytes, bytes, bytes], shape: ReplyShape, num_prompt: int) -> list[bytes]:
    """Put the counts between the parts. Numbers are padded with spaces, so that all replies have one length."""
    count, total = b"%10d" % num_prompt, b"%10d" % (num_prompt + shape.num_tokens)
    first, second, third, last = parts
    return [first, count, second, count, third, total, last]


def reply_parts(shape: ReplyShape) -> tuple[bytes, bytes, bytes, bytes]:
    """The reply, cut where the prompt's tokens are counted (twice), and where all are. The same for the same shape."""
    meta, rng = _meta_info(shape), random.Random(0)
    if shape.base64_bytes:
        meta["routed_experts"] = _base64_int32(rng, shape.base64_bytes)
    choice: dict[str, object] = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": reply_content(shape),
            "reasoning_content": None,
            "tool_calls": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": STOP_ID,
        "meta_info": meta,
    }
    usage = {"prompt_tokens": _CUT, "completion_tokens": shape.num_tokens, "total_tokens": _CUT}
    whole = msgspec.json.encode(
        {
            "id": _NAME,
            "object": "chat.completion",
            "created": 0,
            "model": "stand-in",
            "choices": [choice],
            "usage": usage,
            "metadata": {"weight_version": "default"},
        }
    )
    first, second, third, last = whole.split(bytes(_CUT))
    return first, second, third, last


def native_parts(shape: ReplyShape) -> tuple[bytes, bytes]:
    """The same reply as the route that takes ids gives it, cut where the prompt's tokens are counted."""
    meta = _meta_info(shape)
    rows: list[list[object]] = meta["output_token_logprobs"]
    ids = [row[1] for row in rows]
    first, last = msgspec.json.encode({"text": reply_content(shape), "output_ids": ids, "meta_info": meta}).split(
        bytes(_CUT)
    )
    return first, last


def _meta_info(shape: ReplyShape) -> dict[str, Any]:
    rng = random.Random(0)
    # A float32 as Python writes it: some 18 digits. That is what an engine's tensors become.
    logprobs = array("f", (-3 * rng.random() for _ in range(shape.num_tokens)))
    ids = [rng.randrange(FIRST_TEXT_ID, shape.vocab_size) for _ in range(shape.num_tokens - 1)]
    rows = [[logprob, id_, None] for logprob, id_ in zip(logprobs, [*ids, STOP_ID], strict=True)]
    return {
        "id": _NAME,
        "finish_reason": {"type": "stop", "matched": STOP_ID},
        "prompt_tokens": _CUT,
        "weight_version": "default",
        "completion_tokens": shape.num_tokens,
        "cached_tokens": 0,
        "output_token_logprobs": rows,
    }


def _base64_int32(rng: random.Random, num_chars: int) -> str:
    """Base64 of whole int32s, about `num_chars` characters."""
    text: str = msgspec.json.decode(msgspec.json.encode(rng.randbytes(max(12, num_chars // 16 * 12))))
    return text
