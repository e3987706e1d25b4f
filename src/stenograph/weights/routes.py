"""The routes for a trainer to bring new weights, in SGLang's shapes. All but `GET /model_info` are an
administrator's: a chat client may not change the policy.

Owns the folder of permitted weights. weights/sync.py carries out the commands.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import Forbidden
from stenograph.core.json_types import Count
from stenograph.core.weights import LoadLora, UnloadLora, UpdateWeights
from stenograph.dialects.sessions import Nothing, decode_nothing
from stenograph.http.responses import json_response
from stenograph.http.route import Needs, Who, route
from stenograph.http.wire import read_json
from stenograph.weights.commands import (
    LoadLoraAdapter,
    PauseRequest,
    UnloadLoraAdapter,
    UpdateWeightsFromDisk,
    UpdateWeightVersion,
    decode_load_lora,
    decode_pause,
    decode_unload_lora,
    decode_update,
    decode_version,
)
from stenograph.weights.sync import SyncResult, WeightSync, next_version


class WeightsUpdated(TypedDict):
    """The result of an update of weights. Where `success` is false the status is 400, and `message` names the engines
    that did not take it."""

    success: bool
    message: str
    num_paused_requests: Count


class VersionUpdated(TypedDict):
    """The result of naming the weights."""

    success: bool
    message: str
    new_version: str


class GenerationState(TypedDict):
    """The result of a pause, or of its end. An `error` has status 400."""

    status: Literal["ok", "error"]
    message: str


class LoraChanged(TypedDict):
    """The result of a change of LoRAs. `loaded_adapters` are folders by name, as the engines list them now;
    `weight_version` names the version of the one that was loaded. Where `success` is false the status is 400, and
    `error_message` names the engines that did not do it."""

    success: bool
    error_message: str | None
    loaded_adapters: Mapping[str, str]
    weight_version: str | None


class CacheFlushed(TypedDict):
    """The result of emptying the engines' caches. Where `success` is false the status is 400."""

    success: bool
    message: str


class ModelInfo(TypedDict):
    """The model and the name of its weights; `weight_version` is null where nobody has named them."""

    model_path: str
    weight_version: str | None
    is_generation: Literal[True]
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoutes:
    """The routes of one server. `weights_dir` None: no weights may come from its disk."""

    sync: WeightSync
    weights_dir: Path | None
    max_body_bytes: int

    @route(
        "POST /update_weights_from_disk",
        "updateWeights",
        "Load new weights into every engine",
        WeightsUpdated,
        body=UpdateWeightsFromDisk,
        errors=(Forbidden,),
        error_body=WeightsUpdated,
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def update_from_disk(self, request: Request) -> Response:
        """`POST /update_weights_from_disk`."""
        wire = decode_update(await self._body(request))
        command = UpdateWeights(
            path=str(self._below_weights_dir(wire.model_path)),
            version=wire.weight_version or next_version(await self.sync.find_version()),
            flushes_cache=wire.flush_cache is not False,
            options=wire.engine_options(),
        )
        result = await self.sync.update(command, aborts=bool(wire.abort_all_requests))
        told: WeightsUpdated = {
            "success": result.success,
            "message": result.message,
            "num_paused_requests": result.num_paused,
        }
        return _answer(told, result)

    @route(
        "POST /pause_generation",
        "pauseGeneration",
        "Let new turns wait, and end or freeze those that run",
        GenerationState,
        body=PauseRequest,
        errors=(Forbidden,),
        error_body=GenerationState,
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def pause(self, request: Request) -> Response:
        """`POST /pause_generation`."""
        return _state(await self.sync.pause(decode_pause(await self._body(request))))

    @route(
        "POST /continue_generation",
        "continueGeneration",
        "End a pause",
        GenerationState,
        body=Nothing,
        errors=(Forbidden,),
        error_body=GenerationState,
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def resume(self, request: Request) -> Response:
        """`POST /continue_generation`."""
        decode_nothing(await self._body(request))
        return _state(await self.sync.resume())

    @route(
        "POST /flush_cache",
        "flushCache",
        "Empty the engines' prefix caches",
        CacheFlushed,
        body=Nothing,
        errors=(Forbidden,),
        error_body=CacheFlushed,
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def flush(self, request: Request) -> Response:
        """`POST /flush_cache`."""
        decode_nothing(await self._body(request))
        result = await self.sync.flush()
        told: CacheFlushed = {"success": result.success, "message": result.message}
        return _answer(told, result)

    @route(
        "POST /update_weight_version",
        "nameWeights",
        "Name the weights that were sent to the engines by other ways",
        VersionUpdated,
        body=UpdateWeightVersion,
        errors=(Forbidden,),
        error_body=VersionUpdated,
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def name(self, request: Request) -> Response:
        """`POST /update_weight_version`."""
        wire = decode_version(await self._body(request))
        result = await self.sync.name(wire.new_version, aborts=bool(wire.abort_all_requests))
        told: VersionUpdated = {
            "success": result.success,
            "message": result.message,
            "new_version": wire.new_version,
        }
        return _answer(told, result)

    @route(
        "POST /load_lora_adapter",
        "loadLora",
        "Load a LoRA into every engine",
        LoraChanged,
        body=LoadLoraAdapter,
        errors=(Forbidden,),
        error_body=LoraChanged,
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def load_lora(self, request: Request) -> Response:
        """`POST /load_lora_adapter`."""
        wire = decode_load_lora(await self._body(request))
        path = str(self._below_weights_dir(wire.lora_path))
        version = wire.weight_version or self.sync.next_lora_version(wire.lora_name)
        return await self._change_lora(LoadLora(name=wire.lora_name, path=path, version=version), version)

    @route(
        "POST /unload_lora_adapter",
        "unloadLora",
        "Have every engine forget a LoRA",
        LoraChanged,
        body=UnloadLoraAdapter,
        errors=(Forbidden,),
        error_body=LoraChanged,
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def unload_lora(self, request: Request) -> Response:
        """`POST /unload_lora_adapter`."""
        return await self._change_lora(UnloadLora(name=decode_unload_lora(await self._body(request)).lora_name), None)

    async def _change_lora(self, command: LoadLora | UnloadLora, version: str | None) -> Response:
        result = await self.sync.change_lora(command)
        told: LoraChanged = {
            "success": result.success,
            "error_message": result.message or None,
            "loaded_adapters": self.sync.loras(),
            "weight_version": version,
        }
        return _answer(told, result)

    async def _body(self, request: Request) -> bytes:
        return await read_json(request.scope, request.receive, max_bytes=self.max_body_bytes)

    def _below_weights_dir(self, given: str) -> Path:
        """The given path, a relative one below `--weights-dir`. Raises Forbidden for one not there,
        also by `..` or a link. It goes on as it was given: engines may see the folder from elsewhere."""
        if self.weights_dir is None:
            raise Forbidden(
                "This server loads no weights from disk: start it with --weights-dir, the folder that they come from."
            )
        path = Path(os.path.normpath(self.weights_dir / given))
        try:
            is_below = path.resolve().is_relative_to(self.weights_dir.resolve())
        except (OSError, ValueError, RuntimeError):  # a loop of links, or a name that no file can have
            is_below = False
        if not is_below:
            raise Forbidden(f"{given[:200]!r} is not below --weights-dir, {str(self.weights_dir)!r}.")
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfoRoute:
    """The route of the current weights' name."""

    sync: WeightSync
    model: str

    @route(
        "GET /model_info",
        "getModelInfo",
        "Get the model and the name of its weights",
        ModelInfo,
        who=Who.SERVER,
    )
    async def model_info(self, request: Request) -> Response:
        """`GET /model_info`."""
        info: ModelInfo = {
            "model_path": self.model,
            "weight_version": await self.sync.find_version(),
            "is_generation": True,
            "paused": self.sync.weights.is_held,
        }
        return json_response(info)


def _state(result: SyncResult) -> Response:
    told: GenerationState = {"status": "ok" if result.success else "error", "message": result.message}
    return _answer(told, result)


def _answer(told: object, result: SyncResult) -> Response:
    response = json_response(told, status=200 if result.success else 400)
    if not result.success:
        response.headers["x-should-retry"] = "false"  # as every 400
    return response
