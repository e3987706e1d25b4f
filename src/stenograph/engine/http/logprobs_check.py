"""Checks what the settings say of an engine's log-probabilities against its own: one prompt, two sampled tokens.

The gap between two alternatives is the same at every temperature for raw log-probabilities, and 1/T as wide for those
after temperature. Of the distribution that is sampled from, `top_k` leaves no other alternatives. Knows no engine.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence

from stenograph.core.errors import CallerError, StartupError, UpstreamRefused, UpstreamTimeout
from stenograph.core.types import LogprobsKind, Prompt, RequestId, SamplingParams, TopLogprob, token_ids
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.adapter import Ask, EngineAdapter

log = logging.getLogger(__name__)

CHECK_DEADLINE_S = 30.0
"""A paused engine samples nothing. It gets no turns before it was checked, and is asked again with the next probe."""
COOL = 0.5
"""The other temperature."""
TOP_K, NUM_TOP = 4, 8
IMPOSSIBLE_NATS = -1000.0
"""Below it an alternative was ruled out: vLLM writes -9999 there."""
LEAST_GAP_NATS = 0.1
MOST_OFF = 0.2
"""By so much the gaps' ratio may be off 1 or 1/T: engines compute in half precision."""


async def check_logprobs(
    adapter: EngineAdapter, ask: Ask, *, said: LogprobsKind, deadline_s: float = CHECK_DEADLINE_S
) -> None:
    """Raise StartupError if the engine reports others than `said`. Where its alternatives do not tell, the settings are
    believed, with a line in the log. Raises UpstreamError where it does not answer."""
    plain = SamplingParams(max_tokens=1, num_top_logprobs=NUM_TOP)
    cool = SamplingParams(max_tokens=1, num_top_logprobs=NUM_TOP, temperature=COOL, top_k=TOP_K)
    try:
        async with asyncio.timeout(deadline_s):
            found = kind_of(await _alternatives(adapter, ask, plain), await _alternatives(adapter, ask, cool))
    except TimeoutError as error:
        raise UpstreamTimeout(
            f"it sampled no token within {deadline_s:g} s, by which --engine-logprobs is checked"
        ) from error
    except (CallerError, UpstreamRefused) as error:
        log.warning("--engine-logprobs %s could not be checked: %s", said, error)
        return
    if found is None:
        log.warning("--engine-logprobs %s could not be checked: the alternatives of a token do not tell", said)
    elif found is not said:
        raise StartupError(
            f"--engine-logprobs is {said}, but the engine reports {found} ones, by the alternatives of one prompt at"
            f" temperature 1 and {COOL:g}: set --engine-logprobs {found}, or start the engine so that it reports {said}"
        )


def kind_of(plain: Sequence[TopLogprob], cool: Sequence[TopLogprob]) -> LogprobsKind | None:
    """The kind of log-probabilities of one token's alternatives, at temperature 1 and at `COOL` with a `top_k` of
    `TOP_K`; None where they do not tell."""
    listed = {one.id: one.logprob for one in cool if one.logprob > IMPOSSIBLE_NATS}
    both = sorted((one.logprob, listed[one.id]) for one in plain if one.id in listed)
    if not both or both[-1][0] - both[0][0] < LEAST_GAP_NATS:
        return None
    ratio = (both[-1][1] - both[0][1]) / (both[-1][0] - both[0][0])
    if abs(ratio - 1) < MOST_OFF:
        return LogprobsKind.RAW
    if abs(ratio - 1 / COOL) < MOST_OFF / COOL:
        return LogprobsKind.TEMPERED if len(listed) > TOP_K else LogprobsKind.SAMPLING
    return None


async def _alternatives(adapter: EngineAdapter, ask: Ask, params: SamplingParams) -> Sequence[TopLogprob]:
    """Those of the token after a prompt of one id, from the middle of the vocabulary: a piece of a word, after which
    much is possible. Raises StenographError."""
    ids = token_ids([adapter.capabilities.vocab_size // 2])
    request = GenerateRequest(request_id=RequestId(uuid.uuid4().hex), prompt=Prompt.of(ids), params=params)
    call, reading = adapter.call(request)
    http = await ask("POST", call.path, call.body, call.headers)
    if http.status != 200:
        raise adapter.refusal(http, request)
    if not call.streams:
        chunks = [*reading.whole(http)]
    else:
        events = [line[5:].strip() for line in http.body.splitlines() if line.startswith(b"data:")]
        chunks = [chunk for data in events if data != b"[DONE]" for chunk in reading.event(data)]
        chunks += reading.end()
    return [top for chunk in chunks for row in chunk.top_logprobs or () for top in row]
