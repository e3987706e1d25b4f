"""The embedded engine as an `Engine`: owns its process, speaks wire.py to it, and starts it again when it dies.

Where several processes of a server share one engine, its process is their parent's: each has a connection to it
(`shared`), makes it again when it breaks, and starts nothing.

Two tasks, both owned here and ended by `aclose`: one reads the process's events, one supervises (starts, waits for the
end, starts again after a pause). A generation's chunks wait in a queue of its own, bounded by max_tokens. Text becomes
ids there too, on `tokenize_workers` threads, for whoever asks (`tokenize`).

The process knows a generation by a unique name: an abandoned one may run on for a step, and neither its last words nor
its end are those of a later one under the same request id.
"""

import asyncio
import contextlib
import itertools
import logging
import signal
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stenograph.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    StartupError,
    StenographError,
    TokenizationFailed,
    UnexpectedFailure,
)
from stenograph.core.kinds import SaltMode
from stenograph.core.telemetry import GrammarStep
from stenograph.core.types import Chunk, GrammarKind, RequestId, SamplingParams
from stenograph.core.weights import (
    ContinueGeneration,
    ControlAnswer,
    FlushCache,
    LoraCommand,
    NameWeights,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
    WeightCommand,
)
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.wire import (
    EVENTS,
    LENGTH_BYTES,
    Abort,
    Control,
    ControlKind,
    Controlled,
    Event,
    Failed,
    FailureKind,
    Generate,
    GrammarTook,
    LoadFailed,
    Piece,
    Ready,
    Sampled,
    TokenizedText,
    TokenizeText,
    frame,
)
from stenograph.engine.base import Capabilities, Engine, EngineHealth, EngineState, GenerateRequest
from stenograph.model.tokenizer import Span, why_not_encoded

if TYPE_CHECKING:
    from stenograph.engine.scoring import ScoreRequest, Scores

log = logging.getLogger(__name__)

KEPT_APART = frozenset({SaltMode.FOLLOW})
"""Without a salt: where weights are swapped, everything computed by the ones before is forgotten."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
STOP_GRACE_S = 5.0

Answer = Chunk | StenographError


class EmbeddedEngine(Engine):
    """The engine in a child process."""

    def __init__(self, model: Path, options: EmbeddedOptions, *, shared: Path | None = None) -> None:
        """`shared` is the socket of the common process; None: the engine has a process of its own."""
        self._model = model
        self._options = options
        self._shared = shared
        self._commands: asyncio.StreamWriter | None = None
        self._capabilities: Capabilities | None = None
        self._health = EngineHealth(state=EngineState.STARTING, detail="loading the model")
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._names: dict[RequestId, RequestId] = {}  # of generations that somebody waits for, in the process
        self._numbers = itertools.count(1)
        self._answers: dict[RequestId, asyncio.Queue[Answer]] = {}  # by name, as is what follows
        self._texts: dict[RequestId, asyncio.Future[array[int]]] = {}
        self._controls: dict[RequestId, asyncio.Future[Controlled]] = {}
        self._report_grammar_times: Callable[[GrammarStep, Sequence[float]], None] | None = None
        self._in_process: set[RequestId] = set()
        self._started: asyncio.Future[None] | None = None
        self._refusal: str | None = None  # of the process that runs now, or ran last: why it cannot load its model
        self._pause_s = FIRST_PAUSE_S
        self._stop = asyncio.Event()

    def __repr__(self) -> str:
        return f"<EmbeddedEngine {self._health.state} {len(self._answers)} running, {len(self._texts)} texts>"

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "capabilities are known once start has returned"
        return self._capabilities

    @property
    def pid(self) -> int:
        """The id of the running process, or of the last one."""
        assert self._process is not None, "there is a process once start has been called"
        return self._process.pid

    @property
    def num_running(self) -> int:
        """Generations not yet ended by the process, including those without a waiter."""
        return len(self._in_process)

    @property
    def tokenizes(self) -> bool:
        return self._options.tokenize_workers > 0

    def report_grammar_times(self, report: Callable[[GrammarStep, Sequence[float]], None]) -> None:
        self._report_grammar_times = report

    def health(self) -> EngineHealth:
        return self._health

    async def start(self) -> None:
        """Start the process and wait until its model is loaded. Raises StartupError."""
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._supervisor = loop.create_task(self._supervise(self._started), name="embedded-engine")
        await self._started

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self._run(request.request_id, partial(_command, request, reports_routes=self._options.reports_routes))

    async def score(self, request: "ScoreRequest") -> "Scores":
        """Prefills behind every request for tokens, one after the other; they end early by being left."""
        if request.policy is not None:
            raise InvalidRequest("The embedded engine has one policy: leave policy out.")
        return request.joined([await self._score(part) for part in request.parts()])

    async def _score(self, request: "ScoreRequest") -> "Scores":
        params = SamplingParams(num_top_logprobs=request.num_top)
        forced = partial(Generate, ids=request.ids.tobytes(), params=params, score_from=request.start)
        async with aclosing(self._run(request.request_id, lambda name: frame(forced(request_id=name)))) as chunks:
            (chunk,) = [chunk async for chunk in chunks]
        return request.answered_in_rows(chunk.logprobs, chunk.top_logprobs, version=chunk.weight_version)

    async def _run(
        self, request_id: RequestId, command_of: Callable[[RequestId], bytes]
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request to the process, begun by the command of its name there."""
        self._check_ready()
        if request_id in self._names:
            raise ValueError(f"there is a generation {request_id!r} already")
        name = RequestId(f"{request_id}#{next(self._numbers)}")
        command = command_of(name)
        answers = self._answers[name] = asyncio.Queue()
        self._names[request_id] = name
        self._in_process.add(name)
        self._send(command)
        ended = False
        try:
            while not ended:
                answer = await answers.get()
                ended = isinstance(answer, StenographError) or answer.finish is not None
                if isinstance(answer, StenographError):
                    raise answer
                yield answer
        finally:
            del self._answers[name], self._names[request_id]
            if not ended:
                self._send(frame(Abort(request_id=name)))

    async def tokenize(self, spans: Sequence[Span]) -> "array[int]":
        self._check_ready()
        name = RequestId(f"text#{next(self._numbers)}")
        pieces = tuple(Piece(text=span.text, trusted=span.trusted) for span in spans)
        try:
            command = frame(TokenizeText(request_id=name, pieces=pieces))
        except UnicodeEncodeError as error:
            raise why_not_encoded("".join(span.text for span in spans)) from error
        ids: asyncio.Future[array[int]] = asyncio.get_running_loop().create_future()
        self._texts[name] = ids
        self._send(command)
        try:
            return await ids
        finally:
            del self._texts[name]
            if ids.cancelled():
                self._send(frame(Abort(request_id=name)))

    async def abort(self, request_id: RequestId) -> bool:
        name = self._names.get(request_id)
        if name is not None:
            self._send(frame(Abort(request_id=name)))
        return name is not None

    async def find_version(self) -> str | None:
        return self._options.weight_version

    def follow_version(self, version: str | None, lacking: Collection[str]) -> None:
        if version is not None:
            self._options = replace(self._options, weight_version=version)

    async def control(self, command: WeightCommand) -> Sequence[ControlAnswer]:
        """The process does it between two steps. Weights once taken hold for the next process too, if it dies."""
        self._check_ready()
        if (problem := _not_done(command)) is not None:
            return (ControlAnswer(name=self.name, problem=problem),)
        name = RequestId(f"control#{next(self._numbers)}")
        answered: asyncio.Future[Controlled] = asyncio.get_running_loop().create_future()
        self._controls[name] = answered
        self._send(frame(_control(command, name)))
        try:
            event = await answered
        except EngineUnavailable as error:
            return (ControlAnswer(name=self.name, problem=error.message),)
        finally:
            del self._controls[name]
        if not event.problem and isinstance(command, UpdateWeights):
            self._options = replace(self._options, weights=command.path, weight_version=command.version)
        elif not event.problem:  # another process may have named them meanwhile
            self._options = replace(self._options, weight_version=event.version)
        return (ControlAnswer(name=self.name, problem=event.problem, num_paused=event.num_paused),)

    async def aclose(self) -> None:
        """End the process: by closing its input, and after a while by force."""
        self._stop.set()
        self._health = EngineHealth(state=EngineState.STOPPED, detail="stopped")
        supervisor = self._supervisor
        if self._commands is not None:
            self._commands.close()
        if supervisor is None:
            return
        done, _ = await asyncio.wait({supervisor}, timeout=STOP_GRACE_S)
        if not done:
            supervisor.cancel()
            await asyncio.wait({supervisor})

    # -- the process

    async def _supervise(self, started: "asyncio.Future[None]") -> None:
        """Run the process again and again until `aclose`; the first load's failure ends it all."""
        try:
            while not self._stop.is_set():
                ended = await self._run_once(started)
                if self._stop.is_set() or (started.done() and started.exception() is not None):
                    return
                self._go_down(ended)
                self._fail_all()
                log.error("%s; starting it again in %g s", self._health.detail, self._pause_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        except OSError as error:  # the process cannot even be started
            self._go_down(f"cannot start its process: {error}")
            log.error("the embedded engine is down for good: %s", self._health.detail)
        finally:
            self._fail_all()
            if not started.done():
                started.set_exception(StartupError("the embedded engine was stopped before its model was loaded"))

    async def _run_once(self, started: "asyncio.Future[None]") -> str:
        """One life of the process, or of the connection to it; returns why it ended, in its own words if it had any."""
        self._refusal = None
        if self._shared is not None:
            return await self._run_shared(self._shared, started)
        process = self._process = await asyncio.create_subprocess_exec(
            *self._options.command(self._model),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._options.environment(),
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which drains first
        )
        assert process.stdout is not None
        self._commands = process.stdin
        try:
            await self._read_events(process.stdout, started)
        finally:
            code = await _end_of(process)
        if not started.done():
            detail = f"the embedded engine {_death(code)} while it loaded {self._model}"
            self._go_down(detail)
            started.set_exception(StartupError(detail))
        return self._refusal or f"the embedded engine's process {_death(code)}"

    async def _run_shared(self, socket: Path, started: "asyncio.Future[None]") -> str:
        """One life of the connection to the shared process."""
        try:
            events, self._commands = await asyncio.open_unix_connection(socket)
        except OSError as error:
            return f"the embedded engine cannot be reached: {error}"
        try:
            await self._read_events(events, started)
        finally:
            self._commands.close()
        return "the embedded engine's process has ended"

    async def _read_events(self, events: asyncio.StreamReader, started: "asyncio.Future[None]") -> None:
        """Hand out events until the process's output ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await events.readexactly(LENGTH_BYTES), "little")
                payload = await events.readexactly(size)
                try:
                    event = EVENTS.decode(payload)
                except (msgspec.MsgspecError, ValueError) as error:
                    log.error("cannot decode an event from the embedded engine: %s", error)
                    return
                self._take(event, started)

    def _take(self, event: Event, started: "asyncio.Future[None]") -> None:
        match event:
            case Ready():
                self._become_ready(event, started)
            case LoadFailed():
                self._refuse(event, started)
            case Sampled():
                self._answer(event.request_id, event.chunk)
            case Failed():
                self._answer(event.request_id, _error_of(event))
            case TokenizedText():
                self._answer_text(event.request_id, event.prompt())
            case Controlled():
                if (answered := self._controls.get(event.request_id)) is not None and not answered.done():
                    answered.set_result(event)
            case GrammarTook():
                if self._report_grammar_times is not None:
                    for step, durations_s in event.durations_s.items():
                        self._report_grammar_times(step, durations_s)

    def _become_ready(self, event: Ready, started: "asyncio.Future[None]") -> None:
        self._capabilities = Capabilities(
            engine="embedded",
            model=event.model,
            vocab_size=event.vocab_size,
            max_context_tokens=event.max_context_tokens,
            grammars=frozenset(map(GrammarKind, event.grammars)),
            streams=True,
            reports_support=True,
            salt_modes=KEPT_APART,
        )
        self._health = EngineHealth(state=EngineState.READY)
        if not started.done():
            started.set_result(None)

    def _refuse(self, event: LoadFailed, started: "asyncio.Future[None]") -> None:
        self._refusal = event.message
        self._go_down(event.message)
        if not started.done():
            started.set_exception(StartupError(event.message))

    def _answer(self, name: RequestId, answer: Answer) -> None:
        """Give a generation its next answer; an answer without a waiter is dropped."""
        if name in self._texts and isinstance(answer, StenographError):
            self._answer_text(name, answer)
        if isinstance(answer, StenographError) or answer.finish is not None:
            self._in_process.discard(name)
        if (answers := self._answers.get(name)) is not None:
            answers.put_nowait(answer)
            self._pause_s = FIRST_PAUSE_S  # it works: the next death is a new one

    def _answer_text(self, name: RequestId, answer: "array[int] | StenographError") -> None:
        """Give a text its ids, or say why it has none; an answer without a waiter is dropped."""
        ids = self._texts.get(name)
        if ids is None or ids.done():
            return
        if isinstance(answer, StenographError):
            ids.set_exception(answer)
        else:
            ids.set_result(answer)

    def _check_ready(self) -> None:
        if self._health.state is not EngineState.READY:
            raise EngineUnavailable(
                f"The embedded engine is not ready: {self._health.detail}.", retry_after_s=self._pause_s + 2.0
            )

    def _go_down(self, detail: str) -> None:
        if not self._stop.is_set():
            self._health = EngineHealth(state=EngineState.DOWN, detail=detail)

    def _fail_all(self) -> None:
        self._in_process.clear()
        for answers in self._answers.values():
            answers.put_nowait(self._lost())
        for name in self._texts:
            self._answer_text(name, self._lost())
        for answered in self._controls.values():
            if not answered.done():
                why = f"the engine ended before it had answered: {self._health.detail}"
                answered.set_exception(EngineUnavailable(why))

    def _lost(self) -> EngineUnavailable:
        if self._stop.is_set():
            return EngineUnavailable("The turn was lost: the engine was stopped.")
        return EngineUnavailable(
            f"The turn was lost: {self._health.detail}. It is being restarted; nothing of the turn was kept.",
            retry_after_s=self._pause_s + 2.0,
        )

    def _send(self, command: bytes) -> None:
        """Write a framed command; a pipe just broken is the supervisor's to find."""
        if self._commands is not None and not self._commands.is_closing():
            self._commands.write(command)


def _command(request: GenerateRequest, name: RequestId, *, reports_routes: bool) -> bytes:
    """The command to start a generation in the process. Raises InvalidRequest for text without a UTF-8 form."""
    prompt = request.prompt
    routes_from = prompt.first_new_row if reports_routes else None
    try:
        return frame(
            Generate(request_id=name, ids=prompt.ids.tobytes(), params=request.params, routes_from=routes_from)
        )
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"A stop string or grammar has no UTF-8: {error}") from error


def _not_done(command: WeightCommand) -> str | None:
    """The reason why the embedded engine does not do this; None where it does."""
    if isinstance(command, UpdateWeights):
        if not command.flushes_cache:
            return (
                "the embedded engine computes all keys and values again with new weights: tokens after those of other"
                " weights are sampled by neither. Leave flush_cache out, or send true"
            )
        if command.options:
            return f"the embedded engine does not know {', '.join(sorted(command.options))}"
    return "the embedded engine takes no LoRAs" if isinstance(command, LoraCommand) else None


def _control(command: WeightCommand, name: RequestId) -> Control:
    match command:
        case UpdateWeights(path=path, version=version):
            return Control(request_id=name, kind=ControlKind.LOAD, path=path, version=version)
        case PauseGeneration(mode=PauseMode.IN_PLACE):
            return Control(request_id=name, kind=ControlKind.PAUSE)
        case PauseGeneration():
            return Control(request_id=name, kind=ControlKind.RETRACT)
        case ContinueGeneration():
            return Control(request_id=name, kind=ControlKind.RESUME)
        case FlushCache():
            return Control(request_id=name, kind=ControlKind.FLUSH)
        case NameWeights(version=version):
            return Control(request_id=name, kind=ControlKind.NAME, version=version)
        case _:
            raise AssertionError("it takes no LoRAs")


async def _end_of(process: asyncio.subprocess.Process) -> int:
    """The exit code of a process, after the end of its output; closing its input ends it, and after a while force does.

    A possibly dead process is not killed at once: `kill` would collect the exit status itself, and `wait` would know
    nothing but 255.
    """
    if process.stdin is not None:
        process.stdin.close()
    try:
        return await asyncio.wait_for(process.wait(), STOP_GRACE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


def _death(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _error_of(event: Failed) -> StenographError:
    match event.kind:
        case FailureKind.INVALID_REQUEST:
            return InvalidRequest(event.message, blame=event.blame)
        case FailureKind.UNAVAILABLE:
            return EngineUnavailable(event.message, retry_after_s=event.retry_after_s or 1.0)
        case FailureKind.TOKENIZATION:
            return TokenizationFailed(event.message)
        case FailureKind.INTERNAL:
            return UnexpectedFailure(event.message)
