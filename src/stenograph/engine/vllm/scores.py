"""The model's own scores of given tokens: asks vLLM for a prompt's, and reads its answer. Pure.

Given tokens are those that somebody wants to have scored, and those sampled under a grammar: vLLM rules tokens out
before it takes its "raw" logprobs, so a token forced by the grammar has the logprob 0 (measured; docs/engines.md). A
prompt's logprobs are the model's: the ids are sent as the end of one. vLLM takes no prompt as long as its context, so
the last token of such a line is sampled after the others, with no other allowed. The laws, besides those of `wire`:

    request_agrees          the reply is to the request sent
    has_logprobs            there is a logprob for each id of the prompt
    ids_agree               the only token allowed is the one sampled
    logprob_is_told         none is -9999, vLLM's mark of a missing one
    one_version             the weights of the answer are those of the sampled tokens
"""

from array import array
from collections.abc import Generator, Sequence
from typing import Annotated

import msgspec

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.ids_json import encode_ids, join_ids, prompt_json
from stenograph.engine.base import GenerateRequest
from stenograph.engine.rows import decoded
from stenograph.engine.scoring import ENTRIES_AT_ONCE, Alternatives, ScoreRequest, Scores
from stenograph.engine.vllm.request import VLLMRoute, media_parts, num_logprobs, salt_parts
from stenograph.engine.vllm.wire import NO_LOGPROB, VLLM_LAWS, VLLMSpan, check_request, read


class _Score(msgspec.Struct, gc=False):
    logprob: float


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw] | None = None
    weight_versions: list[VLLMSpan] | None = None


class _Scored(msgspec.Struct):
    choices: Annotated[list[_ScoredChoice], msgspec.Meta(min_length=1, max_length=1)]
    prompt_logprobs: list[msgspec.Raw] | None = None
    request_id: str | None = None
    id: str | None = None


_SCORED = msgspec.json.Decoder(_Scored)
_ROWS = msgspec.json.Decoder(list[dict[str, _Score] | None])

LAST_PRIORITY = 2**31 - 1
"""With `--scheduling-policy priority` vLLM takes the least number first, turns without one as 0; else it reads none."""


def encode_scoring(request: GenerateRequest, ids: "array[int]", *, route: VLLMRoute, model: str) -> bytes:
    """The body to ask for the scores of `ids` after the request's prompt."""
    both = join_ids((b"".join(prompt_json(request.prompt)), encode_ids(ids)))
    more = (*salt_parts(request.cache_salt), *(media_parts(request.prompt.media) if request.prompt.media else ()))
    head = (scoring_id(request), request.params.num_top_logprobs, b"".join(more))
    return _scoring_body(both, *head, route=route, model=model)


def encode_given(request: ScoreRequest, *, route: VLLMRoute, model: str, is_full: bool) -> bytes:
    """The body to ask for the scores of given ids. `is_full`: they are as long as the context."""
    ids, more, last = request.ids, b',"priority":%d' % LAST_PRIORITY, b""
    if is_full:
        last = b',"allowed_token_ids":[%d],"logprobs":%d' % (ids[-1], num_logprobs(request.num_top))
        ids = ids[:-1]
        if route is VLLMRoute.COMPLETIONS:
            more += b',"return_token_ids":true,"return_tokens_as_token_ids":true'
    head = (request.request_id, request.num_top, more)
    return _scoring_body(encode_ids(ids), *head, route=route, model=model, last=last)


def _scoring_body(
    ids: bytes, request_id: str, num_top: int, more: bytes, *, route: VLLMRoute, model: str, last: bytes = b""
) -> bytes:
    asked = b'"temperature":0,"max_tokens":1,"prompt_logprobs":%d%b' % (num_top, last)
    head = b'{"model":%b,"request_id":%b%b,' % (msgspec.json.encode(model), msgspec.json.encode(request_id), more)
    if route is VLLMRoute.GENERATE:
        return b"".join((head, b'"sampling_params":{', asked, b'},"token_ids":[', ids, b"]}"))
    return b"".join((head, asked, b',"prompt":[', ids, b"]}"))


def scoring_id(request: GenerateRequest) -> str:
    """The id of the request for the scores of `request`'s tokens."""
    return f"{request.request_id}-scores"


def decode_scores(
    body: bytes, ids: Sequence[int], *, request_id: str, route: VLLMRoute, num_prompt: int, num_top: int
) -> Generator[None, None, Scores]:
    """Read the reply to `encode_scoring` in pieces, to be made in an event-loop iteration each.

    Raises UpstreamInvalid, naming the broken law.
    """
    scored = decoded(_SCORED, body, VLLM_LAWS, in_parts=True)
    check_request(scored.request_id if route is VLLMRoute.GENERATE else scored.id, request_id, route)
    choice = scored.choices[0]
    rows = choice.prompt_logprobs if scored.prompt_logprobs is None else scored.prompt_logprobs
    if rows is None or len(rows) != num_prompt + len(ids):
        told = "none" if rows is None else str(len(rows))
        raise UpstreamInvalid("has_logprobs", f"{num_prompt + len(ids)} ids were sent, but {told} were scored")
    logprobs, top, num_rows = array("d"), Alternatives(), ENTRIES_AT_ONCE // (1 + num_top)
    for start in range(0, len(ids), num_rows):
        raw = rows[num_prompt + start : num_prompt + start + num_rows]
        read = decoded(_ROWS, b"[" + b",".join(raw) + b"]", VLLM_LAWS)
        for id_, row in zip(ids[start : start + num_rows], read, strict=True):
            logprobs.append(_score(id_, row))
            if row is not None and num_top:
                best = sorted([(_id(name), score.logprob) for name, score in row.items()], key=_by_logprob)
                top.add(best, num_top)
        yield
    spans = choice.weight_versions
    return Scores(logprobs=logprobs, top=top, version=spans[-1].version if spans else None)


def with_last(scores: Scores, body: bytes, request: ScoreRequest, *, route: VLLMRoute) -> Scores:
    """The scores of all tokens but the last, and that of the last: it was sampled. Raises UpstreamInvalid."""
    told = read(route, body, with_tops=request.num_top > 0)
    if list(told.ids) != [request.ids[-1]] or len(told.logprobs) != 1:
        sampled = f"{request.ids[-1]} alone was allowed, and {list(told.ids)[:3]} sampled"
        raise UpstreamInvalid("ids_agree", sampled)
    scores.logprobs.append(told.logprobs[0])
    if request.num_top:
        best = sorted([(one.id, one.logprob) for one in (told.tops or [[]])[0]], key=_by_logprob)
        scores.top.add(best, request.num_top)
    return scores


def _score(id_: int, row: dict[str, _Score] | None) -> float:
    score = None if row is None else row.get(str(id_))
    if score is None:
        raise UpstreamInvalid("has_logprobs", f"the sampled token {id_} is not scored")
    if score.logprob == NO_LOGPROB:
        raise UpstreamInvalid("logprob_is_told", f"vLLM reported no logprob for sampled token {id_}")
    return score.logprob


def _by_logprob(told: tuple[int, float]) -> float:
    return -told[1]


def _id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise UpstreamInvalid("id_in_vocab", f"{name[:40]!r} is not a token id")
    return int(name)
