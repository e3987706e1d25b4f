"""A vLLM's routes for weights and pauses: requests to send, and answers to read. Pure.

Source: vLLM's `entrypoints/serve/dev` (rlhf, rpc and cache routers), present in a server with `VLLM_SERVER_DEV_MODE=1`;
its LoRAs change with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` (`entrypoints/serve/lora`).
It has no route to load a folder: its workers' own `reload_weights` does it, called through `/collective_rpc`.
"""

from collections.abc import Sequence

import msgspec

from stenograph.core.weights import (
    ContinueGeneration,
    FlushCache,
    LoraCommand,
    NameWeights,
    PauseGeneration,
    PauseMode,
    UnloadLora,
    UpdateWeights,
    WeightCommand,
)
from stenograph.engine.http.adapter import Call, ControlReply, read_control
from stenograph.engine.http.transport import HttpReply

INFO_PATH = "/weight_info"
_NO_ROUTE = b'{"detail":"Not Found"}'
_RESET = Call(path="/reset_prefix_cache", body=b"{}")


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
        case ContinueGeneration() | FlushCache():
            return (_RESET if isinstance(command, FlushCache) else Call(path="/resume", body=b"{}"),)
        case NameWeights(version=version):
            return (_named(version),)
        case _:
            return (_lora_call(command),)


def vllm_reply(command: WeightCommand, call: Call, http: HttpReply) -> ControlReply:
    """The answer to one of those requests."""
    told = read_control(call, http)
    if isinstance(command, LoraCommand) and http.body == _NO_ROUTE:
        return ControlReply(problem=f"{told.problem}; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
    return told


def _lora_call(command: LoraCommand) -> Call:
    if isinstance(command, UnloadLora):
        return Call(path="/v1/unload_lora_adapter", body=msgspec.json.encode({"lora_name": command.name}))
    told = {"lora_name": command.name, "lora_path": command.path, "load_inplace": True}
    return Call(path="/v1/load_lora_adapter", body=msgspec.json.encode(told))


def _named(version: str) -> Call:
    return Call(path="/update_weight_version", body=msgspec.json.encode({"new_version": version}))
