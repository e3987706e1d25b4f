"""Encodes a text in a process of its own, whose calls hold no GIL of the server's.

Owns the process from its start to its end, and what passes: the tokenizer.json, the library's name and the text, then
the ids. Each end knows the other by its pipe alone: a child without a parent ends at its first write.
"""

import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

from stenograph.core.errors import TokenizationFailed
from stenograph.core.types import token_ids
from stenograph.model.fast_encoder import choose_encoder
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer_json import plain_tokenizer_json, read_tokenizer_json

_AT_ONCE = 1 << 18
"""Characters or bytes that pass in one call: less than a millisecond with the GIL held."""
_SIZE_BYTES = 4
_NICE = 5
"""The server's loop goes first."""


def encode_apart(tokenizer_json: str, kind: EncoderKind, text: str) -> "array[int]":
    """Ids [T] of plain text, by a new process with the same library.

    Raises OSError: there can be no process. Raises UnicodeEncodeError: the text has a lone surrogate. Raises
    TokenizationFailed: the process died.
    """
    command = [sys.executable, "-m", __name__, kind]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which drains first
        ) as process,
    ):
        try:
            ids = _exchange(process, (tokenizer_json, text))
        except BaseException:
            process.kill()
            raise
        if process.wait() == 0:
            return ids
        log.seek(0)
        last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise TokenizationFailed(
        f"The process that encoded a text of {len(text)} characters ended with exit code {process.returncode}: {last}"
    )


def _exchange(process: "subprocess.Popen[bytes]", texts: tuple[str, ...]) -> "array[int]":
    """Send the texts, and read the ids. Those of a process that has died are not whole: its exit code says so."""
    assert process.stdin is not None
    assert process.stdout is not None
    ids = token_ids()
    with suppress(BrokenPipeError):
        for text in texts:
            _send(process.stdin, text)
        process.stdin.flush()
    while some := process.stdout.read(_AT_ONCE):
        ids.frombytes(some[: len(some) - len(some) % ids.itemsize])
    with suppress(BrokenPipeError):
        process.stdin.close()
    return ids


def _send(to: IO[bytes], text: str) -> None:
    """Write a text: pieces with their sizes before them, and a size of 0."""
    for start in range(0, len(text), _AT_ONCE):
        piece = text[start : start + _AT_ONCE].encode()
        to.write(len(piece).to_bytes(_SIZE_BYTES, "little") + piece)
    to.write(bytes(_SIZE_BYTES))


def _pieces(of: IO[bytes]) -> Iterator[str]:
    while num_bytes := int.from_bytes(of.read(_SIZE_BYTES), "little"):
        yield of.read(num_bytes).decode()


def main() -> None:
    """Read a tokenizer.json and a text from stdin; write the ids to stdout."""
    os.nice(_NICE)
    tokenizer_json, text = ("".join(_pieces(sys.stdin.buffer)) for _ in range(2))
    document = read_tokenizer_json(tokenizer_json)
    chosen = choose_encoder(plain_tokenizer_json(document), prefer=EncoderKind(sys.argv[1]))
    sys.stdout.buffer.write(memoryview(chosen.encoder.encode(text)).cast("B"))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
