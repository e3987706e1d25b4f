"""The engine's process: `python -m stenograph.embedded.child MODEL --max-batch N --kv-tokens N`.

Commands come on standard input, events go to standard output (wire.py); prints of libraries go to standard error. One
thread reads and only enqueues, the main thread steps. When standard input ends, so does the process: a server that was
killed leaves no orphan.
"""

import argparse
import os
import queue
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError
from stenograph.core.types import GrammarKind
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.grammar import GrammarCompiler
from stenograph.embedded.model import LlamaModel
from stenograph.embedded.weights import load_weights
from stenograph.embedded.wire import COMMANDS, Command, Drew, Failed, Generate, LoadFailed, Ready, frame, read_frame
from stenograph.render.fast_encoder import EncoderKind
from stenograph.render.model_files import load_model_files
from stenograph.render.tokenizer import Tokenizer

Inbox = queue.SimpleQueue[Command | None]
"""Commands; None only wakes the main thread."""


def main() -> None:
    """Serve until standard input ends."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not become a frame
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--kv-tokens", type=int, required=True)
    options = parser.parse_args()
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(sys.stdin.buffer, inbox), daemon=True).start()
    limits = EngineLimits(max_batch=options.max_batch, kv_tokens=options.kv_tokens)
    try:
        core, ready = load(options.model, limits, inbox)
    except StartupError as error:
        _send(events, frame(LoadFailed(message=str(error))))
        return
    _send(events, frame(ready))
    _serve(core, inbox, events)


def load(path: Path, limits: EngineLimits, inbox: Inbox) -> tuple[EngineCore, Ready]:
    """Read the model and make its engine. Raises StartupError."""
    files = load_model_files(path)
    config, weights = load_weights(path)
    tokenizer = Tokenizer(files.tokenizer_json, prefer=EncoderKind.REFERENCE)  # it encodes grammars, and no more
    eos_ids = tuple(id_ for id_ in files.eos_token_ids if id_ < config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        raise StartupError(f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
    core = EngineCore(
        LlamaModel(config, weights),
        tokenizer,
        GrammarCompiler(tokenizer, vocab_size=config.vocab_size, eos_ids=eos_ids),
        eos_ids=eos_ids,
        limits=limits,
        clock=SystemClock(),
        wake=lambda: inbox.put(None),
        weight_version=files.name,
    )
    ready = Ready(
        model=files.name,
        vocab_size=config.vocab_size,
        max_context_tokens=core.max_context_tokens,
        grammars=tuple(GrammarKind),
    )
    return core, ready


def _serve(core: EngineCore, inbox: Inbox, events: BinaryIO) -> None:
    """Take every command that is there, make one step, send what it brought; wait where there is nothing to do."""
    while True:
        out = bytearray()
        while core.has_work is False or not inbox.empty():
            answer = _obey(core, inbox.get())
            if answer:
                out += answer
                break
        for event in core.step():
            out += frame(event)
        if out:
            _send(events, out)


def _obey(core: EngineCore, command: Command | None) -> bytes:
    if command is None:
        return b""
    answer: Failed | Drew | None
    if isinstance(command, Generate):
        answer = core.add(command.request_id, command.prompt(), command.params)
    else:
        answer = core.abort(command.request_id)
    return b"" if answer is None else frame(answer)


def _read_commands(stream: BinaryIO, inbox: Inbox) -> None:
    """Enqueue commands until the input ends; then, or on what is no command, end the whole process."""
    code = 1
    try:
        while (payload := read_frame(stream)) is not None:
            inbox.put(COMMANDS.decode(payload))
        code = 0
    finally:
        os._exit(code)


def _send(events: BinaryIO, data: bytes | bytearray) -> None:
    try:
        view = memoryview(data)
        while view:
            view = view[events.write(view) :]
    except BrokenPipeError:
        os._exit(0)  # the server is gone; nobody is left to tell


if __name__ == "__main__":
    main()
