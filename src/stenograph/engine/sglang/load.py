"""An SGLang's word about its memory and queue: `GET /v1/loads`, one entry for each data-parallel rank.

Source: SGLang's `managers/io_struct.py` (`GetLoadsReqOutput`); recorded of 0.5.23. What is only cached is not in
`token_usage`. Older ones have no such route: they answer 404, which is an error here.
"""

from collections.abc import Sequence

import msgspec

from stenograph.core.errors import UpstreamInvalid
from stenograph.engine.base import EngineLoad
from stenograph.engine.http.adapter import Ask, passed_through
from stenograph.engine.rows import decoded, laws

LOADS_PATH = "/v1/loads"
MAX_LOADS_BYTES = 2**20
"""A rank has 900 bytes. So many are decoded in less than 5 ms."""


class _Rank(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float
    max_total_num_tokens: int
    max_running_requests: int | None = None


class _Loads(msgspec.Struct):
    loads: list[_Rank]


_LOADS = msgspec.json.Decoder(_Loads)
_LAWS = laws()


async def sglang_load(ask: Ask) -> EngineLoad:
    """The load of all ranks together. Raises UpstreamError."""
    reply = await ask("GET", LOADS_PATH)
    if reply.status != 200:
        raise passed_through(reply)
    if len(reply.body) > MAX_LOADS_BYTES:
        raise UpstreamInvalid("shape", f"{LOADS_PATH}: {len(reply.body)} bytes, at most {MAX_LOADS_BYTES} are read")
    try:
        return _joined(decoded(_LOADS, reply.body, _LAWS).loads)
    except (ValueError, OverflowError) as error:
        raise UpstreamInvalid("shape", f"{LOADS_PATH}: {error}") from error


def _joined(ranks: Sequence[_Rank]) -> EngineLoad:
    """Raises ValueError for numbers that cannot be."""
    kv_tokens = sum(one.max_total_num_tokens for one in ranks)
    held = sum(one.token_usage * one.max_total_num_tokens for one in ranks)
    batches = [one.max_running_requests for one in ranks if one.max_running_requests is not None]
    return EngineLoad(
        kv_usage=min(held / kv_tokens, 1.0) if kv_tokens > 0 else 0.0,
        num_running=sum(one.num_running_reqs for one in ranks),
        num_waiting=sum(one.num_waiting_reqs for one in ranks),
        kv_tokens=kv_tokens if kv_tokens > 0 else None,
        max_running=sum(batches) if len(batches) == len(ranks) else None,
    )
