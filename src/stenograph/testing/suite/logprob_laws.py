"""The law of log-probabilities: they are those of the distribution that the engine's capabilities name."""

from collections.abc import Sequence
from typing import Any

from stenograph.core.logprobs import is_truncated, known_logprobs
from stenograph.core.types import LogprobsKind, SampledTurn
from stenograph.engine.base import GenerateRequest
from stenograph.testing.suite.engine_lab import Lab, NotOffered, check_close

_PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 2},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
)


async def logprobs_of_the_model(lab: Lab) -> None:
    """Sampled tokens have the logprobs of a teacher-forced pass, of the kind that the engine's capabilities declare."""
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


async def _forced_logprobs(
    lab: Lab, request: GenerateRequest, turn: SampledTurn
) -> dict[LogprobsKind, Sequence[float]]:
    """The turn's logprobs by a teacher-forced pass: of each kind that the tester can score. Raises NotOffered."""
    assert lab.under_test.score is not None
    ids, num_prompt, params = [*request.prompt.ids, *turn.ids], len(request.prompt.ids), request.params
    forced = {LogprobsKind.RAW: await lab.under_test.score(ids, num_prompt)}
    if params.temperature and lab.under_test.score_at is not None:
        forced[LogprobsKind.TEMPERED] = await lab.under_test.score_at(ids, num_prompt, params.temperature)
        if not is_truncated(params):
            forced[LogprobsKind.SAMPLING] = forced[LogprobsKind.TEMPERED]
    if params.temperature and lab.under_test.score_at is None and turn.logprobs_kind is not LogprobsKind.RAW:
        raise NotOffered("a teacher-forced pass at a temperature: score_at")
    return forced
