"""llama.cpp beside the embedded engine: a server of it in a child process, spoken to over HTTP.

Owns how it is started, how it is asked, and how its stream is read. The server is the package `xllamacpp`'s, which
only the child imports; its keys, values and attention are as llama.cpp has them by itself.
"""

import importlib.util
import time
from array import array
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from benchmarks.engine.target import DrawnReply, OnSampled, TargetFailed
from benchmarks.engine.window import Instant
from benchmarks.kit.client import BUFFER_BYTES, LoadClient, RequestFailed
from benchmarks.kit.processes import Child, Children

PACKAGE = "xllamacpp"
NEEDED = f"--beside llamacpp needs llama.cpp's server: pip install {PACKAGE}"
CHILD_MODULE = "standins.llamacpp_child"
THREADS = 1
"""Those that the child gives it."""


def is_installed() -> bool:
    """Whether there is a llama.cpp to be beside."""
    return importlib.util.find_spec(PACKAGE) is not None


class _LlamaError(msgspec.Struct):
    message: str = ""


class _LlamaTimings(msgspec.Struct):
    cache_n: int = 0


class _LlamaEvent(msgspec.Struct):
    tokens: list[int] = []
    tokens_predicted: int = 0
    stop: bool = False
    timings: _LlamaTimings | None = None
    error: _LlamaError | None = None


_DECODER = msgspec.json.Decoder(_LlamaEvent)


class CompletionReader:
    """A streamed reply of `POST /completion`: tokens as they come, and how many of the prompt were cached.

    Tokens are counted by its own count: an event does not come while its text ends within a character, and the next
    has only its own id.
    """

    def __init__(self, on_sampled: OnSampled) -> None:
        self.ids: list[int] = []
        self.num_drawn = 0
        self.num_cached = 0
        self.is_ended = False
        self._on_sampled = on_sampled
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes. Raises RequestFailed for what is no such reply."""
        del now  # instants are taken where the ids go
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            name, _, value = event.strip().partition(b":")
            if name in {b"data", b"error"}:
                self._take(value)

    def _take(self, data: bytes) -> None:
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise RequestFailed("not a completion", f"{error}: {data[:200]!r}") from error
        if event.error is not None:
            raise RequestFailed("error", event.error.message)
        self.ids += event.tokens
        if (num_new := event.tokens_predicted - self.num_drawn) > 0:
            self.num_drawn += num_new
            self._on_sampled(num_new)
        if event.timings is not None:
            self.num_cached = event.timings.cache_n
        self.is_ended = self.is_ended or event.stop


class LlamaCppTarget:
    """A llama.cpp server that runs."""

    name = "llama.cpp"

    def __init__(self, child: Child, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._child = child
        self._address = (parts.hostname, parts.port)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    async def ask(self, ids: "array[int]", num_tokens: int, on_sampled: OnSampled) -> DrawnReply:
        """See `Target`. Nothing of an earlier prompt is used, whatever it was."""
        body = msgspec.json.encode(
            {
                "prompt": ids.tolist(),
                "n_predict": num_tokens,
                "temperature": 0.0,
                "top_k": 1,  # else its sampler sorts the vocabulary before it takes the first
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                "stream": True,
            }
        )
        reader = CompletionReader(on_sampled)
        client = LoadClient(*self._address, self._buffer)  # the server closes each connection
        try:
            await client.asked("POST", "/completion", [body], reader.feed)
        except RequestFailed as failure:
            raise TargetFailed(f"{self.name}: {failure.kind}: {failure.detail}") from failure
        finally:
            client.close()
        if not reader.is_ended or reader.num_drawn != num_tokens:
            raise TargetFailed(f"{self.name}: drew {reader.num_drawn} tokens where {num_tokens} were asked for")
        return DrawnReply(ids=tuple(reader.ids), num_cached=reader.num_cached)

    def now(self) -> Instant:
        return Instant(cpu_s=self._child.cpu_s(), wall_s=time.monotonic())

    def rss_mib(self) -> float:
        return self._child.rss_kib() / 1024


def start_llamacpp(
    children: Children, model: str, *, slots: int, slot_tokens: int, note: Callable[[str], None]
) -> LlamaCppTarget:
    """A server with `slot_tokens` of context for each of `slots` requests at a time. Raises ChildFailed.

    Blocks until it has loaded its model.
    """
    note(f"starting llama.cpp for {slots} at once")
    arguments = [CHILD_MODULE, model, str(slot_tokens), str(slots), "0", "default"]
    child = children.start(f"llama.cpp for {slots}", arguments)
    return LlamaCppTarget(child, child.line().strip())
