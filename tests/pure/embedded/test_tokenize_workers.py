"""Workers that tokenize: each text is answered once, whatever the tokenizer, its owner or `close` does."""

import threading
from array import array
from queue import SimpleQueue

import pytest

from stenograph.core.errors import EngineUnavailable, TokenizationFailed, UnrenderableMessage
from stenograph.embedded.tokenize_workers import Tokenized, TokenizeWorkers
from stenograph.model.tokenizer import Tokenizer

from .gated_tokenizer import GatedTokenizer

Answers = SimpleQueue[tuple[str, Tokenized]]


def answering(answers: Answers, tokenizer: GatedTokenizer | Tokenizer, num_workers: int) -> TokenizeWorkers[str, str]:
    return TokenizeWorkers(tokenizer, num_workers, lambda key, tokenized: answers.put((key, tokenized)))


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_every_text_is_answered_once_with_the_ids_of_trusted_text(tokenizer: Tokenizer, num_workers: int) -> None:
    answers: Answers = SimpleQueue()
    workers = answering(answers, tokenizer, num_workers)
    texts = {f"k{number}": f"<|im_start|>user {number}" for number in range(50)}
    for key, text in texts.items():
        workers.submit(key, text)
    found = dict(answers.get() for _ in texts)
    assert found == {key: tokenizer.encode(text) for key, text in texts.items()}
    assert found["k0"][0] == 1  # type: ignore[index]
    assert workers.stats().num_encoded == 50
    workers.close()
    assert answers.empty()


def test_without_workers_a_text_is_encoded_before_submit_returns(tokenizer: Tokenizer) -> None:
    answers: Answers = SimpleQueue()
    answering(answers, tokenizer, 0).submit("k", "text")
    assert answers.get_nowait() == ("k", tokenizer.encode("text"))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_whatever_a_tokenizer_raises_ends_its_text_alone(tokenizer: Tokenizer, num_workers: int) -> None:
    class Panic(BaseException):
        """As a library's own panic: no Exception."""

    answers: Answers = SimpleQueue()
    gated = GatedTokenizer(tokenizer)
    gated.fail("bad", ValueError("no such merge"))
    gated.fail("worse", Panic("index out of bounds"))
    workers = answering(answers, gated, num_workers)
    for text in ("bad", "worse", "\ud800", "good"):
        workers.submit(text, text)
    found = dict(answers.get() for _ in range(4))
    assert isinstance(found["bad"], TokenizationFailed)
    assert "no such merge" in found["bad"].message
    assert isinstance(found["worse"], TokenizationFailed)
    assert isinstance(found["\ud800"], UnrenderableMessage)
    assert found["good"] == tokenizer.encode("good")
    assert workers.stats().num_failed == 3
    workers.close()


def test_an_interrupt_of_the_submitting_thread_is_its_own_and_leaves_no_text(tokenizer: Tokenizer) -> None:
    gated = GatedTokenizer(tokenizer)
    gated.fail("text", KeyboardInterrupt())
    workers = answering(SimpleQueue(), gated, 0)
    with pytest.raises(KeyboardInterrupt):
        workers.submit("k", "text")
    assert (workers.stats().num_waiting, workers.stats().num_running) == (0, 0)


def test_a_text_that_is_dropped_gets_no_answer_and_is_not_encoded_if_it_had_not_begun(tokenizer: Tokenizer) -> None:
    answers: Answers = SimpleQueue()
    gated = GatedTokenizer(tokenizer)
    gate = gated.hold("begun")
    workers = answering(answers, gated, 1)
    workers.submit("a", "begun")
    workers.submit("b", "waits")
    gate.entered.wait()
    assert (workers.stats().num_running, workers.stats().num_waiting) == (1, 1)
    assert workers.drop("a")
    assert workers.drop("b")
    assert not workers.drop("b")
    gate.open.set()
    workers.submit("c", "after")
    assert answers.get() == ("c", tokenizer.encode("after"))
    assert "waits" not in gated.seen
    assert workers.stats().num_dropped == 2
    workers.close()


def test_close_answers_what_waits_and_what_runs_and_waits_for_no_tokenizer(tokenizer: Tokenizer) -> None:
    answers: Answers = SimpleQueue()
    gated = GatedTokenizer(tokenizer)
    gate = gated.hold("begun")
    workers = answering(answers, gated, 1)
    workers.submit("a", "begun")
    workers.submit("b", "waits")
    gate.entered.wait()
    workers.close()
    workers.submit("c", "late")
    found = dict(answers.get_nowait() for _ in range(3))
    assert set(found) == {"a", "b", "c"}
    assert all(isinstance(tokenized, EngineUnavailable) for tokenized in found.values())
    (thread,) = [thread for thread in threading.enumerate() if thread is gate.entered_by]
    gate.open.set()
    thread.join()
    assert answers.empty()
    assert gated.seen == ["begun"]


def test_an_answer_is_an_array_of_ids(tokenizer: Tokenizer) -> None:
    answers: Answers = SimpleQueue()
    answering(answers, tokenizer, 0).submit("k", "")
    assert answers.get_nowait() == ("k", array("i"))
