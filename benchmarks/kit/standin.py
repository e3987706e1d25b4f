"""An engine that costs next to nothing: one reply, in SGLang's wire shape, from a process of its own.

    python -m benchmarks.kit.standin --shape '{"num_tokens": 60}'

It shares the machine's cores with what is measured, so that a request costs it one pass of a parser in C and one write
of bytes made at the start. Of a request it looks at two things, how many `input_ids` there are (it counts commas) and
its `rid`, which the reply must have; the rest is constant.
"""

import argparse
import asyncio
import gc
import os
import sys
from typing import cast

import httptools
import msgspec
import numpy as np
import uvloop

from benchmarks.kit.reply_shape import RID, ReplyShape, chat_reply, native_reply

CHAT_PATH = b"/v1/chat/completions"
NATIVE_PATHS = (b"/generate", b"/v1/completions")
"""The first is what the server asks for a completion; the second, what the load asks straight."""
IDS_KEY = b'"input_ids":['
"""A quote within a message is escaped, so that this is never found in one."""
RID_KEY = b'"rid":'
RID_WINDOW = 4096
"""The id stands at most so many bytes before the last key."""
COMMA = ord(",")
BUFFER_BYTES = 2**18


def head(status: bytes, num_bytes: int) -> bytes:
    """The head of a reply."""
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, num_bytes)


def num_input_ids(body: bytes) -> int:
    """The number of ids of a chat request; 1 where it has none, as those have that come straight from a client."""
    last_key_end = body.rfind(b'"') + 1  # a search for one byte costs a tenth of one for twelve; the ids come last
    begin = last_key_end - len(IDS_KEY) + 2
    if begin < 0 or not body.startswith(IDS_KEY, begin):
        begin = body.find(IDS_KEY)
        if begin < 0:
            return 1
    ids = np.frombuffer(body, np.uint8)[begin : body.index(b"]", begin)]
    return int(np.count_nonzero(ids == COMMA)) + 1  # `bytes.count` takes ten times as long


def rid_of(body: bytes) -> bytes:
    """The request's id, as JSON; that of the reply's own shape where it has none."""
    end = body.rfind(b'"') + 1
    begin = body.rfind(RID_KEY, max(0, end - RID_WINDOW), end)
    if begin < 0:
        return RID
    begin += len(RID_KEY)
    return body[begin : body.index(b'"', begin + 1) + 1]


class Answers:
    """The answer to each path, as pieces for a socket."""

    def __init__(self, shape: ReplyShape) -> None:
        models = b'{"object":"list","data":[{"id":"stand-in","object":"model"}]}'
        empty = [head(b"200 OK", 0)]
        native = native_reply(shape)
        self._templates = {CHAT_PATH: chat_reply(shape), **dict.fromkeys(NATIVE_PATHS, native)}
        self._fixed: dict[bytes, list[bytes]] = {
            b"/health": empty,
            b"/abort_request": empty,
            b"/v1/models": [head(b"200 OK", len(models)), models],
        }
        self._not_found = [head(b"404 Not Found", 2), b"{}"]

    def answer(self, path: bytes, body: bytes) -> list[bytes]:
        """The pieces of an answer."""
        if (template := self._templates.get(path)) is None:
            return self._fixed.get(path, self._not_found)
        pieces = template.filled(rid_of(body), num_input_ids(body))
        return [head(b"200 OK", sum(map(len, pieces))), *pieces]


class StandInConnection(asyncio.BufferedProtocol):
    """One client. All connections share `buffer`: between `get_buffer` and `buffer_updated` nothing else runs."""

    def __init__(self, answers: Answers, buffer: memoryview) -> None:
        self._answers = answers
        self._buffer = buffer
        self._url = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.close()

    # -- called by the parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url  # it may come in pieces

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._transport is not None:
            self._transport.writelines(self._answers.answer(self._url, b"".join(self._body)))


async def _serve(shape: ReplyShape, port: int, *, until_stdin_closes: bool) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    answers, buffer = Answers(shape), memoryview(bytearray(BUFFER_BYTES))
    server = await loop.create_server(lambda: StandInConnection(answers, buffer), "127.0.0.1", port, backlog=2048)
    if until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), _read_stdin, ended)
    sys.stdout.write(f'{{"url":"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}}\n')
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    await ended.wait()


def _read_stdin(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        ended.set()


def main() -> None:
    """Serve until killed, or until stdin closes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kit.standin", description=__doc__)
    parser.add_argument("--shape", default="{}", help="fields of ReplyShape, as JSON")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--until-stdin-closes", action="store_true")
    options = parser.parse_args()
    shape = msgspec.json.decode(options.shape, type=ReplyShape)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(shape, options.port, until_stdin_closes=options.until_stdin_closes))


if __name__ == "__main__":
    main()
