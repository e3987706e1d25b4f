"""An SGLang's routes for weights and pauses: requests to send, and answers to read. Pure.

A failed update is a 400. So is one taken while generations stood still with their keys and values, if the cache was to
be emptied: SGLang then has the new weights and keeps their old name. Sources: SGLang's `entrypoints/http_server.py`,
`managers/io_struct.py`, `managers/scheduler_components/weight_updater.py`; recorded of 0.5.23.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from stenograph.core.weights import (
    ContinueGeneration,
    FlushCache,
    LoadLora,
    LoraCommand,
    NameWeights,
    PauseGeneration,
    UnloadLora,
    UpdateWeights,
    WeightCommand,
)
from stenograph.engine.http.adapter import Call, ControlReply, read_control
from stenograph.engine.http.transport import HttpReply

INFO_PATH = "/model_info"
UPDATE_PATH = "/update_weights_from_disk"
_TAKEN_UNFLUSHED = b"Weights were updated, but the cache was not flushed"
_UNFLUSHED = (
    "its cache still has keys and values of the weights before, because generations stand still with theirs; call"
    " /flush_cache once they have ended"
)
_FLUSH = Call(path="/flush_cache", body=b"{}", note_if_refused=_UNFLUSHED)


def sglang_calls(command: WeightCommand) -> Sequence[Call]:
    """The requests of a command, in order. Running requests are aborted by this server, never by a default of SGLang's.

    Where generations stand still with their keys and values, the cache is emptied apart, if it can be.
    """
    if isinstance(command, LoadLora) and command.replaces:  # it takes no second one of a name
        return (*sglang_calls(UnloadLora(name=command.name)), *sglang_calls(replace(command, replaces=False)))
    path, body = _request(command)
    calls = (Call(path=path, body=msgspec.json.encode(body)),)
    if isinstance(command, UpdateWeights) and command.flushes_cache and command.stands_in_place:
        return (*calls, _FLUSH)
    return calls


def sglang_reply(command: WeightCommand, call: Call, http: HttpReply) -> ControlReply:
    """The answer to one of those requests. An update taken without its cache emptied is named, and the cache emptied
    after all, where nothing was in its way but turns just ended."""
    if isinstance(command, UpdateWeights) and call.path == UPDATE_PATH and _TAKEN_UNFLUSHED in http.body:
        return ControlReply(then=(*sglang_calls(NameWeights(version=command.version)), _FLUSH))
    return read_control(call, http)


def _request(command: WeightCommand) -> tuple[str, dict[str, object]]:
    match command:
        case UpdateWeights(path=path, version=version, options=options):
            flushes = command.flushes_cache and not command.stands_in_place
            told = {"model_path": path, "weight_version": version, "flush_cache": flushes, "abort_all_requests": False}
            return UPDATE_PATH, {**told, **options}
        case PauseGeneration(mode=mode):
            return "/pause_generation", {"mode": mode}
        case ContinueGeneration():
            return "/continue_generation", {}
        case FlushCache():
            return "/flush_cache", {}
        case NameWeights(version=version):
            return "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        case LoadLora() | UnloadLora():
            return _lora_request(command)


def _lora_request(command: LoraCommand) -> tuple[str, dict[str, object]]:
    match command:
        case LoadLora(name=name, path=path):
            return "/load_lora_adapter", {"lora_name": name, "lora_path": path}
        case UnloadLora(name=name):
            return "/unload_lora_adapter", {"lora_name": name}
