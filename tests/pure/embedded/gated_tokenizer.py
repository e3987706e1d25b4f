"""A real tokenizer that a test holds at chosen texts, and that fails on others."""

import threading
from array import array
from dataclasses import dataclass, field

from stenograph.model.tokenizer import Tokenizer


@dataclass
class Gate:
    """One text: `entered` when its encoding has begun, by which thread; it goes on when the test sets `open`."""

    entered: threading.Event = field(default_factory=threading.Event)
    open: threading.Event = field(default_factory=threading.Event)
    entered_by: threading.Thread | None = None


class GatedTokenizer:
    """Encodes as `tokenizer` does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._gates: dict[str, Gate] = {}
        self._errors: dict[str, BaseException] = {}
        self.seen: list[str] = []

    def hold(self, text: str) -> Gate:
        return self._gates.setdefault(text, Gate())

    def fail(self, text: str, error: BaseException) -> None:
        self._errors[text] = error

    def encode(self, text: str) -> "array[int]":
        self.seen.append(text)
        if (gate := self._gates.get(text)) is not None:
            gate.entered_by = threading.current_thread()
            gate.entered.set()
            gate.open.wait()
        if (error := self._errors.get(text)) is not None:
            raise error
        return self._tokenizer.encode(text)
