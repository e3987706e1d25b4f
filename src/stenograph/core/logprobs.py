"""The names of log-probabilities: the distribution of an engine's, and the others that follow from them. Pure.

Between a model's logits and a token there are steps, in this order: constraints (penalties, biases, the least number of
tokens, a grammar), temperature, truncation (min-p, top-k, top-p). Two kinds of log-probabilities are equal where the
steps between them change nothing: at temperature 1 `raw` and `tempered` are one, and without constraints and truncation
`tempered` and `sampling`.
"""

import re
from array import array
from collections.abc import Iterable

from stenograph.core.chat import ToolChoice
from stenograph.core.messages import Tool
from stenograph.core.types import LogprobsKind, LogprobsReport, SampledTurn, SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow."""

Logprobs = dict[LogprobsKind, "array[float]"]

_STRICT = re.compile(r'"strict"\s*:\s*true')


def is_held_by_engine(tools: Iterable[Tool], choice: ToolChoice) -> bool:
    """Whether an engine with a parser of calls constrains a reply by itself: it must call one of the tools, or one is
    strict."""
    return choice.forces or any('"strict"' in tool.json and _STRICT.search(tool.json) for tool in tools)


def is_constrained(params: SamplingParams) -> bool:
    """Whether anything but temperature and truncation changes the distribution."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.min_tokens
        or params.grammar is not None
    )


def is_truncated(params: SamplingParams) -> bool:
    """Whether unlikely tokens are cut off."""
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def has_support(params: SamplingParams) -> bool:
    """Whether some ids may be ruled out beside a token: by a grammar, `min_tokens` or truncation. A greedy turn has no
    support: nothing but its tokens could be sampled."""
    is_sampled = params.temperature >= GREEDY_BELOW
    return is_sampled and (is_truncated(params) or params.grammar is not None or params.min_tokens > 0)


def separates_tempered(params: SamplingParams) -> bool:
    """Whether the tempered log-probabilities follow neither from the raw ones nor from those of sampling."""
    if params.temperature < GREEDY_BELOW or params.temperature == 1.0:
        return False
    return is_truncated(params) or is_constrained(params)


def reported_kind(report: LogprobsReport, params: SamplingParams, *, is_forced: bool = False) -> LogprobsKind:
    """The name of the log-probabilities reported by an engine for one turn.

    `is_forced`: the engine itself constrains the reply, by a grammar not in `params`. Those of sampling are called
    tempered where both are the same. Greedy turns have raw ones or none with a name: engines do not divide by 0, and do
    not agree on the rest.
    """
    constrained = is_forced or is_constrained(params)
    takes_constrained = report.after_constraints and constrained
    if params.temperature < GREEDY_BELOW:
        is_raw = report.kind is not LogprobsKind.SAMPLING and not takes_constrained
        return LogprobsKind.RAW if is_raw else LogprobsKind.OTHER
    if report.kind is LogprobsKind.SAMPLING:
        return LogprobsKind.SAMPLING if constrained or is_truncated(params) else LogprobsKind.TEMPERED
    if not takes_constrained:
        return report.kind
    is_tempered = report.kind is LogprobsKind.TEMPERED or params.temperature == 1.0
    return LogprobsKind.SAMPLING if is_tempered and not is_truncated(params) else LogprobsKind.OTHER


def known_logprobs(sampled: SampledTurn, params: SamplingParams) -> Logprobs:
    """All known log-probabilities of a turn, by their names: the reported ones, and those equal to them."""
    known: Logprobs = {sampled.logprobs_kind: sampled.logprobs}
    if sampled.tempered_logprobs is not None:
        known[LogprobsKind.TEMPERED] = sampled.tempered_logprobs
    if sampled.sampling_logprobs is not None:
        known[LogprobsKind.SAMPLING] = sampled.sampling_logprobs
    if params.temperature < GREEDY_BELOW:
        known.pop(LogprobsKind.TEMPERED, None)
        return known
    if params.temperature == 1.0:
        _share(known, LogprobsKind.RAW, LogprobsKind.TEMPERED)
    # One whose engine reports those of sampling is constrained, or it would have reported tempered ones.
    is_plain = sampled.logprobs_kind is not LogprobsKind.SAMPLING
    if is_plain and not is_constrained(params) and not is_truncated(params):
        _share(known, LogprobsKind.TEMPERED, LogprobsKind.SAMPLING)
    if params.temperature == 1.0:
        _share(known, LogprobsKind.RAW, LogprobsKind.TEMPERED)
    return known


def _share(known: Logprobs, one: LogprobsKind, other: LogprobsKind) -> None:
    """Let two equal kinds stand for each other."""
    if one in known:
        known.setdefault(other, known[one])
    elif other in known:
        known[one] = known[other]
