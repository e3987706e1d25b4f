"""Makes submission light: requests come in from any thread, one thread steps the engine, events go out.

Owns every request from its submission to its one final event, and the stepping thread. `add_request` makes an id,
stamps the time and enqueues; workers tokenize texts; tokenized requests join the core's queue, kept in order of
submission: a request with a slower text goes before younger waiting ones, and delays none meanwhile. Knows nothing of
batches, blocks and arithmetic: the core owns them.
"""

import queue
import threading
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stenograph.core.clock import Clock
from stenograph.core.errors import CallerError, EngineUnavailable, NobodyError, StenographError, TokenizationFailed
from stenograph.core.types import Chunk, EngineTimes, Finish, FinishReason, RequestId, SamplingParams
from stenograph.embedded.tokenize_workers import TextTokenizer, Tokenized, TokenizeStats, TokenizeWorkers
from stenograph.embedded.wire import Failed, FailureKind, Sampled, Times

MAX_ARRIVING = 1024
"""The most requests on their way to the engine; more are refused."""

Emit = Callable[[Sequence[Sampled | Failed]], None]
"""Takes events in order, on the stepping thread, at most once a step and once before it; it may call the loop."""


class SteppedCore(Protocol):
    """The engine as its loop drives it, from one thread. Its `wake`, where it has one, is the loop's."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether anything waits or runs."""
        ...

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        ...

    def add(
        self,
        request_id: RequestId,
        prompt: "array[int]",
        params: SamplingParams,
        times: Times,
        arrival: int,
        *,
        routes_from: int | None = None,
        score_from: int | None = None,
    ) -> Failed | None:
        """Enqueue, ordered by `arrival`; from now on the core stamps `times`. Returns Failed for a refused request."""
        ...

    def abort(self, request_id: RequestId) -> Sampled | None:
        """End a request now; None if it has already ended."""
        ...

    def step(self) -> list[Sampled | Failed]:
        """One step; the events, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """`num_arriving` requests are on their way to the core, `num_in_core` are there; the rest are totals."""

    num_arriving: int
    num_in_core: int
    num_submitted: int
    num_refused: int
    tokenize: TokenizeStats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Request:
    """A request before the core has it. Compared by identity: an id may be reused once its request has ended."""

    request_id: RequestId
    arrival: int
    params: SamplingParams
    times: Times
    routes_from: int | None = None
    score_from: int | None = None


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A request's ids, or the error of its tokenization."""

    request: _Request
    tokenized: Tokenized


@dataclass(frozen=True, slots=True)
class _Abort:
    """A request is to end."""

    request_id: RequestId


_Message = _Arrived | _Abort | Callable[[], None] | None
"""A message in the inbox; None only wakes."""


class EngineLoop:
    """Takes requests on any thread and emits events on the stepping thread. End it with `close`.

    `num_workers` threads tokenize; with 0, `add_request` tokenizes, for comparison.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer[str],
        *,
        num_workers: int,
        emit: Emit,
        clock: Clock,
        max_arriving: int = MAX_ARRIVING,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._max_arriving = max_arriving
        self._workers: TokenizeWorkers[_Request, str] = TokenizeWorkers(tokenizer, num_workers, self._arrive)
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._unsent: list[Sampled | Failed] = []  # owned by the stepping thread: not emitted yet
        self._prefix = uuid.uuid4().hex[:8]
        self._lock = threading.Lock()  # guards everything below
        self._arriving: dict[RequestId, _Request] = {}
        self._in_core: dict[RequestId, _Request] = {}
        self._num_submitted = self._num_refused = 0
        self._thread: threading.Thread | None = None
        self._began = self._closed = False

    def __repr__(self) -> str:
        return f"<EngineLoop {len(self._arriving)} arriving, {len(self._in_core)} in the core>"

    # -- from any thread

    def add_request(
        self,
        prompt: "str | array[int]",
        params: SamplingParams,
        request_id: RequestId | None = None,
        *,
        routes_from: int | None = None,
        score_from: int | None = None,
    ) -> RequestId:
        """Enqueue a request, of text or of ids, and return its id. Its outcome arrives as events.

        The last chunk has the experts of its positions from `routes_from` on; of none if it is None. With `score_from`
        its own tokens from there on are scored, and none is sampled.

        Raises EngineUnavailable once the loop is closed, and ValueError for the id of a running request; then no
        request is made, and no event follows.
        """
        request, refused = self._register(params, request_id, self._clock.monotonic(), routes_from, score_from)
        if refused is not None:
            self._inbox.put(_Arrived(request, refused))
        elif isinstance(prompt, str):
            try:
                self._workers.submit(request, prompt)
            except BaseException:
                with self._lock:
                    self._arriving.pop(request.request_id, None)
                raise
        else:
            self._inbox.put(_Arrived(request, prompt))
        return request.request_id

    def abort(self, request_id: RequestId) -> None:
        """End a request soon, wherever it is; its final event confirms it. Does nothing if it has ended."""
        self._inbox.put(_Abort(request_id))

    def between_steps(self, act: Callable[[], None]) -> None:
        """Have `act` called on the stepping thread, between two steps; not after `close`."""
        self._inbox.put(act)

    def wake(self) -> None:
        """Check again whether the core has work: something awaited is done."""
        self._inbox.put(None)

    def stats(self) -> LoopStats:
        """Counts of requests by where they are now."""
        tokenize = self._workers.stats()
        with self._lock:
            return LoopStats(
                num_arriving=len(self._arriving),
                num_in_core=len(self._in_core),
                num_submitted=self._num_submitted,
                num_refused=self._num_refused,
                tokenize=tokenize,
            )

    # -- its life

    def run(self, core: SteppedCore) -> None:
        """Step `core` on this thread until `close`. An exception of the core ends every request.

        Raises RuntimeError where `run` or `start` was called before.
        """
        self._begin(None)
        self._run(core)

    def start(self, core: SteppedCore) -> None:
        """`run` on a thread of its own; `close` waits for it."""
        thread = threading.Thread(target=self._run, args=(core,), name="engine-loop", daemon=True)
        self._begin(thread)

    def close(self) -> None:
        """Refuse new requests, send every open request its final event, and end.

        Waits for the step under way where `start` began it. Where `run` was called, `run` does all this and returns.
        """
        with self._lock:
            self._closed = True
            began, thread = self._began, self._thread
        self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        elif not began:
            self._end_all(FailureKind.UNAVAILABLE, "The engine was stopped.")

    def _begin(self, thread: threading.Thread | None) -> None:
        with self._lock:
            if self._began:
                raise RuntimeError("the loop runs already, or has ended")
            self._began, self._thread = True, thread
            if thread is not None:
                thread.start()

    # -- submission

    def _register(
        self,
        params: SamplingParams,
        request_id: RequestId | None,
        submitted: float,
        routes_from: int | None,
        score_from: int | None,
    ) -> tuple[_Request, EngineUnavailable | None]:
        """Make the request. From here on it gets exactly one final event, even if it is refused as one too many."""
        with self._lock:
            if self._closed:
                raise EngineUnavailable("The engine was stopped.")
            if request_id is not None and (request_id in self._arriving or request_id in self._in_core):
                raise ValueError(f"there is a request {request_id!r} already")
            refused = None
            if len(self._arriving) >= self._max_arriving:
                refused = EngineUnavailable(f"{self._max_arriving} requests are already on their way to the engine.")
                self._num_refused += 1
            self._num_submitted += 1
            request = _Request(
                request_id=request_id or RequestId(f"{self._prefix}-{self._num_submitted}"),
                arrival=self._num_submitted,
                params=params,
                times=Times(submitted=submitted),
                routes_from=routes_from,
                score_from=score_from,
            )
            self._arriving[request.request_id] = request
        return request, refused

    def _arrive(self, request: _Request, tokenized: Tokenized) -> None:
        self._inbox.put(_Arrived(request, tokenized))

    # -- on the thread that steps

    def _run(self, core: SteppedCore) -> None:
        kind, message = FailureKind.INTERNAL, "The engine failed; nothing of the request was kept."
        try:
            self._step_until_closed(core)
            kind, message = FailureKind.UNAVAILABLE, "The engine was stopped."
            for request_id in self._in_core:
                core.abort(request_id)
        finally:
            self._end_all(kind, message)

    def _step_until_closed(self, core: SteppedCore) -> None:
        while self._take(core):
            if core.has_work:
                for event in core.step():
                    self._say(event)
                self._flush()

    def _take(self, core: SteppedCore) -> bool:
        """Wait if there is nothing to step, then handle the messages in the inbox; False if the loop is closed.

        Messages arriving meanwhile wait for the next step, so a flood of requests delays no step.
        """
        if not (self._closed or core.has_work):
            if not core.has_requests:
                core.check()  # delays no request
            self._do(core, self._inbox.get())
        for _ in range(self._inbox.qsize()):
            self._do(core, self._inbox.get())
        self._flush()
        return not self._closed

    def _do(self, core: SteppedCore, message: _Message) -> None:
        if isinstance(message, _Arrived | _Abort):
            if (event := self._obey(core, message)) is not None:
                self._say(event)
        elif message is not None:
            message()

    def _obey(self, core: SteppedCore, message: _Arrived | _Abort) -> Sampled | Failed | None:
        if isinstance(message, _Arrived):
            return self._join(core, message)
        request = self._arriving.get(message.request_id)
        if request is None:
            return core.abort(message.request_id) if message.request_id in self._in_core else None
        self._workers.drop(request)
        return Sampled(request_id=request.request_id, chunk=_aborted(request.times.submitted, self._clock.monotonic()))

    def _join(self, core: SteppedCore, arrived: _Arrived) -> Failed | None:
        """Hand a request to the core, unless it has ended meanwhile. Returns the event if it ends so."""
        request, tokenized = arrived.request, arrived.tokenized
        request_id = request.request_id
        if self._arriving.get(request_id) is not request:
            return None
        if not isinstance(tokenized, array):
            return Failed(
                request_id=request_id,
                kind=kind_of(tokenized),
                message=tokenized.message,
                blame=tokenized.blame,
                retry_after_s=tokenized.retry_after_s,
            )
        failed = core.add(
            request_id,
            tokenized,
            request.params,
            request.times,
            request.arrival,
            routes_from=request.routes_from,
            score_from=request.score_from,
        )
        if failed is None:
            with self._lock:
                self._in_core[request_id] = self._arriving.pop(request_id)
        return failed

    def _say(self, event: Sampled | Failed) -> None:
        """Queue an event. A final one ends its request at once, so that no later message ends it again."""
        if isinstance(event, Failed) or event.chunk.finish is not None:
            self._end(event.request_id)
        self._unsent.append(event)

    def _flush(self) -> None:
        events, self._unsent = self._unsent, []
        if events:
            self._emit(events)

    def _end(self, request_id: RequestId) -> None:
        """Forget a request with its final event; one with an interrupted submitter is forgotten already."""
        with self._lock:
            if self._arriving.pop(request_id, None) is None:
                self._in_core.pop(request_id, None)

    def _end_all(self, kind: FailureKind, message: str) -> None:
        with self._lock:
            self._closed = True
            left = [*self._arriving, *self._in_core]
        self._workers.close()
        for request_id in left:
            self._end(request_id)
            self._unsent.append(Failed(request_id=request_id, kind=kind, message=message))
        self._flush()


def _aborted(submitted: float, now: float) -> Chunk:
    """The end of a request unknown to the core."""
    times = EngineTimes(submitted=submitted, admitted=now, first_token=now, finished=now)
    return Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT), times=times)


def kind_of(error: StenographError) -> FailureKind:
    """Classify an error of tokenization by whose fault it is."""
    match error:
        case CallerError():
            return FailureKind.INVALID_REQUEST
        case NobodyError():
            return FailureKind.UNAVAILABLE
        case TokenizationFailed():
            return FailureKind.TOKENIZATION
        case _:
            return FailureKind.INTERNAL
