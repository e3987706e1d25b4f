"""Turns with images at a vLLM that has lost one of them. Loaded by the first turn with an image.

vLLM keeps the hash of a processed image in its server's process, and the image in its engine's. A request that ends
between the two, refused for an id or a bias outside the vocabulary, leaves a hash without an image: the next request
with it fails before its first token, and vLLM forgets the hash. Asked again, the same request brings the image. Source:
vLLM 0.32's `multimodal/cache/base.py`, `MultiModalCacheMissError`, and `v1/engine/core.py`, `_handle_mm_cache_miss`;
recorded in tests/service/recordings/vllm/images.json.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from stenograph.core.errors import UpstreamRefused
from stenograph.core.types import Chunk, Finish, FinishReason, RequestId
from stenograph.engine.base import GenerateRequest

log = logging.getLogger(__name__)

_LOST_STATUS, _LOST = 500, b'"Internal server error"'
"""vLLM's whole answer: the route says nothing of the cause."""


async def sampled_again(
    generate: Callable[[GenerateRequest], AsyncGenerator[Chunk, None]],
    request: GenerateRequest,
    was_aborted: dict[RequestId, bool],
) -> AsyncGenerator[Chunk, None]:
    """The chunks of a turn; where vLLM fails so before the first, those of a second try, or none of a turn that was
    aborted meanwhile. Raises as `generate` does."""
    has_begun, request_id = False, request.request_id
    was_aborted[request_id] = False
    try:
        async with aclosing(generate(request)) as chunks:
            async for chunk in chunks:
                has_begun = True
                yield chunk
    except UpstreamRefused as error:
        if has_begun or error.engine_status != _LOST_STATUS or _LOST not in error.body:
            raise
    else:
        return
    finally:
        ended = was_aborted.pop(request_id)
    if ended:
        yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
        return
    log.info("turn %s is asked again: the engine may have lost one of its images", request_id)
    async with aclosing(generate(request)) as chunks:
        async for chunk in chunks:
            yield chunk
