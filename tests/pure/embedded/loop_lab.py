"""An `EngineLoop` around the tiny model, and what a test hears of it."""

import threading
from array import array
from collections.abc import Callable, Sequence

from stenograph.core.clock import SystemClock
from stenograph.core.types import Chunk, EngineTimes, FinishReason, RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.loop import MAX_ARRIVING, EngineLoop
from stenograph.embedded.tokenize_workers import TextTokenizer
from stenograph.embedded.wire import Failed, Sampled
from stenograph.model.tokenizer import Tokenizer


class Listener:
    """Takes a loop's events and lets a test wait for them. `between` is called after each, on the loop's thread."""

    def __init__(self) -> None:
        self.events: list[Sampled | Failed] = []
        self.between: Callable[[], None] = lambda: None
        self._heard = threading.Condition()

    def emit(self, events: Sequence[Sampled | Failed]) -> None:
        assert events
        with self._heard:
            self.events += events
            self._heard.notify_all()
        self.between()

    def wait(self, until: Callable[[], bool]) -> None:
        with self._heard:
            self._heard.wait_for(until)

    def wait_for_ends(self, *ids: str) -> None:
        self.wait(lambda: all(self.finals(id_) for id_ in ids))

    def finals(self, request_id: str) -> list[Sampled | Failed]:
        return [e for e in self.events if e.request_id == request_id and is_final(e)]

    def end(self, request_id: str) -> Sampled | Failed:
        """The one final event, which is the last."""
        (final,) = self.finals(request_id)
        assert [event for event in self.events if event.request_id == request_id][-1] is final
        return final

    def failure(self, request_id: str) -> Failed:
        end = self.end(request_id)
        assert isinstance(end, Failed)
        return end

    def reason(self, request_id: str) -> FinishReason:
        end = self.end(request_id)
        assert isinstance(end, Sampled)
        assert end.chunk.finish is not None
        return end.chunk.finish.reason

    def chunks(self, request_id: str) -> list[Chunk]:
        return [e.chunk for e in self.events if isinstance(e, Sampled) and e.request_id == request_id]

    def ids(self, request_id: str) -> list[int]:
        return [id_ for chunk in self.chunks(request_id) for id_ in chunk.ids]

    def began(self) -> list[str]:
        """Requests in the order of their first tokens."""
        return list(dict.fromkeys(e.request_id for e in self.events if isinstance(e, Sampled) and e.chunk.ids))


def is_final(event: Sampled | Failed) -> bool:
    return isinstance(event, Failed) or event.chunk.finish is not None


class Lab:
    """One loop, its core and its listener."""

    def __init__(
        self,
        loaded: tuple[LlamaConfig, LlamaWeights],
        tokenizer: Tokenizer,
        *,
        encoder: TextTokenizer | None = None,
        num_workers: int = 0,
        max_arriving: int = MAX_ARRIVING,
        max_batch: int = 16,
    ) -> None:
        self.heard = Listener()
        self.loop = EngineLoop(
            encoder or tokenizer,
            num_workers=num_workers,
            emit=self.heard.emit,
            clock=SystemClock(),
            max_arriving=max_arriving,
        )
        config, weights = loaded
        limits = EngineLimits(max_batch=max_batch, kv_tokens=4096)
        self.core = EngineCore(
            NumpyForward(config, weights, num_kv_tokens=limits.num_kv_rows),
            lambda: tokenizer,
            GrammarCompiler(lambda: tokenizer, vocab_size=config.vocab_size, eos_ids=(2,)),
            eos_ids=(2,),
            limits=limits,
            clock=SystemClock(),
            wake=self.loop.wake,
            weight_version="v",
        )

    def add(self, name: str, prompt: "str | Sequence[int]", **params: object) -> RequestId:
        settings = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "temperature": 0.0, **params})  # type: ignore[arg-type]
        given = prompt if isinstance(prompt, str) else array("i", prompt)
        return self.loop.add_request(given, settings, RequestId(name))

    def start(self) -> None:
        self.loop.start(self.core)

    def times(self, name: str) -> EngineTimes:
        times = self.heard.chunks(name)[-1].times
        assert times is not None
        return times
