"""Turns sampled by a LoRA, at an engine that may have lost it. Loaded by the first one."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from stenograph.core.errors import EngineUnavailable, UpstreamRefused
from stenograph.core.types import Chunk
from stenograph.engine.http.adapter import EngineAdapter

RETRY_S = 2.0
_LOST = {404: b"does not exist", 400: b"LoRA adapter"}
"""Words of an engine that lacks a LoRA, by status: vLLM 0.32, SGLang 0.5.23."""


async def sampled_by_lora(
    chunks: AsyncGenerator[Chunk, None], adapter: EngineAdapter, policy: str
) -> AsyncGenerator[Chunk, None]:
    """The chunks of a turn. Raises EngineUnavailable where the engine lacks the LoRA, and lists it no more."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except UpstreamRefused as error:
        words = _LOST.get(error.engine_status)
        if words is None or words not in error.body:
            raise
        listed = (adapter.capabilities.policies or frozenset()) - {policy}
        adapter.capabilities = replace(adapter.capabilities, policies=listed)
        raise EngineUnavailable(
            f"The engine no longer has the LoRA {policy!r} of this session: load it again.", retry_after_s=RETRY_S
        ) from error
