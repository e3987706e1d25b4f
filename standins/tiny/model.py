"""A tiny Llama's own words, at once and without a process: what stand-ins say that have no model of their own."""

from array import array
from collections.abc import Sequence
from pathlib import Path

from standins.teacher_forcing import line_logprobs
from stenograph.core.clock import SystemClock
from stenograph.core.logprobs import known_logprobs, reported_kind
from stenograph.core.types import Chunk, LogprobsReport, RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.wire import Failed, Sampled, Times
from stenograph.engine.validate import TurnCollector
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

_REQUEST = RequestId("only")


class TinyModel:
    """The model of a folder (`tiny_llama.write_tiny_folder`), one request at a time."""

    def __init__(self, folder: Path) -> None:
        files = load_model_files(folder)
        self._clock = SystemClock()
        config, weights = load_weights(folder)
        limits = EngineLimits(max_batch=1, kv_tokens=config.max_context)
        self._scorer = NumpyForward(config, weights, num_kv_tokens=limits.num_kv_rows)
        self.tokenizer = Tokenizer(files.tokenizer_json)
        self.eos_ids = files.eos_token_ids
        self._core = EngineCore(
            NumpyForward(config, weights, num_kv_tokens=limits.num_kv_rows),
            lambda: self.tokenizer,
            GrammarCompiler(lambda: self.tokenizer, vocab_size=config.vocab_size, eos_ids=self.eos_ids),
            eos_ids=self.eos_ids,
            limits=limits,
            clock=self._clock,
            wake=lambda: None,
            weight_version="tiny",
        )

    def __repr__(self) -> str:
        return f"<TinyModel of {self.vocab_size} ids>"

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self._scorer.config.vocab_size

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence."""
        return self._core.max_context_tokens

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> list[Chunk] | Failed:
        """The chunks of one whole generation, or why there is none."""
        times = Times(submitted=self._clock.monotonic())
        failed = self._core.add(_REQUEST, array("i", prompt), params, times, 0)
        chunks: list[Chunk] = []
        while failed is None and self._core.has_requests:
            for event in self._core.step():
                if isinstance(event, Sampled):
                    chunks.append(event.chunk)
                else:
                    failed = event
        return chunks if failed is None else failed

    def logprobs(self, chunks: Sequence[Chunk], params: SamplingParams, report: LogprobsReport) -> tuple[float, ...]:
        """An answer's log-probabilities as an engine has them that reports so; raw ones where those have no name."""
        collector = TurnCollector(vocab_size=self.vocab_size, max_tokens=None)
        for chunk in chunks:
            collector.add(chunk)
        turn = collector.result()
        return tuple(known_logprobs(turn, params).get(reported_kind(report, params), turn.logprobs))

    def score(self, ids: Sequence[int], num_prompt: int, temperature: float = 1.0) -> list[float]:
        """ln p of `ids[num_prompt:]`, each after all before it, in one forward pass, at a temperature."""
        return line_logprobs(self._scorer, ids, num_prompt, temperature)
