"""Turns sampled by a LoRA, at an engine that may have lost it. Loaded by the first one."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from msgspec import structs

from stenograph.core.errors import EngineUnavailable, UpstreamRefused
from stenograph.core.types import Chunk
from stenograph.core.weights import LoadLora, LoraCommand
from stenograph.engine.http.adapter import EngineAdapter

RETRY_S = 2.0
_LOST = {404: b"does not exist", 400: b"LoRA adapter"}
"""Words of an engine that lacks a LoRA, by status: vLLM 0.32, SGLang 0.5.23."""


def check_loaded(adapter: EngineAdapter, policy: str, loaded: Mapping[str, str]) -> None:
    """Raise EngineUnavailable where an engine has another LoRA under this name than the one it was told to load last;
    as `sampled_by_lora`."""
    listed, expected = (adapter.capabilities.policies or {}).get(policy), loaded.get(policy)
    if expected is not None and listed != expected and (listed is not None or not expected):
        raise _lost(policy)


def remember(loaded: dict[str, str], command: LoraCommand, problem: str) -> None:
    """Note a command carried out. After an unload any LoRA of that name is taken, as before the first load."""
    if isinstance(command, LoadLora):
        loaded[command.name] = "" if problem else command.path
    elif not problem:
        loaded.pop(command.name, None)


async def sampled_by_lora(
    chunks: AsyncGenerator[Chunk, None], adapter: EngineAdapter, policy: str, loaded: Mapping[str, str]
) -> AsyncGenerator[Chunk, None]:
    """The chunks of a turn, without the names of the weights: the engine has them of its model. `loaded` are folders of
    LoRAs that the engine was told to load, by name; empty for one that it refused.

    Raises EngineUnavailable where the engine lacks the LoRA, which is then not among its listed ones, or has another
    under its name.
    """
    try:
        async with aclosing(chunks):
            check_loaded(adapter, policy, loaded)
            async for chunk in chunks:
                yield structs.replace(chunk, weights=None, weight_version=None, mixed=None)
    except UpstreamRefused as error:
        words = _LOST.get(error.engine_status)
        if words is None or words not in error.body:
            raise
        left = {name: folder for name, folder in (adapter.capabilities.policies or {}).items() if name != policy}
        adapter.capabilities = replace(adapter.capabilities, policies=left)
        raise _lost(policy) from error


def _lost(policy: str) -> EngineUnavailable:
    told = f"The engine no longer has the LoRA {policy!r} of this session: load it again."
    return EngineUnavailable(told, retry_after_s=RETRY_S)
