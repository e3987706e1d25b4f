"""The engine's process: `python -m stenograph.embedded.child MODEL OPTIONS [SOCKET]`, OPTIONS as in options.py.

Commands arrive on standard input, events leave on standard output (wire.py); libraries print to standard error. One
thread reads and only submits, the main thread steps, and workers tokenize texts and send the ids. When standard input
ends, so does the process: a server that was killed leaves no orphan.

SOCKET is the descriptor of a listening socket, where a server has several processes: then commands come from all of its
connections, each gets the events of its own, and the standard ones are for the parent's `Ready` and for the end alone.
"""

import os
import socket
import sys
import threading
import traceback
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from stenograph.core.clock import SystemClock
from stenograph.core.errors import EngineUnavailable, StartupError, StenographError
from stenograph.core.loaded import entry
from stenograph.core.types import GrammarKind, RequestId
from stenograph.embedded.connections import ConnectionDesk, SendEvents
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.forward.choice import load_forward
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.loop import MAX_ARRIVING, Emit, EngineLoop, kind_of
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.tokenize_workers import Tokenized, TokenizeWorkers
from stenograph.embedded.weight_desk import WeightDesk
from stenograph.embedded.wire import (
    COMMANDS,
    Abort,
    Command,
    Control,
    Event,
    Failed,
    Generate,
    GrammarTook,
    LoadFailed,
    Piece,
    Ready,
    Sampled,
    TokenizedText,
    TokenizeText,
    frame,
    read_frame,
)
from stenograph.model.files import load_model_files
from stenograph.model.settings import EncoderKind

if TYPE_CHECKING:
    from stenograph.model.tokenizer import Tokenizer


def main() -> None:
    """Run the engine until standard input ends."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not become a frame
    path, options = Path(sys.argv[1]), EmbeddedOptions.from_json(sys.argv[2])
    tell_parent = Sender(out)
    loaded: Future[LoadedEngine] = Future()
    threading.Thread(target=_read_commands, args=(sys.stdin.buffer, loaded), daemon=True).start()
    send: SendEvents = tell_parent
    if len(sys.argv) > 3:
        desk = ConnectionDesk(lambda command: loaded.result().obey(command), lambda: loaded.result().ready)
        desk.listen(socket.socket(fileno=int(sys.argv[3])))
        send = desk.send

    def emit(events: Sequence[Sampled | Failed]) -> None:
        engine = loaded.result()
        took = engine.grammars.times.take()
        send(*events, *((GrammarTook(durations_s=dict(took)),) if took else ()))

    try:
        engine = load(path, options, emit, send)
        loaded.set_result(engine)
        tell_parent(engine.ready)
        engine.loop.run(engine.core)
    except StartupError as error:
        tell_parent(LoadFailed(message=str(error)))
        os._exit(0)  # at an orderly exit, Python aborts with a dump of itself: the reading thread holds standard input
    except BaseException:  # noqa: BLE001 -- as it would end the process, but without that dump
        traceback.print_exc()
        os._exit(1)


class Sender:
    """Writes whole events, from any thread. Ends the process when the server is gone."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def __call__(self, *events: Event) -> None:
        """Write them, in this order."""
        view = memoryview(b"".join(map(frame, events)))
        try:
            with self._lock:
                while view:
                    view = view[self._out.write(view) :]
        except BrokenPipeError:
            os._exit(0)  # the server is gone; no one is left to answer


class LateTokenizer:
    """The model's tokenizer, made when it is first needed: by a grammar, a stop string or a text. Prompts come as ids.

    It is of the file that was read at the start. Calling it raises StartupError as `Tokenizer` does.
    """

    def __init__(self, tokenizer_json: str, prefer: EncoderKind) -> None:
        self._json = tokenizer_json
        self._prefer = prefer
        self._lock = threading.Lock()
        self._made: Tokenizer | None = None

    def __call__(self) -> "Tokenizer":
        with self._lock:
            if (made := self._made) is None:
                made = self._made = entry("stenograph.model.tokenizer:Tokenizer")(self._json, prefer=self._prefer)
            return made

    def encode(self, text: str, /) -> "array[int]":
        """Ids [T] of trusted text."""
        return self().encode(text)


class PieceTokenizer:
    """Encodes the pieces of a text as the server's own tokenizer encodes spans."""

    def __init__(self, tokenizer: "Callable[[], Tokenizer]") -> None:
        self._tokenizer = tokenizer

    def encode(self, text: tuple[Piece, ...], /) -> "array[int]":
        """Ids [T]."""
        span = entry("stenograph.model.tokenizer:Span")
        return self._tokenizer().encode_spans([span(text=piece.text, trusted=piece.trusted) for piece in text])


class TextDesk:
    """Takes texts as commands and sends their ids as events. At most `MAX_ARRIVING` texts wait; more are refused."""

    def __init__(self, tokenizer: "Callable[[], Tokenizer]", num_workers: int, send: SendEvents) -> None:
        self._send = send
        self._workers: TokenizeWorkers[RequestId, tuple[Piece, ...]] = TokenizeWorkers(
            PieceTokenizer(tokenizer), num_workers, self._answer
        )

    def tokenize(self, command: TokenizeText) -> None:
        """Enqueue a text; a worker answers."""
        if self._workers.stats().num_waiting >= MAX_ARRIVING:
            busy = EngineUnavailable(f"{MAX_ARRIVING} texts are already waiting for the engine's tokenizer.")
            self._answer(command.request_id, busy)
        else:
            self._workers.submit(command.request_id, command.pieces)

    def drop(self, request_id: RequestId) -> None:
        """Forget a text that is not waited for any more; does nothing if it was answered."""
        self._workers.drop(request_id)

    def _answer(self, request_id: RequestId, tokenized: Tokenized) -> None:
        if isinstance(tokenized, StenographError):
            self._send(Failed(request_id=request_id, kind=kind_of(tokenized), message=tokenized.message))
        else:
            self._send(TokenizedText(request_id=request_id, ids=tokenized.tobytes()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A loaded engine, and the objects that take its commands."""

    loop: EngineLoop
    core: EngineCore
    grammars: GrammarCompiler
    texts: TextDesk
    tokenizer: LateTokenizer
    weights: WeightDesk
    ready: Ready

    def obey(self, command: Command) -> None:
        """Submit a command. Cheap: computes nothing, but the tokenizer before the first stop strings."""
        match command:
            case Generate():
                if command.params.stop:
                    self.tokenizer()  # here, where no step waits for it
                self.loop.add_request(
                    command.prompt(),
                    command.params,
                    command.request_id,
                    routes_from=command.routes_from,
                    score_from=command.score_from,
                )
            case TokenizeText():
                self.texts.tokenize(command)
            case Abort():
                self.texts.drop(command.request_id)
                self.loop.abort(command.request_id)
            case Control():
                self.weights.obey(command)


def load(path: Path, options: EmbeddedOptions, emit: Emit, send: SendEvents) -> LoadedEngine:
    """Load the model and build its engine. Events of steps go to `emit`, those of texts to `send`.

    Raises StartupError.
    """
    files, limits, clock = load_model_files(path), EngineLimits.of(options), SystemClock()
    forward = load_forward(
        path if options.weights is None else Path(options.weights),
        kind=options.forward,
        device=options.torch_device,
        dtype=options.torch_dtype,
        num_kv_tokens=limits.num_kv_rows,
    )
    vocab_size = forward.config.vocab_size
    if options.reports_routes and forward.config.mixture is None:
        raise StartupError(f"--replay is routed_experts, but {path} is a dense model, without experts to report")
    if options.num_ids > vocab_size:
        raise StartupError(f"{path}: the tokenizer has {options.num_ids} ids, the model {vocab_size}")
    tokenizer = LateTokenizer(files.tokenizer_json, options.encoder)
    if options.tokenize_workers:
        tokenizer()
    eos_ids = tuple(id_ for id_ in files.eos_token_ids if id_ < vocab_size)
    loop = EngineLoop(tokenizer, num_workers=0, emit=emit, clock=clock)  # prompts come as ids
    grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
    core = EngineCore(
        forward,
        tokenizer,
        grammars,
        eos_ids=eos_ids,
        limits=limits,
        clock=clock,
        wake=loop.wake,
        weight_version=options.weight_version,
    )
    ready = Ready(
        model=files.name,
        vocab_size=vocab_size,
        max_context_tokens=core.max_context_tokens,
        grammars=tuple(sorted(GrammarKind)),
    )
    texts = TextDesk(tokenizer, options.tokenize_workers, send)
    weights = WeightDesk(forward, core, loop, send)
    return LoadedEngine(
        loop=loop, core=core, grammars=grammars, texts=texts, tokenizer=tokenizer, weights=weights, ready=ready
    )


def _read_commands(stream: BinaryIO, loaded: "Future[LoadedEngine]") -> None:
    """Submit commands until the input ends; then, or on an invalid command, end the whole process."""
    code = 1
    try:
        while (payload := read_frame(stream)) is not None:
            loaded.result().obey(COMMANDS.decode(payload))
        code = 0
    except BaseException:
        traceback.print_exc()  # or the error would be lost: threads are not waited for
        raise
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
