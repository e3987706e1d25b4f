"""The operations for trainers and administrators in /openapi.json: weights, engines, backups. Pure.

Where one fails its answer has the status 400 of a bad request, and its own shape, as SGLang's have.
"""

from functools import partial

from stenograph.core.errors import Forbidden, InvalidRequest, LastEngine, RouteNotFound, StorageUnavailable
from stenograph.dialects.sessions import AddEngine, BackupRequest, Nothing
from stenograph.dialects.weight_commands import PauseRequest, UpdateWeightsFromDisk, UpdateWeightVersion
from stenograph.http.engine_routes import EngineLeft, EngineList, EngineRow
from stenograph.http.openapi.operation import Needs, operation, parameter
from stenograph.http.storage import BackedUp
from stenograph.http.weight_routes import CacheFlushed, GenerationState, ModelInfo, VersionUpdated, WeightsUpdated

administered = partial(operation, needs=Needs.ADMIN)

ADMIN = (
    administered(
        "POST /update_weights_from_disk",
        "updateWeights",
        "Load new weights into every engine",
        WeightsUpdated,
        body=UpdateWeightsFromDisk,
        errors=(Forbidden,),
        error_body=WeightsUpdated,
    ),
    administered(
        "POST /pause_generation",
        "pauseGeneration",
        "Let new turns wait, and end or freeze those that run",
        GenerationState,
        body=PauseRequest,
        errors=(Forbidden,),
        error_body=GenerationState,
    ),
    administered(
        "POST /continue_generation",
        "continueGeneration",
        "End a pause",
        GenerationState,
        body=Nothing,
        errors=(Forbidden,),
        error_body=GenerationState,
    ),
    administered(
        "POST /flush_cache",
        "flushCache",
        "Empty the engines' prefix caches",
        CacheFlushed,
        body=Nothing,
        errors=(Forbidden,),
        error_body=CacheFlushed,
    ),
    administered(
        "POST /update_weight_version",
        "nameWeights",
        "Name the weights that were sent to the engines by other ways",
        VersionUpdated,
        body=UpdateWeightVersion,
        errors=(Forbidden,),
        error_body=VersionUpdated,
    ),
    administered("GET /engines", "listEngines", "List the engines", EngineList, errors=(Forbidden,)),
    administered(
        "POST /engines",
        "addEngine",
        "Add an engine to the fleet",
        EngineRow,
        body=AddEngine,
        errors=(Forbidden, RouteNotFound),
    ),
    administered(
        "DELETE /engines/{name}",
        "removeEngine",
        "Take an engine from the fleet, when its turns have ended",
        EngineLeft,
        parameters=(
            {
                "name": "name",
                "in": "path",
                "required": True,
                "description": "The engine's name, its address as a rule.",
                "schema": {"type": "string"},
            },
            parameter("query", "force", "`true` takes the only usable engine too.", {"enum": ["true", "false"]}),
        ),
        errors=(Forbidden, InvalidRequest, LastEngine, RouteNotFound),
    ),
    operation("GET /model_info", "getModelInfo", "Get the model and the name of its weights", ModelInfo),
    administered(
        "POST /backup",
        "backUp",
        "Copy the store into a folder",
        BackedUp,
        body=BackupRequest,
        errors=(Forbidden, RouteNotFound, StorageUnavailable),
    ),
)
