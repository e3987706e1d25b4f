"""A tiny real model, and an engine around it."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from standins.tiny.llama import write_tiny_folder
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.clock import SystemClock
from stenograph.core.types import Chunk, RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights, load_weights
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.wire import Failed, Sampled, Times
from stenograph.model.tokenizer import Tokenizer

Loaded = tuple[LlamaConfig, LlamaWeights]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def loaded(folder: Path) -> Loaded:
    return load_weights(folder)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer_json())


class Bench:
    """An engine that a test steps by hand, and what it has said of each request."""

    def __init__(
        self,
        loaded: Loaded,
        tokenizer: Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (2,),
        forward: type[NumpyForward] = NumpyForward,
        grammars: GrammarCompiler | None = None,
        **limits: Any,
    ) -> None:
        config, weights = loaded
        bounds = EngineLimits(**{"max_batch": 16, "kv_tokens": 4096, **limits})
        self.core = EngineCore(
            forward(config, weights, num_kv_tokens=bounds.num_kv_rows),
            lambda: tokenizer,
            grammars or GrammarCompiler(lambda: tokenizer, vocab_size=config.vocab_size, eos_ids=eos_ids),
            eos_ids=eos_ids,
            limits=bounds,
            clock=SystemClock(),
            wake=lambda: None,
            weight_version="v",
        )
        self.chunks: dict[str, list[Chunk]] = {}
        self.failures: dict[str, Failed] = {}
        self.times: dict[str, Times] = {}
        self._num_added = 0

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        routes_from: int | None = None,
        score_from: int | None = None,
        **params: Any,
    ) -> None:
        self._num_added += 1
        settings = {"max_tokens": 8, "ignore_eos": True, **params}
        times = self.times[name] = Times(submitted=float(self._num_added))
        failure = self.core.add(
            RequestId(name),
            array("i", prompt),
            SamplingParams(**settings),
            times,
            self._num_added,
            routes_from=routes_from,
            score_from=score_from,
        )
        if failure is not None:
            self.failures[name] = failure

    def take(self, events: list[Sampled | Failed]) -> None:
        for event in events:
            if isinstance(event, Failed):
                self.failures[event.request_id] = event
            else:
                self.chunks.setdefault(event.request_id, []).append(event.chunk)

    def step(self) -> None:
        self.take(self.core.step())
        self.core.check()

    def run(self) -> None:
        """Step until nothing is left; grammars that compile are waited for by stepping on."""
        while self.core.has_requests:
            self.step()

    def ids(self, name: str) -> list[int]:
        return [id_ for chunk in self.chunks[name] for id_ in chunk.ids]

    def logprobs(self, name: str) -> list[float]:
        return [logprob for chunk in self.chunks[name] for logprob in chunk.logprobs]


@pytest.fixture
def bench(loaded: Loaded, tokenizer: Tokenizer) -> Callable[..., Bench]:
    def make(**options: Any) -> Bench:
        return Bench(loaded, tokenizer, **options)

    return make
