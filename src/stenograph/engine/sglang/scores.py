"""Scores of given tokens by SGLang's own route: a prompt's log-probabilities, with nothing sampled after it.

Its rows begin one token early, with an empty one: a token's row needs the logits of the one before. Source: SGLang's
`managers/scheduler_components/logprob_result_processor.py`, version 0.5.23.
"""

import msgspec

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.ids_json import encode_ids
from stenograph.core.types import TopLogprob
from stenograph.engine.http.adapter import Ask, EngineAdapter, in_our_shape
from stenograph.engine.rows import META_LAWS, check_request, decoded
from stenograph.engine.scoring import ScoreRequest, Scores
from stenograph.engine.sglang.generate_wire import too_long

_Row = list[float | int | str | None]
"""A log-probability, an id, and a text or nothing."""


class _ScoredMeta(msgspec.Struct):
    id: str
    input_token_logprobs: list[_Row]
    input_top_logprobs: list[list[_Row] | None] | None = None
    weight_version: str | int | None = None


class _ScoredPart(msgspec.Struct):
    meta_info: _ScoredMeta


_SCORED_PART = msgspec.json.Decoder(_ScoredPart)


def encode_given(request: ScoreRequest) -> bytes:
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
    return b"".join((msgspec.json.encode(told)[:-1], b',"input_ids":[', encode_ids(request.ids), b"]}"))


def decode_given(body: bytes, request: ScoreRequest) -> Scores:
    """Read the reply. Raises UpstreamInvalid, naming the broken law."""
    meta = decoded(_SCORED_PART, body, META_LAWS).meta_info
    check_request(meta.id, request.request_id)
    ids = request.ids[request.start :]
    rows = meta.input_token_logprobs[-len(ids) :]
    pairs = [_pair(row) for row in rows]
    if [pair.id for pair in pairs] != list(ids):
        raise UpstreamInvalid("has_logprobs", f"{len(ids)} tokens were to be scored, and others were")
    top = None
    if request.num_top:
        told = (meta.input_top_logprobs or [])[-len(ids) :]
        top = tuple(tuple(map(_pair, row or ())) for row in told)
    version = None if meta.weight_version is None else str(meta.weight_version)
    return request.answered([pair.logprob for pair in pairs], top, version=version)


def _pair(row: _Row) -> TopLogprob:
    match row:
        case [float() | int() as logprob, int() as id_, *_]:
            return TopLogprob(id=id_, logprob=float(logprob))
        case _:
            raise UpstreamInvalid("has_logprobs", f"a token is not scored: {row!r}"[:120])


async def scored(_adapter: EngineAdapter, request: ScoreRequest, ask: Ask) -> Scores:
    """Ask a server. Raises UpstreamError, and ContextLengthExceeded."""
    http = await ask("POST", "/generate", encode_given(request))
    if http.status != 200:
        raise too_long(http) or in_our_shape(http)
    return decode_given(http.body, request)
