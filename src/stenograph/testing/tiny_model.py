"""A tiny Llama's own words, at once and without a process: what stand-ins say that have no model of their own."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stenograph.core.clock import SystemClock
from stenograph.core.types import Chunk, RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.grammar import GrammarCompiler
from stenograph.embedded.kvcache import SequenceKv
from stenograph.embedded.model import LlamaModel, LogitsFor, Segment
from stenograph.embedded.sampler import log_softmax
from stenograph.embedded.weights import load_weights
from stenograph.embedded.wire import Drew, Failed
from stenograph.render.model_files import load_model_files
from stenograph.render.tokenizer import Tokenizer

_REQUEST = RequestId("only")


class TinyModel:
    """The model of a folder (`tiny_llama.write_tiny_folder`), one request at a time."""

    def __init__(self, folder: Path) -> None:
        files = load_model_files(folder)
        self._model = LlamaModel(*load_weights(folder))
        self.tokenizer = Tokenizer(files.tokenizer_json)
        self.eos_ids = files.eos_token_ids
        vocab_size = self._model.config.vocab_size
        self._core = EngineCore(
            self._model,
            self.tokenizer,
            GrammarCompiler(self.tokenizer, vocab_size=vocab_size, eos_ids=self.eos_ids),
            eos_ids=self.eos_ids,
            limits=EngineLimits(max_batch=1, kv_tokens=self._model.config.max_context),
            clock=SystemClock(),
            wake=lambda: None,
            weight_version="tiny",
        )

    def __repr__(self) -> str:
        return f"<TinyModel of {self.vocab_size} ids>"

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return self._model.config.vocab_size

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence."""
        return self._core.max_context_tokens

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> list[Chunk] | Failed:
        """The chunks of one whole generation, or why there is none."""
        failed = self._core.add(_REQUEST, array("i", prompt), params)
        chunks: list[Chunk] = []
        while failed is None and self._core.has_requests:
            for event in self._core.step():
                if isinstance(event, Drew):
                    chunks.append(event.chunk)
                else:
                    failed = event
        return chunks if failed is None else failed

    def score(self, ids: Sequence[int], num_prompt: int) -> list[float]:
        """ln p of `ids[num_prompt:]`, each after all before it, in one forward pass."""
        kv = SequenceKv(self._model.config, max_tokens=len(ids))
        line = np.array(ids, np.intc)
        rows = self._model.forward([Segment(ids=line, kv=kv, logits_for=LogitsFor.ALL)]).astype(np.float64)
        return [float(log_softmax(rows[at - 1])[ids[at]]) for at in range(num_prompt, len(ids))]
