"""What a model thinks of tokens that were drawn under a grammar: vLLM is asked again, and its answer is read. Pure.

vLLM rules tokens out before it takes its "raw" logprobs, so that a token which the grammar forces has the logprob 0
(measured; docs/engines.md). A prompt's logprobs are those of the model: the drawn ids are sent as the end of one. The
laws, besides those of `vllm_wire`:

    has_logprobs            there is a logprob for each id of the prompt
    logprob_is_told         none is -9999, which vLLM writes where it has none
    one_version             the weights that answer are those that drew
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.ids_json import encode_ids, join_ids
from stenograph.core.types import TopLogprob
from stenograph.engine.base import GenerateRequest
from stenograph.engine.vllm_request import Route
from stenograph.engine.vllm_wire import NO_LOGPROB, Span, decode


class _Score(msgspec.Struct, gc=False):
    logprob: float


_Rows = list[dict[str, _Score] | None]


class _Choice(msgspec.Struct):
    prompt_logprobs: _Rows | None = None
    weight_versions: list[Span] | None = None


class _Scored(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    prompt_logprobs: _Rows | None = None


_SCORED = msgspec.json.Decoder(_Scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """`logprobs[i]` is ln p(ids[i]) in nats under the model alone. `version` is of the weights, None if not told."""

    logprobs: "array[float]"
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None
    version: str | None


def encode_scoring(request: GenerateRequest, ids: "array[int]", *, route: Route, model: str) -> bytes:
    """The body that asks for the scores of `ids` after the request's prompt."""
    prompt = request.prompt.ids_json or encode_ids(request.prompt.ids)
    both = join_ids((prompt, encode_ids(ids)))
    asked = b'"temperature":0,"max_tokens":1,"prompt_logprobs":%d' % request.params.num_top_logprobs
    head = b'{"model":%b,"request_id":%b,' % (
        msgspec.json.encode(model),
        msgspec.json.encode(f"{request.request_id}-scores"),
    )
    if route is Route.GENERATE:
        return b"".join((head, b'"sampling_params":{', asked, b'},"token_ids":[', both, b"]}"))
    return b"".join((head, asked, b',"prompt":[', both, b"]}"))


def decode_scores(body: bytes, ids: Sequence[int], *, num_prompt: int, num_top: int) -> Scores:
    """What the reply to `encode_scoring` says. Raises UpstreamInvalid, naming the law that it breaks."""
    scored = decode(_SCORED, body)
    choice = scored.choices[0]
    rows = choice.prompt_logprobs if scored.prompt_logprobs is None else scored.prompt_logprobs
    if rows is None or len(rows) != num_prompt + len(ids):
        told = "none" if rows is None else str(len(rows))
        raise UpstreamInvalid("has_logprobs", f"{num_prompt + len(ids)} ids were sent to be scored; {told} are")
    logprobs = array("d")
    tops: list[tuple[TopLogprob, ...]] = []
    for id_, row in zip(ids, rows[num_prompt:], strict=True):
        score = None if row is None else row.get(str(id_))
        if row is None or score is None:
            raise UpstreamInvalid("has_logprobs", f"the drawn token {id_} is not scored")
        if score.logprob == NO_LOGPROB:
            raise UpstreamInvalid("logprob_is_told", f"vLLM has no logprob of the token {id_} that it drew")
        logprobs.append(score.logprob)
        tops.append(_best(row, num_top))
    spans = choice.weight_versions
    return Scores(
        logprobs=logprobs,
        top_logprobs=tuple(tops) if num_top else None,
        version=spans[-1].version if spans else None,
    )


def _best(row: dict[str, _Score], num_top: int) -> tuple[TopLogprob, ...]:
    if not num_top:
        return ()
    told = [TopLogprob(id=_id(name), logprob=score.logprob) for name, score in row.items()]
    return tuple(sorted(told, key=lambda top: -top.logprob)[:num_top])


def _id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise UpstreamInvalid("id_in_vocab", f"{name[:40]!r} is no token id")
    return int(name)
