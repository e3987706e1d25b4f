"""Drives an `EngineLoop` in a process of its own: prompts in from the main thread, events out on the loop's.

    python -m benchmarks.streaming.load '{"model": "…", "num_requests": 256, …}'

It loads the model, says `{"ready": …}`, and measures once for each line on stdin (a `Variant`), with a fresh loop and a
fresh core over the same weights; a line of JSON reports it, and meanwhile lines with `progress` come.
"""

import queue
import sys
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.kit.client import Failures, RequestFailed
from benchmarks.kit.quantiles import milliseconds
from benchmarks.kit.requests import TimedReply, as_columns
from benchmarks.kit.steps import nothing_collected, say
from benchmarks.streaming.prompts import PromptKind, TextPrompt, make_prompts, prompts_of
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError
from stenograph.core.types import RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.forward.choice import make_forward
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.torch_forward import TorchForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.kv.block_pool import BLOCK_TOKENS
from stenograph.embedded.loop import EngineLoop
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.wire import Failed, Sampled
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

PROGRESS_S = 2.0


class StreamingPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The requests and their engine. `submit_interval_ms` 0 is a burst; `warm_up` requests of other text come first.

    `prompt`, where it is not empty, is the text of which every prompt is made, instead of words of so many tokens.
    """

    model: str
    prompts: PromptKind
    prompt_tokens: int
    num_requests: int
    submit_interval_ms: float
    max_tokens: int
    warm_up: int
    engine: EmbeddedOptions
    prompt: str = ""
    max_prefills: int | None = None
    ignore_eos: bool = True


class Variant(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A way in which prompts become ids: on so many threads (0: in `add_request`), or before the clock runs."""

    num_workers: int = 0
    is_pretok: bool = False

    @property
    def name(self) -> str:
        """As tables show it."""
        return "pretok" if self.is_pretok else f"{self.num_workers} workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A call of `add_request`: when it was due, began and returned."""

    request_id: RequestId
    due_s: float
    called_s: float
    returned_s: float


Ended = tuple[Sampled | Failed, list[float]]
"""A request's last event, and the times of its tokens and of its end."""


class Listener:
    """Takes a loop's events, and keeps the ends; tokenizes for it, and keeps when each text had its ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.done_s = defaultdict[str, deque[float]](deque)
        self._times_s = defaultdict[RequestId, list[float]](list)
        self._ended = queue.SimpleQueue[Ended]()
        self._num_sampled = 0

    def encode(self, text: str, /) -> "array[int]":
        """Ids [T]."""
        ids = self._tokenizer.encode(text)
        self.done_s[text].append(time.monotonic())
        return ids

    def emit(self, events: Sequence[Sampled | Failed]) -> None:
        """On the loop's thread."""
        now = time.monotonic()
        for event in events:
            num = len(event.chunk.ids) if isinstance(event, Sampled) else 0
            self._num_sampled += num
            self._times_s[event.request_id] += [now] * num
            if isinstance(event, Failed) or event.chunk.finish is not None:
                self._ended.put((event, [*self._times_s.pop(event.request_id), now]))

    def take(self, num: int, note: Callable[[int, int], None] | None) -> dict[RequestId, Ended]:
        """Wait until `num` requests have ended; `note` gets now and then how many have, and how many tokens came."""
        ended: dict[RequestId, Ended] = {}
        while len(ended) < num:
            try:
                event, times_s = self._ended.get(timeout=PROGRESS_S)
                ended[event.request_id] = event, times_s
            except queue.Empty:
                if note is not None:
                    note(len(ended), self._num_sampled)
        self._num_sampled = 0
        return ended


class StreamingLoad:
    """A model in this process, and what it is asked. Raises StartupError at construction."""

    def __init__(self, plan: StreamingPlan) -> None:
        self._plan = plan
        path = Path(plan.model)
        files = load_model_files(path)
        self._config, self._weights = load_weights(path)
        self._tokenizer = Tokenizer(files.tokenizer_json)
        if self._tokenizer.vocab_size > self._config.vocab_size:
            raise StartupError(f"{path}: the tokenizer has more ids than the model")
        self._eos_ids = tuple(id_ for id_ in files.eos_token_ids if id_ < self._config.vocab_size)
        self._grammars = GrammarCompiler(
            lambda: self._tokenizer, vocab_size=self._config.vocab_size, eos_ids=self._eos_ids
        )  # the core needs one; no request has a grammar
        num, length = plan.num_requests, plan.prompt_tokens
        if plan.prompt:
            self._prompts = prompts_of(plan.prompt, self._tokenizer, plan.prompts, num=num)
        else:
            self._prompts = make_prompts(self._tokenizer, plan.prompts, num=num, num_tokens=length)
        self._warm_up = make_prompts(
            self._tokenizer, PromptKind.UNIQUE, num=plan.warm_up, num_tokens=length, skip=plan.num_requests
        )
        self._params = SamplingParams(max_tokens=plan.max_tokens, temperature=0.0, ignore_eos=plan.ignore_eos)
        forward = self._forward(BLOCK_TOKENS)
        self._device = forward.device if isinstance(forward, TorchForward) else "cpu"

    def ready(self) -> dict[str, object]:
        """The sizes of the prompts, means over all."""
        num = len(self._prompts)
        return {
            "ready": True,
            "prompt_tokens": sum(len(prompt.ids) for prompt in self._prompts) / num,
            "prompt_bytes": sum(len(prompt.text.encode()) for prompt in self._prompts) / num,
            "tokenizer": self._tokenizer.encoder,
            "device": self._device,
        }

    def measure(self, variant: Variant) -> dict[str, object]:
        """All requests once; returns the report."""
        listener = Listener(self._tokenizer)
        loop = EngineLoop(listener, num_workers=variant.num_workers, emit=listener.emit, clock=SystemClock())
        loop.start(self._core(loop))
        try:
            self._submit(loop, self._warm_up, variant, interval_s=0.0)
            listener.take(len(self._warm_up), note=None)
            with nothing_collected():
                cpu_s = time.process_time()
                submitted = self._submit(loop, self._prompts, variant, interval_s=self._plan.submit_interval_ms / 1e3)
                ended = listener.take(len(submitted), self._note)
                cpu_s = time.process_time() - cpu_s
        finally:
            loop.close()
        return self._report(submitted, ended, listener, cpu_s)

    def _core(self, loop: EngineLoop) -> EngineCore:
        limits = replace(EngineLimits.of(self._plan.engine), max_prefills=self._plan.max_prefills)
        return EngineCore(
            self._forward(limits.num_kv_rows),
            lambda: self._tokenizer,
            self._grammars,
            eos_ids=self._eos_ids,
            limits=limits,
            clock=SystemClock(),
            wake=loop.wake,
            weight_version="bench",
        )

    def _forward(self, num_kv_tokens: int) -> TorchForward | NumpyForward:
        options = self._plan.engine
        return make_forward(
            self._config,
            self._weights,
            kind=options.forward,
            device=options.torch_device,
            dtype=options.torch_dtype,
            num_kv_tokens=num_kv_tokens,
        )

    def _submit(
        self, loop: EngineLoop, prompts: Sequence[TextPrompt], variant: Variant, *, interval_s: float
    ) -> list[Submitted]:
        """Give the loop each prompt when it is due; an interval of 0: as fast as it takes them."""
        given = [prompt.ids if variant.is_pretok else prompt.text for prompt in prompts]
        submitted: list[Submitted] = []
        begin_s = time.monotonic()
        for number, prompt in enumerate(given):
            due_s = begin_s + number * interval_s
            if interval_s and (early_s := due_s - time.monotonic()) > 0:
                time.sleep(early_s)
            called_s = time.monotonic()
            request_id = loop.add_request(prompt, self._params)
            returned_s = time.monotonic()
            submitted.append(Submitted(request_id=request_id, due_s=due_s, called_s=called_s, returned_s=returned_s))
        return submitted

    def _report(
        self, submitted: Sequence[Submitted], ended: dict[RequestId, Ended], listener: Listener, cpu_s: float
    ) -> dict[str, object]:
        failures = Failures()
        rows: list[dict[str, object]] = []
        zero_s = submitted[0].called_s
        for one, prompt in zip(submitted, self._prompts, strict=True):
            event, times_s = ended[one.request_id]
            done_s = listener.done_s[prompt.text].popleft() if listener.done_s[prompt.text] else one.called_s
            if isinstance(event, Failed):
                failures.add(RequestFailed(event.kind, event.message))
            else:
                rows.append(_row(one, prompt, event, times_s, done_s, zero_s))
        last_s = max(times_s[-1] for _, times_s in ended.values())
        return {
            "step": "run",
            "num_ok": len(rows),
            "seconds": last_s - zero_s,
            "cpu_s": cpu_s,
            "submit_wall_ms": milliseconds(submitted[-1].returned_s - zero_s),
            "add_ms": [milliseconds(one.returned_s - one.called_s, 4) for one in submitted],
            "late_ms": [milliseconds(one.called_s - one.due_s) for one in submitted]
            if self._plan.submit_interval_ms
            else [],
            **failures.report(),
            "requests": as_columns(rows),
        }

    def _note(self, num_ended: int, num_sampled: int) -> None:
        say({"progress": num_ended, "of": self._plan.num_requests, "tokens": num_sampled})


def _row(
    one: Submitted, prompt: TextPrompt, event: Sampled, times_s: list[float], done_s: float, zero_s: float
) -> dict[str, object]:
    times = event.chunk.times
    assert times is not None, "an ended request has its times"
    points = (times.submitted, max(times.submitted, done_s), times.admitted, times.first_token)
    reply = TimedReply(
        pieces_s=[times.first_token, *times_s[1:-1]][: len(times_s) - 1],
        end_s=times.finished,
        num_prompt=len(prompt.ids),
        num_cached=event.chunk.num_cached_tokens,
        num_completion=len(times_s) - 1,
    )
    parts = zip(("tokenize_ms", "queue_ms", "prefill_ms"), pairwise(points), strict=True)
    return {
        "submitted_ms": milliseconds(one.called_s - zero_s),
        **{name: milliseconds(end - begin) for name, (begin, end) in parts},
        **reply.facts(times.submitted),
    }


def main() -> int:
    """Follow the plan in the first argument; returns the exit code."""
    try:
        load = StreamingLoad(msgspec.json.decode(sys.argv[1], type=StreamingPlan))
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    say(load.ready())
    while line := sys.stdin.readline().strip():
        say(load.measure(msgspec.json.decode(line, type=Variant)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
