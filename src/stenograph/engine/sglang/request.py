"""The fields of a request to SGLang on any route: the prompt's ids, sampling, replay. Pure.

Owns SGLang's names common to its routes. Source: SGLang's `sampling/sampling_params.py`.
"""

from collections.abc import Iterator

import msgspec

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import InvalidRequest
from stenograph.core.logprobs import GREEDY_BELOW, is_truncated
from stenograph.core.routing import Routing
from stenograph.core.types import SamplingParams
from stenograph.engine.settings import ReplayKind

MAX_SUPPORT_TOP_K = 4096
"""SGLang reports the ids open to sampling up to this `top_k` (its `--sampling-mask-max-tokens`)."""


as_json = msgspec.json.encode
"""A value as JSON text."""


def sampling_fields(params: SamplingParams) -> dict[str, object]:
    """Every parameter by name: an engine's own defaults (some from its model's files) never apply.

    Raises InvalidRequest for an option SGLang does not apply as it is meant.
    """
    if params.min_tokens and params.stop:
        raise InvalidRequest(
            "SGLang ends at a stop string before min_tokens are sampled; send stop_token_ids instead of stop.",
            blame=Blame(RequestPart.SAMPLING, path=("min_tokens",)),
        )
    if params.ignore_eos and params.stop_token_ids:
        raise InvalidRequest(
            "SGLang does not look at stop_token_ids where ignore_eos is true; send one of them.",
            blame=Blame(RequestPart.SAMPLING, path=("stop_token_ids",)),
        )
    fields: dict[str, object] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
    }
    if params.stop:
        fields["stop"] = params.stop
    if params.stop_token_ids:
        fields["stop_token_ids"] = params.stop_token_ids
    if params.logit_bias:
        fields["logit_bias"] = {str(id_): bias for id_, bias in params.logit_bias}
    return fields


def salt_parts(salt: str | None) -> Iterator[bytes]:
    """The member to keep the cache apart by a salt, with a comma before it. Every route of SGLang takes this one."""
    if salt is not None:
        yield b',"extra_key":' + as_json(salt)


def policy_parts(policy: str | None) -> Iterator[bytes]:
    """The member with the LoRA that samples, with a comma before it. Both routes have it."""
    if policy is not None:
        yield b',"lora_path":' + as_json(policy)


def routing_parts(routing: Routing) -> Iterator[bytes]:
    """Members with the routing hints, each with a comma before it. Both routes have them under the same names.

    The rank goes under its older name too: versions before `routed_dp_rank` know no other, and leave out unknown ones
    in silence.
    """
    hints = {
        "priority": routing.priority,
        "routed_dp_rank": routing.dp_rank,
        "data_parallel_rank": routing.dp_rank,
        "disagg_prefill_dp_rank": routing.prefill_dp_rank,
        "bootstrap_host": routing.bootstrap_host,
        "bootstrap_port": routing.bootstrap_port,
        "bootstrap_room": routing.bootstrap_room,
    }
    for name, value in hints.items():
        if value is not None:
            yield b',"%b":%b' % (name.encode(), as_json(value))


def replay_parts(replay: ReplayKind, first_row: int) -> Iterator[bytes]:
    """Members to ask for replay payloads, each with a comma before it; routed experts from `first_row` on.

    SGLang takes a first row from 0 to the prompt's length; versions without the field send all rows.
    """
    if replay in (ReplayKind.ROUTED_EXPERTS, ReplayKind.ALL):
        yield b',"return_routed_experts":true'
        if first_row:
            yield b',"routed_experts_start_len":%d' % first_row
    if replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        yield b',"return_indexer_topk":true'


def tells_support(params: SamplingParams) -> bool:
    """Whether SGLang reports the ids open to sampling. It refuses to where nothing is cut off, also under a grammar."""
    return params.temperature >= GREEDY_BELOW and is_truncated(params)


def support_parts(params: SamplingParams) -> Iterator[bytes]:
    """The member to ask for supports, with a comma before it."""
    if tells_support(params):
        yield b',"return_sampling_mask":true'


def encode_close(session: str) -> bytes:
    """The body of the end of a session."""
    return b'{"session_id":' + as_json(session) + b"}"


def encode_abort(request_id: str) -> bytes:
    """The body of an abort."""
    return b'{"rid":' + as_json(request_id) + b"}"
