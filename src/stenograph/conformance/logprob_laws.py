"""The laws of the sampled distribution: log-probabilities are those of the distribution named by the engine's
capabilities, and supports have the ids open to sampling."""

import math
from collections.abc import Sequence
from typing import Any

from stenograph.conformance.lab import Lab, NotOffered, check_close
from stenograph.core.logprobs import is_truncated, known_logprobs
from stenograph.core.support import supports
from stenograph.core.types import LogprobsKind, SampledTurn
from stenograph.engine.base import GenerateRequest

_PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 2},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
)


async def logprobs_of_the_model(lab: Lab) -> None:
    """Sampled tokens have the logprobs of a teacher-forced pass, of the kind declared in the engine's capabilities."""
    if lab.under_test.score is None:
        raise NotOffered("a teacher-forced pass: score")
    for params in _PARAMS:
        request = lab.request(**params)
        turn = await lab.draw(request)
        known = known_logprobs(turn, request.params)
        forced = await _forced_logprobs(lab, request, turn)
        assert forced.keys() & known.keys(), f"with {params} the engine reports {turn.logprobs_kind} logprobs alone"
        for kind in forced.keys() & known.keys():
            what = f"{kind} logprobs with {params}, scored again"
            check_close(what, known[kind], forced[kind], tolerance=lab.under_test.tolerance_nats)


async def supports_of_tokens(lab: Lab) -> None:
    """A session with supports requested gets one with each token: at most the ids left by truncation, and among them
    the token has the reported logprob of sampling. Without the request, or with nothing ruled out, there is none."""
    if not lab.capabilities.reports_support:
        raise NotOffered("supports of tokens: reports_support")
    how: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "seed": 5}
    assert (await lab.draw(lab.request(**how))).support is None, "supports came that nobody asked for"
    assert (await lab.draw(lab.request(temperature=0.7, support=True))).support is None, "nothing was ruled out"
    turn = await lab.draw(lab.request(**how, support=True, num_top_logprobs=3))
    assert turn.support is not None, "no supports came"
    kept = [set[int]() if ids is None else set(ids.tolist()) for ids in supports(turn.support, turn.ids)]
    assert all(0 < len(ids) <= 3 for ids in kept), f"under top_k 3 the supports have {[len(ids) for ids in kept]} ids"
    if turn.logprobs_kind is LogprobsKind.RAW and turn.sampling_logprobs is not None and turn.top_logprobs is not None:
        for at, (id_, told, row) in enumerate(zip(turn.ids, turn.sampling_logprobs, turn.top_logprobs, strict=True)):
            assert kept[at] == {top.id for top in row}, f"the support of token {at} is not the likeliest three"
            weights = {top.id: math.exp((top.logprob - row[0].logprob) / 0.7) for top in row}
            wanted = math.log(weights[id_] / sum(weights.values()))
            assert abs(wanted - told) <= max(lab.under_test.tolerance_nats, 1e-9), f"token {at}: {told}, not {wanted}"


async def _forced_logprobs(
    lab: Lab, request: GenerateRequest, turn: SampledTurn
) -> dict[LogprobsKind, Sequence[float]]:
    """The turn's logprobs by a teacher-forced pass: of each kind that the tester can score. Raises NotOffered."""
    assert lab.under_test.score is not None
    ids, num_prompt, params = [*request.prompt.ids, *turn.ids], request.prompt.num_tokens, request.params
    forced = {LogprobsKind.RAW: await lab.under_test.score(ids, num_prompt)}
    if params.temperature and lab.under_test.score_at is not None:
        forced[LogprobsKind.TEMPERED] = await lab.under_test.score_at(ids, num_prompt, params.temperature)
        if not is_truncated(params):
            forced[LogprobsKind.SAMPLING] = forced[LogprobsKind.TEMPERED]
    if params.temperature and lab.under_test.score_at is None and turn.logprobs_kind is not LogprobsKind.RAW:
        raise NotOffered("a teacher-forced pass at a temperature: score_at")
    return forced
