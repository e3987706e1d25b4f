"""Scores of given tokens by SGLang's own route: a prompt's log-probabilities, with nothing sampled after it.

Its rows begin one token early, with an empty one: a token's row needs the logits of the one before. Source: SGLang's
`managers/scheduler_components/logprob_result_processor.py`, version 0.5.23.
"""

from array import array
from collections.abc import Generator, Sequence

import msgspec

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.ids_json import encode_ids
from stenograph.engine.http.adapter import Ask, in_our_shape
from stenograph.engine.rows import META_LAWS, TopRow, check_request, decoded
from stenograph.engine.scoring import ENTRIES_AT_ONCE, Alternatives, ScoreRequest, Scores
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.sglang.generate_wire import too_long
from stenograph.offload.in_pieces import in_pieces


class _ScoredMeta(msgspec.Struct):
    id: str
    input_token_logprobs: list[msgspec.Raw]
    input_top_logprobs: list[msgspec.Raw] | None = None
    weight_version: str | int | None = None


class _ScoredPart(msgspec.Struct):
    meta_info: _ScoredMeta


_SCORED_PART = msgspec.json.Decoder(_ScoredPart)
_ROWS = msgspec.json.Decoder(list[TopRow])
_TOPS = msgspec.json.Decoder(list[list[TopRow] | None])


def encode_given(request: ScoreRequest, *, priority: int | None) -> bytes:
    """The body to ask for the scores of given ids."""
    told: dict[str, object] = {
        "rid": request.request_id,
        "stream": False,
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "logprob_start_len": request.start - 1,
        "top_logprobs_num": request.num_top,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
    }
    if request.policy is not None:
        told["lora_path"] = request.policy
    if priority is not None:
        told["priority"] = priority
    return b"".join((msgspec.json.encode(told)[:-1], b',"input_ids":[', encode_ids(request.ids), b"]}"))


def decode_given(body: bytes, request: ScoreRequest) -> Generator[None, None, Scores]:
    """Read the reply in pieces, to be made in an event-loop iteration each. Raises UpstreamInvalid, naming the broken
    law."""
    meta = decoded(_SCORED_PART, body, META_LAWS, in_parts=True).meta_info
    check_request(meta.id, request.request_id)
    ids, logprobs, top = request.ids[request.start :], array("d"), Alternatives()
    rows, tops = meta.input_token_logprobs[-len(ids) :], (meta.input_top_logprobs or [])[-len(ids) :]
    if len(rows) != len(ids) or (request.num_top and len(tops) != len(ids)):
        raise UpstreamInvalid("has_logprobs", f"{len(ids)} tokens were to be scored, and {len(rows)} were")
    num_rows = ENTRIES_AT_ONCE // (1 + request.num_top)
    for start in range(0, len(ids), num_rows):
        span = slice(start, start + num_rows)
        read = decoded(_ROWS, _list_of(rows[span]), META_LAWS)
        pairs = _pairs(read)
        if [id_ for id_, _ in pairs] != ids[span].tolist():
            raise UpstreamInvalid("has_logprobs", f"{len(ids)} tokens were to be scored, and others were")
        logprobs.extend([logprob for _, logprob in pairs])
        if request.num_top:
            for row in decoded(_TOPS, _list_of(tops[span]), META_LAWS):
                top.add(_pairs(row or ()), request.num_top)
        yield
    version = None if meta.weight_version is None else str(meta.weight_version)
    return request.answered(logprobs, top, version=version)


def _list_of(values: Sequence[msgspec.Raw]) -> bytes:
    return b"[" + b",".join(values) + b"]"


def _pairs(rows: Sequence[TopRow]) -> list[tuple[int, float]]:
    if unscored := [row.id for row in rows if row.logprob is None]:
        raise UpstreamInvalid("has_logprobs", f"the token {unscored[0]} is not scored")
    return [(row.id, row.logprob or 0.0) for row in rows]


async def scored(adapter: SGLangGenerate, request: ScoreRequest, ask: Ask) -> Scores:
    """Ask a server. Raises UpstreamError, and ContextLengthExceeded."""
    http = await ask("POST", "/generate", encode_given(request, priority=adapter.last_priority))
    if http.status != 200:
        raise too_long(http) or in_our_shape(http)
    return await in_pieces(decode_given(http.body, request))
