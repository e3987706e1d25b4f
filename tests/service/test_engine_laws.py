"""The stand-ins keep the laws of engines too, and `check_engine` names the law that a false engine breaks."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest

from stenograph.core.errors import InvalidRequest
from stenograph.core.types import Chunk, Finish, FinishReason, RequestId
from stenograph.embedded.wire import Failed
from stenograph.engine.base import GenerateRequest
from stenograph.testing.conformance import check_engine
from stenograph.testing.engine_lab import EngineUnderTest
from stenograph.testing.engine_laws import LAST_LAWS, LAWS
from stenograph.testing.scripted_engine import Script, ScriptedEngine
from stenograph.testing.tiny_llama import CONTEXT, VOCAB, write_tiny_folder
from stenograph.testing.tiny_model import TinyModel

Make = Callable[[], AbstractAsyncContextManager[EngineUnderTest]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


def script_of(model: TinyModel, request: GenerateRequest) -> Script:
    """What the model says to a request, as a script."""
    answer = model.answer(request.prompt.ids, request.params)
    if isinstance(answer, Failed):
        return Script(ids=(), error=InvalidRequest(answer.message, param=answer.param))
    ids = tuple(id_ for chunk in answer for id_ in chunk.ids)
    logprobs = tuple(logprob for chunk in answer for logprob in chunk.logprobs)
    return Script(ids=ids, logprobs=logprobs, finish=answer[-1].finish)


class ModelledEngine(ScriptedEngine):
    """A scripted engine whose replies a tiny model writes. `seen` is what it was asked, by request."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__(vocab_size=VOCAB, max_context_tokens=CONTEXT, model=lambda request: script_of(model, request))
        self.tiny = model

    def seen_ids(self, request_id: RequestId) -> Sequence[int]:
        return next(request.prompt.ids for request in self.requests if request.request_id == request_id)


def modelled(engine: ModelledEngine) -> Make:
    """What can be done to such an engine."""
    model = engine.tiny

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        await engine.start()

        async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
            return model.score(ids, num_prompt)

        async def num_running() -> int:
            return engine.num_running

        async def pause() -> None:
            engine.pause()

        async def resume() -> None:
            engine.resume()

        async def kill() -> None:
            engine.resume()
            await engine.aclose()

        async def set_weight_version(version: str) -> None:
            engine.weight_version = version

        yield EngineUnderTest(
            engine=engine,
            prompt=model.tokenizer.encode("the user asks and").tolist(),
            decode=lambda ids: model.tokenizer.decode(ids, skip_special=True),
            eos_ids=model.eos_ids,
            num_tokens=8,
            num_long_tokens=40,
            tolerance_nats=1e-4,
            max_sequence_tokens=CONTEXT,
            seen_ids=engine.seen_ids,
            score=score,
            num_running=num_running,
            pause=pause,
            resume=resume,
            set_weight_version=set_weight_version,
            kill=kill,
            revive=engine.start,
        )
        await engine.aclose()

    return make


async def test_the_scripted_engine_keeps_the_laws(model: TinyModel) -> None:
    report = await check_engine(modelled(ModelledEngine(model)))
    assert set(report.not_offered) == {"alternatives"}, str(report)
    assert set(report.shown) == {*LAWS, *LAST_LAWS} - {"alternatives"}


async def test_a_law_without_a_hook_is_not_offered_and_never_shown(model: TinyModel) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        async with modelled(ModelledEngine(model))() as whole:
            yield EngineUnderTest(
                engine=whole.engine,
                prompt=whole.prompt,
                decode=whole.decode,
                eos_ids=whole.eos_ids,
                tolerance_nats=whole.tolerance_nats,
                not_offered={"seeds_repeat": "it is said so"},
            )

    report = await check_engine(make)
    assert set(report.not_offered) == {
        *("alternatives", "logprobs_of_the_model", "refuses_what_is_too_long", "leaving_stops", "pause_and_resume"),
        *("two_weight_versions", "dies_clearly_and_comes_back", "seeds_repeat"),
    }
    assert not set(report.shown) & set(report.not_offered)
    assert "seeds_repeat: not offered: it is said so" in str(report)
    assert "greedy_repeats: shown" in str(report)


# -- engines that break a law; each must be found, and by its name


class _Changed(ModelledEngine):
    """Draws from changed requests, or changes what is drawn."""

    def changed(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def changed_chunk(self, chunk: Chunk) -> Chunk:
        return chunk

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(self.changed(request)):
            yield self.changed_chunk(chunk)


class IgnoresStops(_Changed):
    def changed(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, params=replace(request.params, stop=()))


class IgnoresSeeds(_Changed):
    num_drawn = 0

    def changed(self, request: GenerateRequest) -> GenerateRequest:
        self.num_drawn += 1
        return replace(request, params=replace(request.params, seed=self.num_drawn))


class IgnoresGrammars(_Changed):
    def changed(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, params=replace(request.params, grammar=None))


class AddsToPrompts(_Changed):
    def changed(self, request: GenerateRequest) -> GenerateRequest:
        ids = request.prompt.ids[:0]
        ids.append(1)
        return replace(request, prompt=replace(request.prompt, ids=ids + request.prompt.ids))


class BendsLogprobs(_Changed):
    def changed_chunk(self, chunk: Chunk) -> Chunk:
        return replace(chunk, logprobs=tuple(logprob / 2 for logprob in chunk.logprobs))


class SaysStopForLength(_Changed):
    def changed_chunk(self, chunk: Chunk) -> Chunk:
        is_cut = chunk.finish is not None and chunk.finish.reason is FinishReason.LENGTH
        return replace(chunk, finish=Finish(reason=FinishReason.STOP)) if is_cut else chunk


class IsDeaf(ModelledEngine):
    async def abort(self, request_id: RequestId) -> bool:
        return request_id in self._running


@pytest.mark.parametrize(
    ("false_engine", "law"),
    [
        (IgnoresStops, "stops_at_string"),
        (IgnoresSeeds, "seeds_repeat"),
        (IgnoresGrammars, "grammar_regex"),
        (AddsToPrompts, "refuses_what_is_too_long"),
        (BendsLogprobs, "logprobs_of_the_model"),
        (SaysStopForLength, "stops_at_length"),
        (IsDeaf, "abort_keeps_what_was_drawn"),
    ],
)
async def test_a_broken_law_is_named(model: TinyModel, false_engine: type[ModelledEngine], law: str) -> None:
    with pytest.raises(AssertionError, match=f"\n  {law}: "):
        await check_engine(modelled(false_engine(model)))
