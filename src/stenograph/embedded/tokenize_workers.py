"""Tokenizes texts on threads of its own: submitting a prompt does not wait for its tokens.

Owns the threads and the texts waiting for them; each submitted text is answered exactly once, or dropped by its owner.
The owner bounds how many may wait (loop.py and child.py do). The tokenizer knows the trusted parts of a text; there the
spelling of an added token is that token. Knows nothing of requests.
"""

import queue
import threading
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from stenograph.core.errors import EngineUnavailable, StenographError, TokenizationFailed

Key = TypeVar("Key", bound=Hashable)
Text = TypeVar("Text")
Text_contra = TypeVar("Text_contra", contravariant=True)

Tokenized: TypeAlias = "array[int] | StenographError"
"""A text's ids [T], or why there are none."""


class TextTokenizer(Protocol[Text_contra]):
    """Turns text into ids; called from several threads at once. Threads help only as far as it releases the GIL."""

    def encode(self, text: Text_contra, /) -> "array[int]":
        """Ids [T]. An exception ends its text alone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeStats:
    """`num_waiting` texts wait for a thread, `num_running` are being encoded; the rest counts the outcomes of
    others."""

    num_workers: int
    num_waiting: int
    num_running: int
    num_encoded: int
    num_failed: int
    num_dropped: int


class TokenizeWorkers(Generic[Key, Text]):
    """`num_workers` threads; with 0, a text is encoded in the submitting thread. Close it with `close`.

    `done(key, tokenized)` is called once for each text unless it is dropped: on a worker, on the submitting thread
    where there are none, on the closing one for texts without an answer by then. Methods may be called from any thread.
    """

    def __init__(
        self, tokenizer: TextTokenizer[Text], num_workers: int, done: Callable[[Key, Tokenized], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._num_workers = num_workers
        self._done = done
        self._lock = threading.Lock()
        self._texts: dict[Key, Text] = {}  # those that are owed an answer
        self._running: set[Key] = set()
        self._keys: queue.SimpleQueue[Key | None] = queue.SimpleQueue()  # a dropped text's key stays until its turn
        self._num_encoded = self._num_failed = self._num_dropped = 0
        self._closed = False
        for number in range(num_workers):
            threading.Thread(target=self._work, name=f"tokenize-{number}", daemon=True).start()

    def __repr__(self) -> str:
        return f"<TokenizeWorkers {self._num_workers} threads, {len(self._texts)} texts>"

    def submit(self, key: Key, text: Text) -> None:
        """Have `text` encoded. `key` stands for it until it is answered, and is no other's until then."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._texts[key] = text
        if closed:
            self._done(key, _stopped())
        elif self._num_workers:
            self._keys.put(key)
        else:
            try:
                self._encode(key)
            except BaseException:
                self.drop(key)
                raise

    def drop(self, key: Key) -> bool:
        """Forget a text; whether it had no answer yet, and now gets none."""
        with self._lock:
            found = self._texts.pop(key, None) is not None
            self._num_dropped += found
        return found

    def stats(self) -> TokenizeStats:
        """Counts of texts by state and outcome."""
        with self._lock:
            num_running = sum(key in self._texts for key in self._running)
            return TokenizeStats(
                num_workers=self._num_workers,
                num_waiting=len(self._texts) - num_running,
                num_running=num_running,
                num_encoded=self._num_encoded,
                num_failed=self._num_failed,
                num_dropped=self._num_dropped,
            )

    def close(self) -> None:
        """Answer every open text with EngineUnavailable, and let the threads end; waits for no tokenizer."""
        with self._lock:
            unanswered = list(self._texts)
            self._texts.clear()
            self._num_dropped += len(unanswered)
            was_closed, self._closed = self._closed, True
        for key in unanswered:
            self._done(key, _stopped())
        if not was_closed:
            for _ in range(self._num_workers):
                self._keys.put(None)

    def _work(self) -> None:
        while (key := self._keys.get()) is not None:
            self._encode(key)

    def _encode(self, key: Key) -> None:
        """Answer one text, unless it was dropped before or meanwhile."""
        with self._lock:
            text = self._texts.get(key)
            if text is None:
                return
            self._running.add(key)
        try:
            tokenized = self._tokenized(text)
        finally:
            with self._lock:
                self._running.discard(key)
        with self._lock:
            is_wanted = self._texts.pop(key, None) is not None
            if is_wanted:
                self._num_encoded += isinstance(tokenized, array)
                self._num_failed += not isinstance(tokenized, array)
        if is_wanted:
            self._done(key, tokenized)

    def _tokenized(self, text: Text) -> Tokenized:
        try:
            return self._tokenizer.encode(text)
        except StenographError as error:
            return error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- a panic of the library's is no Exception; the text has its answer
            failed = TokenizationFailed(f"The tokenizer failed on a text: {error!r:.200}")
            failed.__cause__ = error
            return failed


def _stopped() -> EngineUnavailable:
    return EngineUnavailable("The engine was stopped before the prompt was tokenized.")
