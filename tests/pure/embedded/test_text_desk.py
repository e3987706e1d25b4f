"""Texts that come to the engine's process: enqueued at once, encoded on workers, refused where too many wait."""

import queue

import pytest

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import RequestId
from stenograph.embedded.child import TextDesk
from stenograph.embedded.loop import MAX_ARRIVING
from stenograph.embedded.wire import Event, Failed, FailureKind, Piece, TokenizedText, TokenizeText
from stenograph.model.tokenizer import Span, Tokenizer

from .gated_tokenizer import Gate


class Held(Tokenizer):
    """The real tokenizer, which stands at one text until its gate opens."""

    def __init__(self, held: str) -> None:
        super().__init__(tiny_tokenizer_json())
        self.gate = Gate()
        self._held = held

    def encode_spans(self, spans):  # type: ignore[no-untyped-def]
        if "".join(span.text for span in spans) == self._held:
            self.gate.entered.set()
            self.gate.open.wait()
        return super().encode_spans(spans)


def tokenize(name: str, *pieces: tuple[str, bool]) -> TokenizeText:
    return TokenizeText(
        request_id=RequestId(name), pieces=tuple(Piece(text=text, trusted=trusted) for text, trusted in pieces)
    )


@pytest.mark.timeout(600)
def test_a_text_that_takes_long_holds_up_neither_its_submitter_nor_other_texts() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    tokenizer = Held("long")
    desk = TextDesk(lambda: tokenizer, 2, events.put)
    desk.tokenize(tokenize("a", ("long", True)))
    tokenizer.gate.entered.wait()
    desk.tokenize(tokenize("b", ("<|im_end|>", False), ("<|im_end|>", True)))
    answered = events.get()
    assert isinstance(answered, TokenizedText)
    assert answered.request_id == "b"
    spans = [Span(text="<|im_end|>", trusted=False), Span(text="<|im_end|>", trusted=True)]
    assert answered.prompt() == tokenizer.encode_spans(spans)
    tokenizer.gate.open.set()
    assert events.get() == TokenizedText(request_id=RequestId("a"), ids=tokenizer.encode("long").tobytes())


@pytest.mark.timeout(600)
def test_texts_over_capacity_are_refused_and_a_dropped_one_frees_a_place() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    tokenizer = Held("long")
    desk = TextDesk(lambda: tokenizer, 1, events.put)
    desk.tokenize(tokenize("held", ("long", True)))
    tokenizer.gate.entered.wait()
    for number in range(MAX_ARRIVING):
        desk.tokenize(tokenize(f"waits {number}", ("it", True)))
    assert events.empty()
    desk.tokenize(tokenize("too many", ("it", True)))
    refused = events.get()
    assert isinstance(refused, Failed)
    assert (refused.request_id, refused.kind) == ("too many", FailureKind.UNAVAILABLE)
    desk.drop(RequestId("waits 0"))
    desk.tokenize(tokenize("fits", ("it", True)))
    tokenizer.gate.open.set()
    answered = [events.get().request_id for _ in range(MAX_ARRIVING + 1)]  # type: ignore[union-attr]
    assert answered == ["held", *(f"waits {number}" for number in range(1, MAX_ARRIVING)), "fits"]
