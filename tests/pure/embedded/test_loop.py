"""The engine's loop: submission never waits, and every request ends with exactly one final event, whatever happens."""

import random
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stenograph.core.errors import EngineUnavailable
from stenograph.core.types import FinishReason, Grammar, GrammarKind, RequestId, SamplingParams
from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights
from stenograph.embedded.wire import Failed, FailureKind, Sampled
from stenograph.model.tokenizer import Tokenizer

from .gated_tokenizer import GatedTokenizer
from .loop_lab import Lab

Labs = Callable[..., Lab]
TEXTS = [f"the user asks {number} times and the assistant answers" for number in range(8)]
GRAMMAR = Grammar(kind=GrammarKind.REGEX, source="[a-z]{3}")


@pytest.fixture
def lab(loaded: tuple[LlamaConfig, LlamaWeights], tokenizer: Tokenizer) -> Iterator[Labs]:
    labs: list[Lab] = []

    def make(**options: object) -> Lab:
        labs.append(Lab(loaded, tokenizer, **options))  # type: ignore[arg-type]
        return labs[-1]

    yield make
    for one in labs:
        one.loop.close()


@pytest.fixture
def gated(tokenizer: Tokenizer) -> GatedTokenizer:
    return GatedTokenizer(tokenizer)


def drawn(lab: Lab, prompts: list[str]) -> list[list[int]]:
    names = [f"r{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        lab.add(name, prompt)
    lab.start()
    lab.heard.wait_for_ends(*names)
    return [lab.heard.ids(name) for name in names]


# -- submission


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_workers_or_none_or_ids_draw_the_same(lab: Labs, tokenizer: Tokenizer, num_workers: int) -> None:
    of_ids = lab()
    for number, text in enumerate(TEXTS):
        of_ids.add(f"r{number}", list(tokenizer.encode(text)))
    of_ids.start()
    of_ids.heard.wait_for_ends(*(f"r{number}" for number in range(8)))
    expected = [of_ids.heard.ids(f"r{number}") for number in range(8)]
    assert drawn(lab(num_workers=num_workers), TEXTS) == expected
    assert all(len(ids) == 4 for ids in expected)


def test_submission_waits_neither_for_tokenizers_nor_for_a_step(lab: Labs, gated: GatedTokenizer) -> None:
    it = lab(encoder=gated, num_workers=2)
    gates = [gated.hold(text) for text in TEXTS]
    stepping, go_on = threading.Event(), threading.Event()

    def stop_here() -> None:
        stepping.set()
        go_on.wait()

    it.heard.between = stop_here
    it.start()
    it.add("ids", [5, 6, 7])
    stepping.wait()  # the loop's thread is busy from here on, and every worker will be
    for number, text in enumerate(TEXTS):
        it.add(f"r{number}", text)
    gates[0].entered.wait()
    gates[1].entered.wait()
    assert it.loop.stats().num_arriving == 8
    assert it.loop.stats().tokenize.num_running == 2
    go_on.set()
    for gate in gates:
        gate.open.set()
    it.heard.wait_for_ends("ids", *(f"r{number}" for number in range(8)))


def test_a_slow_text_delays_no_other_request(lab: Labs, gated: GatedTokenizer) -> None:
    gate = gated.hold("long")
    it = lab(encoder=gated, num_workers=2)
    it.start()
    it.add("slow", "long")
    gate.entered.wait()
    for name in ("a", "b", "c"):
        it.add(name, f"text {name}")
    it.heard.wait_for_ends("a", "b", "c")
    assert not it.heard.finals("slow")
    gate.open.set()
    it.heard.wait_for_ends("slow")
    assert it.heard.reason("slow") is FinishReason.LENGTH


def test_one_whose_text_took_longer_goes_before_younger_ones_that_still_wait(lab: Labs, gated: GatedTokenizer) -> None:
    gate = gated.hold("long")
    it = lab(encoder=gated, max_batch=1)
    submitting = threading.Thread(target=it.add, args=("old", "long"))
    submitting.start()
    gate.entered.wait()
    for name in ("young", "younger"):
        it.add(name, f"text {name}")
    gate.open.set()
    submitting.join()
    it.start()
    it.heard.wait_for_ends("old", "young", "younger")
    assert it.heard.began() == ["old", "young", "younger"]


def test_ids_that_the_loop_makes_are_all_different(lab: Labs) -> None:
    params = SamplingParams(max_tokens=1)
    first, second = lab(), lab()
    made = {one.loop.add_request(array("i", [5]), params) for one in (first, second) for _ in range(3)}
    assert len(made) == 6


def test_an_id_of_a_request_that_runs_is_refused_and_free_again_when_it_has_ended(lab: Labs) -> None:
    it = lab()
    it.add("r", [5])
    with pytest.raises(ValueError, match="'r'"):
        it.add("r", [6])
    it.start()
    it.heard.wait_for_ends("r")
    it.add("r", [6])
    it.heard.wait(lambda: len(it.heard.finals("r")) == 2)


def test_requests_over_capacity_are_refused_with_an_event_and_capacity_returns(lab: Labs) -> None:
    it = lab(max_arriving=2)
    for name in ("a", "b", "c"):
        it.add(name, [5, 6])
    it.start()
    it.heard.wait_for_ends("a", "b", "c")
    assert it.heard.failure("c").kind is FailureKind.UNAVAILABLE
    assert it.loop.stats().num_refused == 1
    it.add("d", [5, 6])
    it.heard.wait_for_ends("d")
    assert [it.heard.reason(name) for name in ("a", "b", "d")] == [FinishReason.LENGTH] * 3


# -- failures


@pytest.mark.parametrize("num_workers", [0, 4])
def test_a_tokenizer_that_fails_ends_that_request_alone(
    lab: Labs, gated: GatedTokenizer, tokenizer: Tokenizer, num_workers: int
) -> None:
    gated.fail(TEXTS[3], RuntimeError("out of merges"))
    it = lab(encoder=gated, num_workers=num_workers)
    found = drawn(it, [*TEXTS, "\ud800"])
    failure = it.heard.failure("r3")
    assert failure.kind is FailureKind.TOKENIZATION
    assert "out of merges" in failure.message
    surrogate = it.heard.failure("r8")
    assert surrogate.kind is FailureKind.INVALID_REQUEST
    assert "U+D800" in surrogate.message
    others = [number for number in range(8) if number != 3]
    assert [found[number] for number in others] == drawn(lab(), [TEXTS[number] for number in others])


def test_a_prompt_that_the_engine_refuses_ends_that_request_alone(lab: Labs) -> None:
    it = lab()
    it.add("none", "")
    it.add("outside", [5, 320])
    it.add("good", [5])
    it.start()
    it.heard.wait_for_ends("none", "outside", "good")
    assert it.heard.failure("none").kind is it.heard.failure("outside").kind is FailureKind.INVALID_REQUEST
    assert not it.heard.chunks("none")
    assert it.heard.reason("good") is FinishReason.LENGTH


def test_a_step_that_raises_ends_every_request_and_the_loop(lab: Labs, gated: GatedTokenizer) -> None:
    gate = gated.hold("long")
    it = lab(encoder=gated, num_workers=1)

    def fail() -> None:
        raise MemoryError

    for name, prompt in (("runs", [5]), ("runs too", [6]), ("tokenized", "long")):
        it.add(name, prompt)
    gate.entered.wait()
    it.heard.between = fail
    with pytest.raises(MemoryError):
        it.loop.run(it.core)
    gate.open.set()
    assert {it.heard.failure(name).kind for name in ("runs", "runs too", "tokenized")} == {FailureKind.INTERNAL}
    with pytest.raises(EngineUnavailable):
        it.add("late", [5])


# -- abort


def test_an_abort_ends_a_request_at_any_stage_with_one_answer(lab: Labs, gated: GatedTokenizer) -> None:
    gate = gated.hold("long")
    it = lab(encoder=gated, num_workers=1, max_batch=1)
    it.add("in the tokenizer", "long")
    gate.entered.wait()
    it.add("waits for a worker", "text")
    it.add("runs", [5, 6, 7], max_tokens=200)
    it.add("waits in the core", [5, 6, 8])
    it.add("compiles", [5, 6, 9], grammar=GRAMMAR)
    names = ("in the tokenizer", "waits for a worker", "waits in the core", "compiles", "runs")

    def abort_once() -> None:
        it.heard.between = lambda: None
        for name in (*names, *names):
            it.loop.abort(RequestId(name))

    it.heard.between = abort_once
    it.start()
    it.heard.wait_for_ends(*names)
    gate.open.set()
    it.loop.close()
    assert [it.heard.reason(name) for name in names] == [FinishReason.ABORT] * 5
    assert [len(it.heard.ids(name)) for name in names] == [0, 0, 0, 0, 1]
    assert "text" not in gated.seen
    assert not it.core.has_requests
    for name in names:
        times = it.times(name)
        assert (times.first_token < times.finished) == (name == "runs")


def test_an_abort_that_comes_with_the_submission_ends_it_before_it_runs(lab: Labs) -> None:
    it = lab()
    it.add("compiles", [5, 6], grammar=GRAMMAR)
    it.add("plain", [5, 6])
    it.loop.abort(RequestId("compiles"))
    it.loop.abort(RequestId("plain"))
    it.start()
    it.heard.wait_for_ends("compiles", "plain")
    assert it.heard.reason("plain") is it.heard.reason("compiles") is FinishReason.ABORT
    assert it.heard.began() == []


def test_an_abort_of_an_ended_or_unknown_request_does_nothing(lab: Labs) -> None:
    it = lab()
    it.loop.abort(RequestId("never"))
    it.start()
    it.add("a", [5])
    it.heard.wait_for_ends("a")
    it.loop.abort(RequestId("a"))
    it.add("b", [6])
    it.heard.wait_for_ends("b")
    assert {event.request_id for event in it.heard.events} == {"a", "b"}
    assert it.heard.reason("a") is FinishReason.LENGTH


def test_ids_of_an_aborted_text_that_come_late_are_not_taken_for_a_new_request_of_its_id(
    lab: Labs, gated: GatedTokenizer, tokenizer: Tokenizer
) -> None:
    gate = gated.hold("long")
    it = lab(encoder=gated, num_workers=1)
    it.start()
    it.add("r", "long")
    gate.entered.wait()
    it.loop.abort(RequestId("r"))
    it.heard.wait_for_ends("r")
    it.add("r", "another text")
    gate.open.set()
    it.heard.wait(lambda: len(it.heard.finals("r")) == 2)
    assert it.heard.ids("r") == drawn(lab(), ["another text"])[0]


# -- the end


def test_close_with_everything_in_flight_answers_each_once_and_waits_for_no_tokenizer(
    lab: Labs, gated: GatedTokenizer
) -> None:
    gate = gated.hold("long")
    it = lab(encoder=gated, num_workers=1, max_batch=1)
    it.add("in the tokenizer", "long")
    gate.entered.wait()
    it.add("waits for a worker", "text")
    it.add("runs", [5, 6, 7], max_tokens=200)
    it.add("waits in the core", [5, 6, 8])
    it.add("compiles", [5, 6, 9], grammar=GRAMMAR)
    it.start()
    it.heard.wait(lambda: it.heard.began() == ["runs"])
    it.loop.close()
    gate.open.set()
    names = ("in the tokenizer", "waits for a worker", "waits in the core", "compiles", "runs")
    failures = [it.heard.failure(name) for name in names]
    assert [failure.kind for failure in failures] == [FailureKind.UNAVAILABLE] * 5
    assert all("stopped" in failure.message for failure in failures)
    assert not it.core.has_requests
    assert it.loop.stats().num_arriving == it.loop.stats().num_in_core == 0
    num_events = len(it.heard.events)
    with pytest.raises(EngineUnavailable):
        it.add("late", [5])
    it.loop.close()
    assert len(it.heard.events) == num_events


def test_a_loop_that_never_ran_still_answers_when_it_is_closed(lab: Labs) -> None:
    it = lab()
    it.add("r", [5])
    it.loop.close()
    assert it.heard.failure("r").kind is FailureKind.UNAVAILABLE


def test_run_on_the_callers_thread_ends_when_an_event_closes_it(lab: Labs) -> None:
    it = lab()
    it.add("r", [5], max_tokens=100)
    threads: set[threading.Thread] = set()

    def close() -> None:
        threads.add(threading.current_thread())
        it.loop.close()

    it.heard.between = close
    it.loop.run(it.core)
    assert it.heard.failure("r").kind is FailureKind.UNAVAILABLE
    assert len(it.heard.ids("r")) == 1
    assert threads == {threading.current_thread()}
    with pytest.raises(RuntimeError):
        it.loop.run(it.core)


def test_whatever_threads_submit_and_abort_each_request_has_one_final_event(lab: Labs, tokenizer: Tokenizer) -> None:
    it = lab(num_workers=2, max_batch=4)
    it.start()

    def submit(seed: int) -> list[str]:
        chance, names = random.Random(seed), list[str]()
        for number in range(40):
            name = f"{seed}.{number}"
            prompt = TEXTS[chance.randrange(8)] if chance.random() < 0.5 else [chance.randrange(3, 300)]
            grammar = GRAMMAR if chance.random() < 0.2 else None
            try:
                it.add(name, prompt, max_tokens=chance.randint(1, 6), grammar=grammar)
            except EngineUnavailable:
                break
            names.append(name)
            if chance.random() < 0.4:
                it.loop.abort(RequestId(chance.choice(names)))
        return names

    with ThreadPoolExecutor(4) as threads:
        submitted = [threads.submit(submit, seed) for seed in range(4)]
        it.heard.wait(lambda: len(it.heard.events) > 60)
        it.loop.close()
        names = [name for one in submitted for name in one.result()]
    ends = [event.request_id for event in it.heard.events if _is_end(event)]
    assert sorted(ends) == sorted(names)
    assert not it.core.has_requests


def _is_end(event: Sampled | Failed) -> bool:
    return isinstance(event, Failed) or event.chunk.finish is not None


# -- times


def test_a_requests_times_are_in_order_and_in_its_last_chunk_alone(lab: Labs) -> None:
    it = lab(num_workers=1)
    it.add("r", "the user asks", max_tokens=5)
    it.start()
    it.heard.wait_for_ends("r")
    times = it.times("r")
    points = [times.submitted, times.admitted, times.first_token, times.finished]
    assert points == sorted(points)
    assert [chunk.times for chunk in it.heard.chunks("r")[:-1]] == [None] * 4


def test_books_that_do_not_balance_end_the_loop_once_it_is_idle(lab: Labs) -> None:
    one = lab()
    one.add("r", [5, 6, 7])

    def lose_a_block() -> None:
        if not one.core.pool.stats().num_idle and len(one.heard.events) == 1:
            table, _ = one.core.pool.open(array("i", [1]))
            one.core.pool.extend(table, 1)

    one.heard.between = lose_a_block
    with pytest.raises(AssertionError, match="no sequence runs"):
        one.loop.run(one.core)
    assert one.heard.reason("r") is FinishReason.LENGTH
