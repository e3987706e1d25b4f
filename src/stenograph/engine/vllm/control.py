"""A vLLM's routes for weights and pauses: requests to send, and answers to read. Pure.

Source: vLLM's `entrypoints/serve/dev` (rlhf, rpc and cache routers), present in a server with `VLLM_SERVER_DEV_MODE=1`.
It has no route to load a folder: its workers' own `reload_weights` does it, called through `/collective_rpc`.
"""

from collections.abc import Sequence

import msgspec

from stenograph.core.weights import (
    ContinueGeneration,
    FlushCache,
    NameWeights,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
    WeightCommand,
)
from stenograph.engine.http.adapter import Ask, Call

INFO_PATH = "/weight_info"
_RESET = Call(path="/reset_prefix_cache", body=b"{}")


class _VLLMInfo(msgspec.Struct):
    weight_version: str | None = None


_INFO = msgspec.json.Decoder(_VLLMInfo)


def vllm_calls(command: WeightCommand) -> Sequence[Call] | str:
    """The requests of a command, in order; a text says why vLLM does not do it.

    vLLM's `keep` freezes running generations and keeps their keys and values: it stands for both modes without an
    abort.
    """
    match command:
        case UpdateWeights(options=options) if options:
            return f"vLLM does not know {', '.join(sorted(options))}"
        case UpdateWeights(path=path, version=version, flushes_cache=flushes):
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            loaded = Call(path="/collective_rpc", body=msgspec.json.encode(reload))
            return (loaded, *((_RESET,) if flushes else ()), _named(version))
        case PauseGeneration(mode=mode):
            how = "abort" if mode is PauseMode.ABORT else "keep"
            return (Call(path=f"/pause?mode={how}", body=b"{}"),)
        case ContinueGeneration():
            return (Call(path="/resume", body=b"{}"),)
        case FlushCache():
            return (_RESET,)
        case NameWeights(version=version):
            return (_named(version),)


def _named(version: str) -> Call:
    return Call(path="/update_weight_version", body=msgspec.json.encode({"new_version": version}))


async def vllm_version(ask: Ask) -> str | None:
    """A vLLM's name for its weights; None where it has no such route. Raises UpstreamError."""
    reply = await ask("GET", INFO_PATH)
    if reply.status != 200:
        return None
    try:
        return _INFO.decode(reply.body).weight_version
    except msgspec.DecodeError:
        return None
