"""Refuses settings in conflict: one of no use to the engine, or one in need of another. Pure."""

from stenograph.core.errors import StartupError
from stenograph.core.kinds import ReplyMode, SaltPolicy
from stenograph.core.settings import Switch
from stenograph.embedded.settings import ForwardKind, TorchDtype
from stenograph.engine.settings import EngineKind, ReplayKind
from stenograph.http.settings import Settings
from stenograph.store.settings import Durability

MIN_LEASE_S = 0.3
"""A lease is renewed three times in its time; shorter ones are lost to a busy event loop."""

SALTING = (EngineKind.SGLANG, EngineKind.SGLANG_GENERATE, EngineKind.VLLM)
"""Engines with a salt for their cache."""

UNSPECIFIED = ("0.0.0.0", "::")
"""Hosts standing for every address of a machine."""


def check_together(settings: Settings) -> None:
    """Raise StartupError for settings in conflict."""
    _check_store(settings)
    _check_support(settings)
    _check_embedded(settings)
    is_embedded = settings.engine is EngineKind.EMBEDDED
    if not is_embedded and not settings.engine_url:
        raise StartupError(f"--engine {settings.engine} needs the address of its server: give --engine-url")
    if is_embedded and settings.engine_url:
        raise StartupError(
            "--engine-url is set, but --engine is embedded, which has no address: say which engine it is,"
            " for instance --engine sglang"
        )
    if is_embedded and settings.replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        raise StartupError(f"--replay is {settings.replay}, but the embedded engine reports routed_experts alone")
    if is_embedded and settings.engine_logprobs is not None:
        raise StartupError("--engine-logprobs is set, but the embedded engine reports all kinds")
    if is_embedded and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"--reply is {settings.reply}, but the embedded engine writes no replies: set --engine too")
    if settings.engine is EngineKind.LLAMACPP and settings.replay is not ReplayKind.NONE:
        raise StartupError("--replay is set, but llama.cpp does not report its experts")
    if settings.engine is EngineKind.LLAMACPP and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"--reply is {settings.reply}, but llama.cpp writes no replies here")
    if settings.engine is EngineKind.VLLM and settings.replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        raise StartupError(f"--replay is {settings.replay}, but vLLM reports routed_experts alone")
    if settings.engine is EngineKind.VLLM and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"--reply is {settings.reply}, but vLLM writes no replies here")
    if settings.engine is EngineKind.SGLANG_GENERATE and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"--reply is {settings.reply}, but SGLang's own route writes no replies")
    if settings.engine is EngineKind.LMDEPLOY and settings.replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        raise StartupError(f"--replay is {settings.replay}, but LMDeploy reports routed_experts alone")
    if settings.engine is EngineKind.LMDEPLOY and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"--reply is {settings.reply}, but LMDeploy writes no replies here")


def _check_store(settings: Settings) -> None:
    if settings.store is not None:
        _check_shared(settings)
        return
    if settings.advertise_url is not None or settings.lease_s != Settings.lease_s:
        raise StartupError("--advertise-url and --lease are of servers that share a database: give --store, too")
    if settings.data_dir is None and settings.kept is not Durability.NONE:
        raise StartupError(f"--durability is {settings.durability}, but sessions are in memory: give --data-dir, too")
    if settings.data_dir is not None and settings.kept is Durability.NONE:
        raise StartupError("--data-dir is set, but --durability is none, which keeps nothing: leave one of them out")


def _check_shared(settings: Settings) -> None:
    """Raise StartupError for settings in conflict with a database shared by servers."""
    if settings.data_dir is not None:
        raise StartupError("--store and --data-dir are both set, but sessions are kept in one place: leave one out")
    if settings.kept is not Durability.COMMIT:
        raise StartupError(
            f"--durability is {settings.durability}, but a database of --store keeps turns as commit does"
        )
    if settings.lease_s < MIN_LEASE_S:
        raise StartupError(f"--lease is {settings.lease_s:g} s, but must be at least {MIN_LEASE_S:g} s")
    if settings.advertise_url is None and settings.host in UNSPECIFIED:
        raise StartupError(
            f"--host {settings.host} is not an address that other servers can reach: give --advertise-url, for instance"
            f" http://10.0.0.5:{settings.port}"
        )


def _check_support(settings: Settings) -> None:
    if settings.support is Switch.ON and settings.engine in (EngineKind.LLAMACPP, EngineKind.LMDEPLOY):
        raise StartupError(f"--support is on, but {settings.engine} does not report which ids could be sampled")

    if settings.cache_salt is SaltPolicy.PIN and settings.engine not in SALTING:
        raise StartupError(
            f"--cache-salt is pin, but {settings.engine} cannot keep a cache of the weights that a session began with"
        )


def _check_embedded(settings: Settings) -> None:
    """Raise StartupError for settings of the embedded engine if they conflict, or are of no use."""
    is_embedded = settings.engine is EngineKind.EMBEDDED
    if is_embedded and (settings.engine_api_key is not None or settings.engine_keys is not None):
        given = "--engine-keys" if settings.engine_api_key is None else "--engine-api-key"
        raise StartupError(f"{given} is set, but the embedded engine takes no key: set --engine too")
    if settings.step_tokens <= settings.max_batch:
        raise StartupError(
            f"--step-tokens is {settings.step_tokens}, but must be above --max-batch, {settings.max_batch}: raise it"
        )
    if not is_embedded and settings.prefix_reuse is Switch.OFF:
        raise StartupError(f"--prefix-reuse is off, but --engine is {settings.engine}: only the embedded one has it")
    if not is_embedded and settings.tokenize_workers:
        raise StartupError(
            f"--tokenize-workers is {settings.tokenize_workers}, but --engine is {settings.engine}: only the embedded"
            " one has them"
        )
    if not is_embedded and settings.forward is not ForwardKind.NUMPY:
        raise StartupError(
            f"--forward is {settings.forward}, but --engine is {settings.engine}: only the embedded one has it"
        )
    if settings.forward is not ForwardKind.TORCH and settings.torch_device != "auto":
        raise StartupError(
            f"--torch-device is {settings.torch_device}, but --forward is {settings.forward}: set --forward torch"
        )
    if settings.forward is not ForwardKind.TORCH and settings.torch_dtype is not TorchDtype.FLOAT32:
        raise StartupError(
            f"--torch-dtype is {settings.torch_dtype}, but --forward is {settings.forward}: set --forward torch"
        )
