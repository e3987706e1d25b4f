"""An SGLang's routes for weights and pauses: what is sent, and what an answer says. Pure.

Source: SGLang's `entrypoints/http_server.py` and `managers/io_struct.py`. A failed update is a 400.
"""

from collections.abc import Sequence

import msgspec

from stenograph.core.weights import (
    ContinueGeneration,
    FlushCache,
    NameWeights,
    PauseGeneration,
    UpdateWeights,
    WeightCommand,
)
from stenograph.engine.http.adapter import Ask, Call

INFO_PATH = "/model_info"


class _SGLangInfo(msgspec.Struct):
    weight_version: str | int | None = None


_INFO = msgspec.json.Decoder(_SGLangInfo)


def sglang_calls(command: WeightCommand) -> Sequence[Call]:
    """The one request of a command. Running requests are aborted by this server, never by a default of SGLang's."""
    path, body = _request(command)
    return (Call(path=path, body=msgspec.json.encode(body)),)


def _request(command: WeightCommand) -> tuple[str, dict[str, object]]:
    match command:
        case UpdateWeights(path=path, version=version, flushes_cache=flushes, options=options):
            told = {"model_path": path, "weight_version": version, "flush_cache": flushes, "abort_all_requests": False}
            return "/update_weights_from_disk", {**told, **options}
        case PauseGeneration(mode=mode):
            return "/pause_generation", {"mode": mode}
        case ContinueGeneration():
            return "/continue_generation", {}
        case FlushCache():
            return "/flush_cache", {}
        case NameWeights(version=version):
            return "/update_weight_version", {"new_version": version, "abort_all_requests": False}


async def sglang_version(ask: Ask) -> str | None:
    """The name that an SGLang has for its weights; None where it does not say. Raises UpstreamError."""
    reply = await ask("GET", INFO_PATH)
    if reply.status != 200:
        return None
    try:
        version = _INFO.decode(reply.body).weight_version
    except msgspec.DecodeError:
        return None
    return None if version is None else str(version)
