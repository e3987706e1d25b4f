"""Routing hints on their way in: the header with a rank, who may give hints, and whether the engine takes them.

A router or a trainer gives them. OpenAI's routes read SGLang's fields for them; the header goes with every dialect, as
it does with vLLM and SGLang.
"""

import re

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from starlette.types import Scope

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import CompletionRequest
from stenograph.core.errors import Forbidden, InvalidRequest
from stenograph.core.routing import Routing, RoutingHint
from stenograph.dialects.base import Decoded
from stenograph.engine.base import Capabilities
from stenograph.http.auth import Authenticator
from stenograph.http.wire import headers_of

RANK_HEADER = b"x-data-parallel-rank"
_RANK = re.compile(rb"[0-9]{1,9}")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_HINTS = {"dp_rank": RoutingHint.DP_RANK} | dict.fromkeys(
    ("prefill_dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"), RoutingHint.DISAGGREGATION
)
"""Fields of `Routing` refused by some engines, by kind."""
_TAKEN_BY = {
    RoutingHint.DP_RANK: "data-parallel rank: sglang, sglang-generate and vllm do",
    RoutingHint.DISAGGREGATION: "hints for prefilling apart: sglang and sglang-generate do",
}


def with_hints(decoded: Decoded, scope: Scope, authenticator: Authenticator, capabilities: Capabilities) -> Decoded:
    """A request with the hint of its header, recorded; the header's hint goes before its body's.

    Raises Unauthorized or Forbidden, where the server has keys and the request carries none of them, and
    InvalidRequest: a header other than a rank, a hint refused by the engine, one room for several prompts.
    """
    request, record = decoded
    routing, rank = request.routing or Routing(), _rank_of(headers_of(scope).get(RANK_HEADER))
    given = {name for name in _HINTS if getattr(routing, name) is not None}
    if given or rank is not None:
        _check_key(scope, authenticator)
    for name in _HINTS:
        if name in given and _HINTS[name] not in capabilities.hints:
            raise _not_taken(capabilities.engine, _HINTS[name], Blame(RequestPart.ROUTING, path=(name,)))
    if "bootstrap_room" in given and isinstance(request, CompletionRequest) and len(request.prompts) > 1:
        raise InvalidRequest(
            f"A bootstrap room is for one prompt, and there are {len(request.prompts)}: send each in a request.",
            blame=Blame(RequestPart.ROUTING, path=("bootstrap_room",)),
        )
    if rank is None:
        return decoded
    if RoutingHint.DP_RANK not in capabilities.hints:
        raise _not_taken(capabilities.engine, RoutingHint.DP_RANK, None)
    name, members = RANK_HEADER.decode(), _OBJECT.decode(record)
    recorded = {**_OBJECT.decode(members["recorded"]), name: rank}
    request = replace(request, routing=replace(routing, dp_rank=rank), recorded={**request.recorded, name: str(rank)})
    return request, msgspec.json.encode({**members, "recorded": recorded})


def _rank_of(value: bytes | None) -> int | None:
    if value is None:
        return None
    digits = value.strip(b" \t")
    if not _RANK.fullmatch(digits):
        shown = value[:40].decode("latin-1")
        raise InvalidRequest(f"The header X-data-parallel-rank must be a rank (0, 1, …), got {shown!r}.")
    return int(digits)


def _check_key(scope: Scope, authenticator: Authenticator) -> None:
    try:
        authenticator.check_key(scope)
    except Forbidden as error:
        raise Forbidden(
            "A session's token gives no routing hints (ranks, bootstrap_…): a router adds one of --api-key, as"
            " 'x-api-key' beside the agent's bearer."
        ) from error


def _not_taken(engine: str, hint: RoutingHint, blame: Blame | None) -> InvalidRequest:
    named = "" if blame is not None else " The header X-data-parallel-rank asks for it."
    return InvalidRequest(f"The engine {engine} takes no {_TAKEN_BY[hint]}.{named}", blame=blame)
