"""What llama.cpp really does with what we send: a real server, a tiny model, and our own forward pass beside it."""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from standins.llamacpp_server import LlamaCppServer
from standins.tiny.llama import CONTEXT, VOCAB
from standins.tiny.model import TinyModel
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.errors import ContextLengthExceeded, InvalidRequest, UpstreamInvalid, UpstreamRefused
from stenograph.core.sse import EventReader
from stenograph.core.types import (
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    RequestId,
    SampledTurn,
    SamplingParams,
    token_ids,
)
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.engine.base import EngineState, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import pieces_of
from stenograph.engine.llamacpp.wire import encode_request
from stenograph.engine.validate import TurnCollector

PRECISION_NATS = 1e-4
Connect = Callable[..., AbstractAsyncContextManager[HttpEngine]]
PROMPT = (1, 50, 60, 70, 2)
E_ACUTE = (130, 105)
"""Two tokens, a byte of the character each."""


def asked(rid: str = "r", ids: Sequence[int] = PROMPT, **params: Any) -> GenerateRequest:
    settings = {"temperature": 0.0, "max_tokens": 8} | params
    return GenerateRequest(
        request_id=RequestId(rid), prompt=Prompt(new_ids=token_ids(ids)), params=SamplingParams(**settings)
    )


async def turn_of(engine: HttpEngine, request: GenerateRequest) -> SampledTurn:
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=request.params.max_tokens)
    async for chunk in engine.generate(request):
        collector.add(chunk)
    return collector.result()


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> TinyModel:
    return TinyModel(tiny_folder)


def distribution(model: TinyModel, ids: Sequence[int]) -> NDArray[np.float64]:
    """ln p of each id that could come next."""
    return np.array([model.score([*ids, id_], len(ids))[0] for id_ in range(VOCAB)])


def check_scores(model: TinyModel, request: GenerateRequest, turn: SampledTurn) -> None:
    forced = model.score([*request.prompt.ids, *turn.ids], len(request.prompt.ids))
    assert np.abs(np.array(turn.logprobs) - forced).max() < PRECISION_NATS


async def test_it_learns_the_context_of_a_slot_and_that_the_vocabulary_is_ours(
    tiny_server: LlamaCppServer, connect: Connect
) -> None:
    async with connect(tiny_server.url) as engine:
        assert engine.health().state is EngineState.READY
        assert engine.capabilities.max_context_tokens == CONTEXT


async def test_another_model_s_server_is_down_and_says_why(tiny_server: LlamaCppServer, connect: Connect) -> None:
    async with connect(tiny_server.url, vocab_size=49152, model="smollm2") as engine:
        assert engine.health().state is EngineState.DOWN
        assert "vocabulary of 320, that of smollm2 is 49152" in engine.health().detail


async def test_a_prompt_that_fills_the_context_is_refused_as_too_long(
    tiny_server: LlamaCppServer, connect: Connect
) -> None:
    async with connect(tiny_server.url) as engine:
        for num in (CONTEXT, CONTEXT + 50):
            with pytest.raises(ContextLengthExceeded) as caught:
                await turn_of(engine, asked(ids=[50] * num, max_tokens=1))
            assert (caught.value.num_prompt_tokens, caught.value.max_context_tokens) == (num, CONTEXT)
        turn = await turn_of(engine, asked(ids=[50] * (CONTEXT - 3), max_tokens=3))
        assert (len(turn.ids), turn.finish) == (3, Finish(reason=FinishReason.LENGTH))
        turn = await turn_of(engine, asked(ids=[50] * (CONTEXT - 3), max_tokens=None))
        assert (len(turn.ids), turn.finish) == (3, Finish(reason=FinishReason.LENGTH))


async def test_many_turns_in_a_row_never_meet_a_connection_that_llama_cpp_has_closed(
    tiny_server: LlamaCppServer, connect: Connect
) -> None:
    async with connect(tiny_server.url) as engine:
        turns = [await turn_of(engine, asked(f"r{number}", max_tokens=3)) for number in range(50)]
    assert len({tuple(turn.ids) for turn in turns}) == 1


# -- what is drawn, and from which distribution


@pytest.mark.parametrize("ids", [PROMPT, (50, 60), (2,), (266, 271, 290)])
async def test_the_prompt_is_what_was_sent_with_no_token_before_it(
    tiny_server: LlamaCppServer, connect: Connect, model: TinyModel, ids: tuple[int, ...]
) -> None:
    async with connect(tiny_server.url) as engine:
        request = asked(ids=ids)
        turn = await turn_of(engine, request)
    check_scores(model, request, turn)
    rows = [distribution(model, [*ids, *turn.ids[:place]]) for place in range(len(turn.ids))]
    assert [int(row.argmax()) for row in rows] == list(turn.ids)


def told_probabilities(url: str, request: GenerateRequest) -> NDArray[np.float64]:
    """The distribution that llama.cpp draws the first token from, by its own word."""
    body = json.loads(encode_request(request, vocab_size=VOCAB))
    body |= {"stream": False, "post_sampling_probs": True, "n_probs": VOCAB, "n_predict": 1}
    found = np.zeros(VOCAB)
    with urllib.request.urlopen(url + "/completion", json.dumps(body).encode()) as response:
        for top in json.loads(response.read())["completion_probabilities"][0]["top_probs"]:
            found[top["id"]] = top["prob"]
    return found


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.01, "top_k": 9, "top_p": 0.9},
        {"logit_bias": ((39, 3.0), (2, -4.0))},
    ],
)
def test_it_draws_from_the_distribution_that_was_asked_for_and_no_default_applies(
    tiny_server: LlamaCppServer, model: TinyModel, params: dict[str, Any]
) -> None:
    ids = (1, 50, 60, 82, 82, 82, 82, 2)
    request = asked(ids=ids, **{"temperature": 1.0, "seed": 3, **params})
    told = told_probabilities(tiny_server.url, request)
    assert np.abs(told - expected(distribution(model, ids), request.params)).max() < PRECISION_NATS


def test_a_repetition_penalty_is_for_the_whole_prompt_and_for_nothing_else(tiny_server: LlamaCppServer) -> None:
    ids = (39, *([82, 50, 60] * 30))  # 39 stands further back than llama.cpp looks by itself
    unseen = [id_ for id_ in range(VOCAB) if id_ not in ids]
    free, penalized = (
        told_probabilities(tiny_server.url, asked(ids=ids, temperature=3.0, seed=3, repetition_penalty=penalty))
        for penalty in (1.0, 1.5)
    )
    ratios = penalized / free
    assert np.ptp(ratios[unseen]) < 0.01 * ratios[unseen].mean()
    assert all(abs(ratios[id_] / ratios[unseen].mean() - 1) > 0.05 for id_ in set(ids))


def test_a_repetition_penalty_counts_the_prompt_and_the_turn_s_own_tokens(
    tiny_server: LlamaCppServer, tiny_folder: Path
) -> None:
    """The probabilities that llama.cpp reports after its samplers, held to three rules of what is counted."""
    penalty, prompt = 1.5, [50, 60, 70, 82, 39, 50]
    body = json.loads(encode_request(asked(ids=prompt, temperature=1.0, repetition_penalty=penalty), vocab_size=VOCAB))
    body |= {"stream": False, "post_sampling_probs": True, "n_probs": VOCAB, "n_predict": 12}
    with urllib.request.urlopen(tiny_server.url + "/completion", json.dumps(body).encode()) as response:
        reply = json.loads(response.read())
    tokens, start = np.array([*prompt, *reply["tokens"]], np.intc), len(prompt)
    config, weights = load_weights(tiny_folder)
    whole = Segment(ids=tokens, start=0, spans=(RowSpan(0, len(tokens)),), logits_for=LogitsFor.ALL)
    logits = np.asarray(NumpyForward(config, weights, num_kv_tokens=CONTEXT).forward([whole]), np.float64)
    apart = dict.fromkeys(("line", "turn", "prompt"), 0.0)
    places = iter(range(start, len(tokens)))
    for told in reply["completion_probabilities"]:
        at = next(at for at in places if tokens[at] == told["id"])  # tokens within a character have no row
        counted = {"line": tokens[:at], "turn": tokens[start:at], "prompt": tokens[:start]}
        probability = next(top["prob"] for top in told["top_probs"] if top["id"] == tokens[at])
        for rule, ids in counted.items():
            scores, seen = logits[at - 1].copy(), np.unique(ids)
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
            own = scores[tokens[at]] - np.logaddexp.reduce(scores)
            apart[rule] = max(apart[rule], abs(float(own) - np.log(probability)))
    assert len(reply["completion_probabilities"]) > 3
    assert apart["line"] < PRECISION_NATS < 0.1 < min(apart["turn"], apart["prompt"]), apart


def expected(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities as the embedded engine's order makes them: bias, temperature, min-p, top-k, top-p."""
    logits = logits.copy()
    for id_, bias in params.logit_bias:
        logits[id_] += bias
    logits /= params.temperature
    probabilities = np.exp(logits - logits.max())
    probabilities[probabilities < params.min_p] = 0
    order = np.argsort(-probabilities)
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.5, "seed": 1},
        {"temperature": 2.0, "seed": 2, "top_k": 50},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3},
        {"logit_bias": ((300, 50.0),)},
        {"grammar": Grammar(kind=GrammarKind.EBNF, source='root ::= "not" " like" "ly"')},
    ],
)
async def test_logprobs_are_the_model_s_own_whatever_changed_the_draw(
    tiny_server: LlamaCppServer, connect: Connect, model: TinyModel, params: dict[str, Any]
) -> None:
    async with connect(tiny_server.url) as engine:
        request = asked(max_tokens=20, **params)
        turn = await turn_of(engine, request)
    check_scores(model, request, turn)


async def test_a_seed_of_64_bits_says_what_is_drawn_and_without_one_the_request_s_id_does(
    tiny_server: LlamaCppServer, connect: Connect
) -> None:
    async with connect(tiny_server.url) as engine:
        for seed in (2**63 + 5, -7, 2**32 - 1):
            one, other = [await turn_of(engine, asked(temperature=2.0, seed=seed, max_tokens=20)) for _ in range(2)]
            assert list(one.ids) == list(other.ids)
        free = [await turn_of(engine, asked(f"r{number}", temperature=2.0, max_tokens=20)) for number in range(4)]
    assert len({tuple(turn.ids) for turn in free}) == 4


# -- characters of several tokens


@pytest.mark.parametrize("text", ["é", "éé", "pé", "aéaéa", "😀p", "€😀é"])
async def test_tokens_within_a_character_are_all_there_with_their_logprobs(
    tiny_server: LlamaCppServer, connect: Connect, model: TinyModel, text: str
) -> None:
    grammar = Grammar(kind=GrammarKind.CHOICE, source=json.dumps([text]))
    async with connect(tiny_server.url) as engine:
        request = asked(temperature=1.0, seed=5, max_tokens=30, grammar=grammar, num_top_logprobs=2)
        turn = await turn_of(engine, request)
    assert turn.finish.reason is FinishReason.STOP
    assert model.tokenizer.decode(turn.ids[:-1]) == text
    check_scores(model, request, turn)
    assert turn.top_logprobs is not None
    for place, row in enumerate(turn.top_logprobs):
        logprobs = distribution(model, [*PROMPT, *turn.ids[:place]])
        assert [top.id for top in row] == np.argsort(-logprobs)[:2].tolist()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_a_turn_may_end_within_a_character(
    tiny_server: LlamaCppServer, connect: Connect, model: TinyModel, max_tokens: int
) -> None:
    grammar = Grammar(kind=GrammarKind.CHOICE, source='["éé"]')
    async with connect(tiny_server.url) as engine:
        request = asked(max_tokens=max_tokens, grammar=grammar)
        turn = await turn_of(engine, request)
    assert list(turn.ids) == [*E_ACUTE, *E_ACUTE][:max_tokens]
    check_scores(model, request, turn)


@pytest.mark.parametrize(("stop", "num"), [((E_ACUTE[0],), 2), ((E_ACUTE[1],), 3), ((E_ACUTE[1], 82), 1)])
async def test_a_stop_token_within_a_character_or_before_it_ends_the_turn_there(
    tiny_server: LlamaCppServer, connect: Connect, stop: tuple[int, ...], num: int
) -> None:
    grammar = Grammar(kind=GrammarKind.CHOICE, source='["pép"]')
    async with connect(tiny_server.url) as engine:
        turn = await turn_of(engine, asked(grammar=grammar, stop_token_ids=stop))
    assert list(turn.ids) == [82, *E_ACUTE][:num]
    assert turn.finish == Finish(reason=FinishReason.STOP, matched=turn.ids[-1])


async def test_a_stop_string_that_ends_in_such_a_character_keeps_all_its_ids(
    tiny_server: LlamaCppServer, connect: Connect
) -> None:
    grammar = Grammar(kind=GrammarKind.CHOICE, source='["paép"]')
    async with connect(tiny_server.url) as engine:
        turn = await turn_of(engine, asked(grammar=grammar, stop=("aé",)))
    assert list(turn.ids) == [82, 67, *E_ACUTE]
    assert turn.finish == Finish(reason=FinishReason.STOP, matched="aé")


async def test_many_at_once_that_are_full_of_such_characters_are_what_each_is_alone(
    tiny_server: LlamaCppServer, connect: Connect, model: TinyModel
) -> None:
    requests = [asked(f"r{seed}", temperature=3.0, seed=seed, max_tokens=60) for seed in range(12)]
    async with connect(tiny_server.url) as engine:
        alone = [await turn_of(engine, request) for request in requests]
        together = await asyncio.gather(*(turn_of(engine, request) for request in requests))
    for request, one, other in zip(requests, alone, together, strict=True):
        assert list(one.ids) == list(other.ids)
        check_scores(model, request, other)


# -- the rest


async def test_a_next_turn_reuses_what_is_cached(tiny_server: LlamaCppServer, connect: Connect) -> None:
    first = [260 + number for number in range(40)]
    async with connect(tiny_server.url) as engine:
        turn = await turn_of(engine, asked(ids=first))
        following = await turn_of(engine, asked(ids=[*first, *turn.ids, 5, 6]))
        stopped = await turn_of(engine, asked(ids=[*first, *turn.ids, 5, 6], stop_token_ids=(following.ids[0],)))
    assert following.num_cached_tokens >= len(first)
    assert stopped.num_cached_tokens >= len(first), "also of a turn whose stream was left"


async def test_what_llama_cpp_says_of_a_grammar_goes_to_the_client(
    tiny_server: LlamaCppServer, connect: Connect
) -> None:
    async with connect(tiny_server.url) as engine:
        with pytest.raises(UpstreamRefused) as caught:
            await turn_of(engine, asked(grammar=Grammar(kind=GrammarKind.EBNF, source="root := nothing")))
        assert caught.value.engine_status == 400
        assert b"failed to parse grammar" in caught.value.body
        for params in ({"presence_penalty": 1.0}, {"grammar": Grammar(kind=GrammarKind.REGEX, source="a")}):
            with pytest.raises(InvalidRequest):
                await turn_of(engine, asked(**params))
        assert engine.health().state is EngineState.READY


TIGHT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "a": {"enum": [1, None], "type": ["integer", "null"]},
        "b": {"$ref": "#/$defs/pair"},
        "c": {"anyOf": [{"const": "x"}, {"type": "integer", "minimum": 3, "maximum": 12}]},
        "d": {"type": "string", "format": "date"},
        "e": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["a", "b", "c", "d", "e"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "minItems": 2, "maxItems": 2}},
}


async def test_a_schema_that_is_sent_is_held_to_and_one_that_does_not_compile_is_not_sent(
    tiny_server: LlamaCppServer, connect: Connect, model: TinyModel
) -> None:
    def under(schema: object, rid: str) -> GenerateRequest:
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
        return asked(rid, temperature=2.0, seed=1, max_tokens=120, grammar=grammar)

    broken = [{"b": {"$ref": "#/$defs/missing"}}, {"b": {"type": "string", "minLength": 5, "maxLength": 2}}]
    async with connect(tiny_server.url) as engine:
        for number, properties in enumerate(broken):
            with pytest.raises(InvalidRequest):
                await turn_of(engine, under({"type": "object", "properties": properties}, f"r{number}"))
        with pytest.raises(InvalidRequest):
            await turn_of(engine, under({"$ref": "#"}, "r2"))
        turn = await turn_of(engine, under(TIGHT, "r3"))
    told = json.loads(model.tokenizer.decode(turn.ids, skip_special=True))
    assert turn.finish.reason is FinishReason.STOP
    assert (list(told), told["a"] in (1, None), told["b"]) == (list("abcde"), True, [None, 1])
    assert told["c"] == "x" or 3 <= told["c"] <= 12
    assert len(told["d"]) == 10
    assert [type(value) for value in told["e"]] == [bool, bool]


def test_what_llama_cpp_drew_freely_because_it_could_not_compile_a_schema_is_refused(
    tiny_server: LlamaCppServer,
) -> None:
    request = asked(max_tokens=60, logit_bias=((2, 30.0),), grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, source="{}"))
    pieces = pieces_of(tiny_tokenizer_json(VOCAB), VOCAB)
    _, reading = LlamaCpp(AdapterOptions(model="tiny", vocab_size=VOCAB), pieces).call(request)
    body = json.loads(encode_request(request, vocab_size=VOCAB)) | {"json_schema": {"$ref": "#/$defs/missing"}}
    with urllib.request.urlopen(tiny_server.url + "/completion", json.dumps(body).encode()) as response:
        assert response.status == 200
        for data in EventReader(max_bytes=2**20).feed(response.read()):
            reading.event(data)
    with pytest.raises(UpstreamInvalid, match="grammar_held"):
        reading.end()
