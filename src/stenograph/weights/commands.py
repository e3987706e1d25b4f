"""The bodies of the weight-sync routes, in SGLang's shapes. Pure.

Fields are those of SGLang's `managers/io_struct.py`. Fields of the engine's own are passed on to an SGLang, and refused
by other engines; a neutral value of any field is the same as none.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from stenograph.core.errors import InvalidRequest
from stenograph.core.weights import PauseMode
from stenograph.dialects.common.json_bodies import decode_json
from stenograph.dialects.common.pointers import shown

VersionName = Annotated[str, Meta(min_length=1, max_length=256)]
_NEUTRAL = {"load_format": "auto", "torch_empty_cache": False, "recapture_cuda_graph": False, "token_step": 0}


class UpdateWeightsFromDisk(msgspec.Struct, forbid_unknown_fields=True):
    """A folder with weights, or a GGUF file, below `--weights-dir`. `null` means absent.

    Without `weight_version` the name is the next after the one that holds: `3` after `2`, `run+1` after `run`.
    `abort_all_requests` ends running turns with what they have sampled. `load_format`, `torch_empty_cache`,
    `recapture_cuda_graph` and `token_step` are SGLang's own; `is_async` and `keep_pause` must be false.
    """

    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    weight_version: VersionName | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    load_format: Annotated[str, Meta(max_length=256)] | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    is_async: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None
    keep_pause: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None

    def engine_options(self) -> dict[str, object]:
        """The fields that are for the engine alone, without neutral ones."""
        told = {name: getattr(self, name) for name in _NEUTRAL}
        return {name: value for name, value in told.items() if value is not None and value != _NEUTRAL[name]}


class PauseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A pause: running turns end (`abort`, the default), or stand still (`retract`, `in_place`)."""

    mode: Annotated[str, Meta(extra_json_schema={"enum": [mode.value for mode in PauseMode]})] | None = None


class UpdateWeightVersion(msgspec.Struct, forbid_unknown_fields=True):
    """The name of weights that were sent to the engines by other ways. `abort_all_requests` ends running turns."""

    new_version: VersionName
    abort_all_requests: bool | None = None


LoraName = Annotated[str, Meta(min_length=1, max_length=512)]


class LoadLoraAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """A folder with a LoRA, below `--weights-dir`, and the name by which sessions have it as their `policy`.

    One of that name is replaced. Without `weight_version` the name of its version is the next after its last one, at
    first `1`.
    """

    lora_name: LoraName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    weight_version: VersionName | None = None


class UnloadLoraAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """A LoRA to forget. Turns of its sessions are then 503."""

    lora_name: LoraName


_LOAD_LORA = msgspec.json.Decoder(LoadLoraAdapter)
_UNLOAD_LORA = msgspec.json.Decoder(UnloadLoraAdapter)
_UPDATE = msgspec.json.Decoder(UpdateWeightsFromDisk)
_PAUSE = msgspec.json.Decoder(PauseRequest)
_VERSION = msgspec.json.Decoder(UpdateWeightVersion)


def decode_update(body: bytes) -> UpdateWeightsFromDisk:
    """Read the body of `POST /update_weights_from_disk`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _UPDATE, known=UpdateWeightsFromDisk.__struct_fields__)
    for name in ("is_async", "keep_pause"):
        if getattr(wire, name):
            raise InvalidRequest(
                f"{name} must be false: the answer comes when all engines have the weights, and a pause lasts until"
                " POST /continue_generation.",
                param=f"/{name}",
            )
    return wire


def decode_pause(body: bytes) -> PauseMode:
    """Read the optional body of `POST /pause_generation`. Raises InvalidJson or InvalidRequest."""
    mode = decode_json(body, _PAUSE, known=PauseRequest.__struct_fields__).mode if body else None
    if mode is not None and mode not in tuple(PauseMode):
        raise InvalidRequest(f"mode must be one of {', '.join(PauseMode)}, got {shown(mode)}.", param="/mode")
    return PauseMode.ABORT if mode is None else PauseMode(mode)


def decode_version(body: bytes) -> UpdateWeightVersion:
    """Read the body of `POST /update_weight_version`. Raises InvalidJson or InvalidRequest."""
    return decode_json(body, _VERSION, known=UpdateWeightVersion.__struct_fields__)


def decode_load_lora(body: bytes) -> LoadLoraAdapter:
    """Read the body of `POST /load_lora_adapter`. Raises InvalidJson or InvalidRequest."""
    return decode_json(body, _LOAD_LORA, known=LoadLoraAdapter.__struct_fields__)


def decode_unload_lora(body: bytes) -> UnloadLoraAdapter:
    """Read the body of `POST /unload_lora_adapter`. Raises InvalidJson or InvalidRequest."""
    return decode_json(body, _UNLOAD_LORA, known=UnloadLoraAdapter.__struct_fields__)
