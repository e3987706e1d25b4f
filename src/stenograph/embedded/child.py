"""The engine's process: `python -m stenograph.embedded.child MODEL OPTIONS`, OPTIONS as options.py writes them.

Commands come on standard input, events go to standard output (wire.py); prints of libraries go to standard error. One
thread reads and only submits, the main thread steps. When standard input ends, so does the process: a server that was
killed leaves no orphan.
"""

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError
from stenograph.embedded.engine_core import EngineCore
from stenograph.embedded.forwards import load_forward
from stenograph.embedded.grammar import GrammarCompiler
from stenograph.embedded.loop import Emit, EngineLoop
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.wire import COMMANDS, Command, Drew, Failed, Generate, LoadFailed, Ready, frame, read_frame
from stenograph.render.fast_encoder import EncoderKind
from stenograph.render.model_files import load_model_files
from stenograph.render.tokenizer import Tokenizer


def main() -> None:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not become a frame
    path, options = Path(sys.argv[1]), EmbeddedOptions.from_json(sys.argv[2])
    loaded: Future[EngineLoop] = Future()
    threading.Thread(target=_read_commands, args=(sys.stdin.buffer, loaded), daemon=True).start()

    def emit(events: Sequence[Drew | Failed]) -> None:
        for event in events:
            loaded.result().pop_times(event.request_id)  # there with the last event, which has what the server wants
        _send(out, b"".join(map(frame, events)))

    try:
        loop, core, ready = load(path, options, emit)
        loaded.set_result(loop)
        _send(out, frame(ready))
        loop.run(core)
    except StartupError as error:
        _send(out, frame(LoadFailed(message=str(error))))
        os._exit(0)  # at an orderly exit, Python aborts with a dump of itself: the reading thread holds standard input
    except BaseException:  # noqa: BLE001 -- as it would end the process, but without that dump
        traceback.print_exc()
        os._exit(1)


def load(path: Path, options: EmbeddedOptions, emit: Emit) -> tuple[EngineLoop, EngineCore, Ready]:
    """Read the model and make its engine, which hands its events to `emit`. Raises StartupError."""
    files, limits, clock = load_model_files(path), options.limits, SystemClock()
    forward = load_forward(
        path,
        kind=options.forward,
        device=options.torch_device,
        dtype=options.torch_dtype,
        num_kv_tokens=limits.num_kv_rows,
    )
    vocab_size = forward.config.vocab_size
    tokenizer = Tokenizer(files.tokenizer_json, prefer=EncoderKind.REFERENCE)  # it encodes grammars, and no more
    if tokenizer.vocab_size > vocab_size:
        raise StartupError(f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model {vocab_size}")
    eos_ids = tuple(id_ for id_ in files.eos_token_ids if id_ < vocab_size)
    loop = EngineLoop(tokenizer, num_workers=0, emit=emit, clock=clock)  # prompts come as ids
    grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids, backend=options.grammar_backend)
    core = EngineCore(
        forward,
        tokenizer,
        grammars,
        eos_ids=eos_ids,
        limits=limits,
        clock=clock,
        wake=loop.wake,
        weight_version=files.name,
    )
    ready = Ready(
        model=files.name,
        vocab_size=vocab_size,
        max_context_tokens=core.max_context_tokens,
        grammars=tuple(sorted(grammars.kinds)),
    )
    return loop, core, ready


def _obey(loop: EngineLoop, command: Command) -> None:
    if isinstance(command, Generate):
        loop.add_request(command.prompt(), command.params, command.request_id)
    else:
        loop.abort(command.request_id)


def _read_commands(stream: BinaryIO, loaded: "Future[EngineLoop]") -> None:
    """Submit what comes until the input ends; then, or on what is no command, end the whole process."""
    code = 1
    try:
        while (payload := read_frame(stream)) is not None:
            _obey(loaded.result(), COMMANDS.decode(payload))
        code = 0
    except BaseException:
        traceback.print_exc()  # or nobody would hear of it: threads are not waited for
        raise
    finally:
        os._exit(code)


def _send(out: BinaryIO, data: bytes) -> None:
    try:
        view = memoryview(data)
        while view:
            view = view[out.write(view) :]
    except BrokenPipeError:
        os._exit(0)  # the server is gone; nobody is left to tell


if __name__ == "__main__":
    main()
