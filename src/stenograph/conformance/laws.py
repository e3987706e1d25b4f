"""The laws of engines (`engine.base`), each as a function: it shows the law on an engine, or fails.

A law raises AssertionError where it is broken and NotOffered where there is nothing to show it on; any other error of
an engine breaks the law too. Those of `LAST_LAWS` leave an unusable engine behind.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext

from stenograph.conformance.grammar_laws import grammar_laws
from stenograph.conformance.lab import Lab, NotOffered, without
from stenograph.conformance.logprob_laws import logprobs_of_the_model, supports_of_tokens
from stenograph.core.errors import CallerError, EngineUnavailable, RouteNotFound, UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn
from stenograph.engine.base import EngineState, GenerateRequest
from stenograph.model.tokenizer import Span

Law = Callable[[Lab], Awaitable[None]]

NUM_TOGETHER = 8
NUM_TRIES = 5
"""The number of tries for a race between two events."""
HEARD_S = 1.0
"""Time for a paused engine to hear of an abort, if it hears anything then."""
STILL_S = 0.05
"""The time of watching a paused engine."""

_GONE = (EngineUnavailable, UpstreamUnreachable)


# -- ids in, ids and logprobs out


async def ids_and_logprobs(lab: Lab) -> None:
    """Every token has its id and its logprob; the last chunk alone has the finish; cached tokens are the prompt's."""
    request = lab.request()
    turn = await lab.draw(request)
    assert turn.ids, "no token was drawn"
    assert max(turn.logprobs) <= lab.under_test.tolerance_nats, f"a logprob is above 0: {max(turn.logprobs)}"
    cached = turn.num_cached_tokens
    assert 0 <= cached <= request.prompt.num_tokens, (
        f"{cached} of {request.prompt.num_tokens} prompt tokens were cached"
    )


async def prompt_as_it_is(lab: Lab) -> None:
    """A turn, cut anywhere, goes on as it went: the sampled tokens come in again as the very same ids."""
    request = lab.request()
    whole = await lab.draw(request)
    if lab.under_test.seen_ids is not None:
        seen = list(lab.under_test.seen_ids(request.request_id))
        assert seen == list(request.prompt.ids), f"the model got {seen[:20]}… for {list(request.prompt.ids)[:20]}…"
    for cut in range(1, len(whole.ids), max(1, len(whole.ids) // 5)):
        prompt = [*request.prompt.ids, *whole.ids[:cut]]
        rest = await lab.greedy(prompt, max_tokens=len(whole.ids) - cut)
        lab.check_same(f"cut after {cut} tokens", rest, without(whole, cut))


async def alternatives(lab: Lab) -> None:
    """Each token comes with as many alternatives as were asked for, and the greedy one is the likeliest."""
    try:
        turn = await lab.greedy(num_top_logprobs=2)
    except CallerError as error:
        raise NotOffered(f"alternatives: {error.message}") from error
    if turn.top_logprobs is None:
        raise NotOffered("alternatives: none came with the tokens")
    for id_, logprob, row in zip(turn.ids, turn.logprobs, turn.top_logprobs, strict=True):
        assert len(row) == 2, f"{len(row)} alternatives came, 2 were asked for"
        best = max(row, key=lambda top: top.logprob)
        apart = abs(best.logprob - logprob)
        assert apart <= lab.under_test.tolerance_nats, f"{id_} was drawn, {best.id} is likelier by {apart:g} nats"


# -- streamed, whole, again, together


async def streams_tokens(lab: Lab) -> None:
    """A streaming engine gives tokens while it samples; any other gives one chunk."""
    request = lab.request()
    async with aclosing(lab.engine.generate(request)) as chunks:
        taken = [chunk async for chunk in chunks]
    if not lab.capabilities.streams:
        assert len(taken) == 1, f"it says that it does not stream, and gives {len(taken)} chunks"
        raise NotOffered("capabilities.streams")
    num_drawing, num_ids = sum(1 for chunk in taken if chunk.num_sampled), sum(len(chunk.ids) for chunk in taken)
    assert num_drawing > 1, f"{num_ids} tokens came in {num_drawing} chunk"
    num_told = sum(chunk.num_sampled for chunk in taken)
    assert num_told == num_ids, f"{num_told} tokens were reported as they were drawn, and {num_ids} came"


async def whole_equals_streamed(lab: Lab) -> None:
    """The same turn, whether or not anyone wants its tokens as they are drawn."""
    if not lab.capabilities.streams:
        raise NotOffered("capabilities.streams")
    first = await lab.greedy(**lab.endless)
    stop = first.ids[len(first.ids) // 2]
    for params in (lab.endless, {**lab.endless, "stop_token_ids": (stop,)}):
        streamed = await lab.draw(lab.request(streams=True, **params))
        whole = await lab.draw(lab.request(streams=False, **params))
        lab.check_same("streamed and whole", streamed, whole)


async def greedy_repeats(lab: Lab) -> None:
    """The same greedy request twice is the same turn, whatever is cached by then."""
    lab.check_same("the second time", await lab.greedy(), await lab.greedy())


async def seeds_repeat(lab: Lab) -> None:
    """A seed fixes the sampled tokens, and another seed gives others."""
    drawn = [[await lab.greedy(temperature=1.0, seed=seed) for _ in range(2)] for seed in range(1, 5)]
    for seed, (one, other) in enumerate(drawn, start=1):
        assert list(one.ids) == list(other.ids), f"seed {seed} drew {list(one.ids)}, and {list(other.ids)}"
    assert len({tuple(one.ids) for one, _ in drawn}) > 1, "four seeds drew the same"


async def together_as_alone(lab: Lab) -> None:
    """Requests sample the same tokens side by side as alone."""
    base = await lab.greedy(max_tokens=NUM_TOGETHER)
    prompts = [[*lab.under_test.prompt, *base.ids[:num]] for num in range(len(base.ids))]
    alone = [await lab.greedy(prompt) for prompt in prompts]
    together = await asyncio.gather(*(lab.greedy(prompt) for prompt in prompts))
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        lab.check_same(f"request {number} of {len(prompts)}", one, other)


# -- why a turn ends


async def stops_at_eos(lab: Lab) -> None:
    """The model's own end ends a turn, is among its ids, and is passed over where it is to be ignored."""
    eos = min(lab.under_test.eos_ids)
    bias = ((eos, 100.0),)
    try:
        turn = await lab.greedy(ignore_eos=False, logit_bias=bias)
        on = await lab.greedy(ignore_eos=True, max_tokens=3, logit_bias=bias)
    except CallerError as error:
        raise NotOffered(f"logit_bias, by which the end is brought about: {error.message}") from error
    assert list(turn.ids) == [eos], f"{eos} was to be drawn, {list(turn.ids)} was"
    assert turn.finish == Finish(reason=FinishReason.STOP, matched=eos), f"it ended by {turn.finish}"
    assert on.finish.reason is FinishReason.LENGTH, f"with ignore_eos it ended by {on.finish}"
    assert len(on.ids) == 3, f"with ignore_eos it drew {len(on.ids)} tokens of 3"


async def stops_at_token_id(lab: Lab) -> None:
    """A stop token ends a turn, and is its last id."""
    free = await lab.greedy(**lab.endless)
    ids = list(free.ids)
    for at in sorted({ids.index(id_) for id_ in ids})[:NUM_TRIES]:
        turn = await lab.greedy(stop_token_ids=(ids[at],), **lab.endless)
        assert turn.finish == Finish(reason=FinishReason.STOP, matched=ids[at]), f"it ended by {turn.finish}"
        assert len(turn.ids) == at + 1, f"token {at} was to be the last, {len(turn.ids)} came"
        lab.check_begins("up to the stop token", turn, free)


async def stops_at_string(lab: Lab) -> None:
    """A stop string ends a turn at its completing token, also across tokens, and all its ids are kept."""
    free = await lab.greedy(**lab.long_tokens)
    stops = _stop_strings(lab, free)
    if not stops:
        raise NotOffered("a text of the model in which a stop string could be found")
    for stop, num_ids in stops:
        turn = await lab.greedy(stop=(stop,), **lab.long_tokens)
        assert turn.finish == Finish(reason=FinishReason.STOP, matched=stop), f"{stop!r}: it ended by {turn.finish}"
        assert len(turn.ids) == num_ids, f"{stop!r} is whole after {num_ids} tokens, {len(turn.ids)} came"
        lab.check_begins(f"up to {stop!r}", turn, free)


def _stop_strings(lab: Lab, free: SampledTurn) -> list[tuple[str, int]]:
    """Strings across two tokens of a turn, and after how many tokens each is there for the first time."""
    found: list[tuple[str, int]] = []
    texts = [lab.under_test.decode(free.ids[:num]) for num in range(len(free.ids) + 1)]
    for num, (before, text) in enumerate(itertools.pairwise(texts), start=1):
        added = text[len(before) :]
        stop = before[-1:] + added[:1]
        if text.startswith(before) and len(stop) == 2 and "\ufffd" not in stop and stop not in before:
            found.append((stop, num))
    return found[: NUM_TRIES - 1] + found[NUM_TRIES:][-1:]


async def stops_after_the_least_number(lab: Lab) -> None:
    """No stop token is drawn before the least number of tokens, and one may end the turn right after."""
    num_least = max(2, lab.under_test.num_tokens // 2)
    free = await lab.greedy(**lab.endless)
    stop = free.ids[0]
    try:
        turn = await lab.greedy(stop_token_ids=(stop,), min_tokens=num_least, **lab.endless)
        at_once = await lab.greedy(stop_token_ids=(stop,), **lab.endless)
    except CallerError as error:
        raise NotOffered(f"a least number of tokens: {error.message}") from error
    assert list(at_once.ids) == [stop], f"without a least number it drew {list(at_once.ids)}"
    assert stop not in turn.ids[:num_least], f"{stop} ends a turn, and was drawn before {num_least} tokens"
    assert len(turn.ids) >= num_least, f"{len(turn.ids)} tokens came of at least {num_least}"
    if turn.finish.reason is FinishReason.STOP:
        assert turn.finish.matched == turn.ids[-1] == stop, f"it ended by {turn.finish}"


async def stops_at_length(lab: Lab) -> None:
    """A turn has as many tokens as it may, and gives this as the reason."""
    for num_tokens in (1, 2, lab.under_test.num_tokens):
        turn = await lab.greedy(max_tokens=num_tokens)
        assert turn.finish == Finish(reason=FinishReason.LENGTH), f"it ended by {turn.finish}"
        assert len(turn.ids) == num_tokens, f"{len(turn.ids)} tokens came of {num_tokens}"


async def refuses_what_is_too_long(lab: Lab) -> None:
    """The longest prompt with space for a token is answered, and one token more is refused."""
    longest = lab.under_test.max_sequence_tokens
    if longest is None:
        raise NotOffered("a context that is short enough to be tried: max_sequence_tokens")
    ids = list(itertools.islice(itertools.cycle(lab.under_test.prompt), longest))
    turn = await lab.greedy(ids[:-1], max_tokens=1)
    assert len(turn.ids) == 1, f"{longest - 1} tokens and one of {longest}: it drew {len(turn.ids)}"
    await lab.check_refused(lab.request(ids, max_tokens=1), f"a prompt of {longest} tokens of {longest}")


# -- the end that is brought about


async def abort_keeps_what_was_drawn(lab: Lab) -> None:
    """An abort ends a turn with its sampled tokens, and learns whether there was anything to end."""
    free = await lab.greedy(**lab.long_tokens)
    turn, was_running = await _aborted(lab, lab.request(**lab.long_tokens))
    for _ in range(NUM_TRIES - 1):
        if turn.finish.reason is not FinishReason.ABORT:
            turn, was_running = await _aborted(lab, lab.request(**lab.long_tokens))
    assert turn.finish.reason is FinishReason.ABORT, f"it ended by {turn.finish.reason}, aborted {NUM_TRIES} times"
    assert was_running, "an abort that ended a turn was told that it did not run"
    assert len(turn.ids) < len(free.ids), "an aborted turn has all its tokens"
    lab.check_begins("up to the abort", turn, free)
    lab.check_same("after an abort", await lab.greedy(**lab.long_tokens), free)


async def _aborted(lab: Lab, request: GenerateRequest) -> tuple[SampledTurn, bool]:
    """A turn aborted once it has sampled, or, where this is not visible, once it has begun."""
    if lab.capabilities.streams:
        async with aclosing(lab.engine.generate(request)) as chunks:
            first = await anext(chunks)
            was_running = await lab.engine.abort(request.request_id)
            return await lab.rest(request, chunks, first), was_running
    was_running = False
    async with asyncio.TaskGroup() as tasks:
        async with _Held(lab) if lab.under_test.aborts_in_pause else nullcontext():
            drawing = tasks.create_task(lab.draw(request))
            while not was_running and not drawing.done():
                await asyncio.sleep(0)
                was_running = await lab.engine.abort(request.request_id)
            await asyncio.wait({drawing}, timeout=HEARD_S)
        turn = await drawing
    return turn, was_running


class _Held:
    """Holds a pausing engine still, so turns begun in it do not end by themselves."""

    def __init__(self, lab: Lab) -> None:
        self._under_test = lab.under_test

    async def __aenter__(self) -> None:
        if self._under_test.pause is not None:
            await self._under_test.pause()

    async def __aexit__(self, *_: object) -> None:
        if self._under_test.resume is not None:
            await self._under_test.resume()


async def abort_of_the_unknown(lab: Lab) -> None:
    """An abort of an unknown or ended turn is no error, and touches nothing else."""
    over = lab.request()
    free = await lab.draw(over)
    assert not await lab.engine.abort(RequestId("law-of-nobody")), "an unknown id was said to run"
    assert not await lab.engine.abort(over.request_id), "a turn that has ended was said to run"
    request = lab.request()
    async with aclosing(lab.engine.generate(request)) as chunks:
        first = await anext(chunks)
        assert not await lab.engine.abort(RequestId("law-of-nobody")), "an unknown id was said to run"
        lab.check_same("beside an abort of another", await lab.rest(request, chunks, first), free)


async def leaving_stops(lab: Lab) -> None:
    """Leaving a turn early, by closing or by cancellation, stops it at the engine."""
    if lab.capabilities.streams:
        request = lab.request(**lab.long_tokens)
        async with aclosing(lab.engine.generate(request)) as chunks:
            await anext(chunks)
        assert not await lab.engine.abort(request.request_id), "a turn that was left was said to run"
        await lab.until_idle()
    async with _Held(lab), asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(lab.draw(lab.request(**lab.long_tokens)))
        while lab.under_test.pause is not None and not drawing.done() and not await _is_running(lab):
            await lab.wait()
        drawing.cancel()
    await lab.until_idle()
    await lab.greedy()


async def _is_running(lab: Lab) -> bool:
    """Whether the engine has begun; where it does not say, a while is taken for it."""
    if lab.under_test.num_running is None:
        await asyncio.sleep(STILL_S)
        return True
    return await lab.under_test.num_running() > 0


async def pause_and_resume(lab: Lab) -> None:
    """A paused engine draws nothing, and goes on as if there had been no pause."""
    if lab.under_test.pause is None:
        raise NotOffered("a way to pause: pause, resume")
    free = await lab.greedy()
    async with asyncio.TaskGroup() as tasks:
        async with _Held(lab):
            drawing = tasks.create_task(lab.draw(lab.request()))
            await asyncio.sleep(STILL_S)
            assert not drawing.done(), "a turn ended while the engine was paused"
        lab.check_same("over a pause", await drawing, free)


async def two_weight_versions(lab: Lab) -> None:
    """Each token names its weights, also where they change within a turn; an engine unable to do so reports the
    change."""
    set_version = lab.under_test.set_weight_version
    if set_version is None:
        raise NotOffered("a way to change the weights: set_weight_version")
    if not lab.capabilities.streams:
        raise NotOffered("capabilities.streams, by which a change falls into a turn")
    turn = await _over_two_versions(lab, set_version)
    if turn.mixed is not None:
        assert not turn.weights, f"the weights changed, for no token is it said when, and the spans are {turn.weights}"
        assert turn.mixed.oldest == "law-1", f"it began with law-1, and says {turn.mixed.oldest}"
        raise NotOffered("the weights of each token of a stream: it says that they changed")
    for _ in range(NUM_TRIES - 1):
        turn = turn if len(turn.weights) > 1 else await _over_two_versions(lab, set_version)
    spans = [(span.start, span.end) for span in turn.weights]
    assert [span.version for span in turn.weights] == ["law-1", "law-2"], f"the versions are {turn.weights}"
    assert spans == [(0, spans[0][1]), (spans[0][1], len(turn.ids))], f"{len(turn.ids)} tokens have the spans {spans}"


async def _over_two_versions(lab: Lab, set_version: Callable[[str], Awaitable[None]]) -> SampledTurn:
    """A turn during which the weights change, unless it is over before."""
    await set_version("law-1")
    request = lab.request(**lab.long_tokens)
    async with aclosing(lab.engine.generate(request)) as chunks:
        first = await anext(chunks)
        async with _Held(lab):
            await set_version("law-2")
        return await lab.rest(request, chunks, first)


# -- what else it is asked


async def counts_what_it_runs(lab: Lab) -> None:
    """Its count has each running generation and no ended one, and its statuses name each engine once."""
    await lab.greedy()
    assert lab.engine.num_running == 0, f"nothing runs, and it counts {lab.engine.num_running}"
    async with aclosing(lab.engine.generate(lab.request(**lab.long_tokens))) as chunks:
        await anext(chunks)
        assert lab.engine.num_running == 1, f"one generation runs, and it counts {lab.engine.num_running}"
    statuses = lab.engine.statuses()
    names = [status.name for status in statuses]
    assert names, "it has no status"
    assert len(set(names)) == len(names), f"two of its engines have the same name: {names}"
    assert {status.engine for status in statuses} == {lab.capabilities.engine}, f"other engines are told of: {statuses}"
    assert EngineState.READY in {status.health.state for status in statuses}, f"none is ready: {statuses}"


async def does_what_it_says(lab: Lab) -> None:
    """A server engine answers other requests, another refuses them; a tokenizing one makes ids of text."""
    if lab.engine.forwards:
        answer = await lab.engine.forward("GET", "/v1/models", (), b"")
        assert answer.status == 200, f"GET /v1/models answered {answer.status}"
    else:
        await _refuses_to_forward(lab)
    if lab.engine.tokenizes:
        text = "a b"
        ids = await lab.engine.tokenize([Span(text=text, trusted=False)])
        decoded = lab.under_test.decode(ids)
        assert decoded == text, f"{text!r} became {list(ids)}, which is {decoded!r}"


async def _refuses_to_forward(lab: Lab) -> None:
    try:
        answer = await lab.engine.forward("GET", "/v1/models", (), b"")
    except RouteNotFound:
        return
    raise AssertionError(f"it is no server, and answered a request with {answer.status}")


# -- errors


async def refuses_garbage(lab: Lab) -> None:
    """A prompt with an invalid id is refused, and nobody else is touched by it."""
    free = await lab.greedy()
    for id_ in (lab.capabilities.vocab_size, 2**31 - 1):
        await lab.check_refused(lab.request([*lab.under_test.prompt, id_]), f"the id {id_}")
    assert lab.engine.health().state is EngineState.READY, "the engine is not ready after a refusal"
    lab.check_same("after a refusal", await lab.greedy(), free)


async def dies_clearly_and_comes_back(lab: Lab) -> None:
    """Turns of a dying engine end with an error that says so, and a revived one answers as before."""
    kill, revive = lab.under_test.kill, lab.under_test.revive
    if kill is None or revive is None:
        raise NotOffered("a way to kill it: kill, revive")
    free = await lab.greedy()
    if lab.under_test.pause is not None:  # a dead engine needs no `resume`
        await lab.under_test.pause()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_gone_or_done(lab, lab.request(**lab.long_tokens)))
        await asyncio.sleep(STILL_S)
        await kill()
    assert await _gone_or_done(lab, lab.request()), "a dead engine answered"
    await revive()
    while await _gone_or_done(lab, lab.request(max_tokens=1)):
        await lab.wait()
    assert lab.engine.health().state is EngineState.READY, "the engine answers, and is not ready"
    lab.check_same("after a death", await lab.greedy(), free)


async def _gone_or_done(lab: Lab, request: GenerateRequest) -> bool:
    """Whether a turn was lost with its engine; any other error is raised."""
    async with aclosing(lab.engine.generate(request)) as chunks:
        try:
            await lab.rest(request, chunks)
        except _GONE:
            left = [chunk async for chunk in chunks]
            assert not left, f"after an error {len(left)} chunks came"
            return True
    return False


async def closes(lab: Lab) -> None:
    """A closed engine has ended its turns, takes no more, says so, and may be closed again."""
    request = lab.request(**lab.long_tokens)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_gone_or_done(lab, request))
        await asyncio.sleep(0)
        await lab.engine.aclose()
    assert lab.engine.health().state is EngineState.STOPPED, f"a closed engine is {lab.engine.health().state}"
    try:
        await lab.greedy()
    except EngineUnavailable:
        await lab.engine.aclose()
        return
    raise AssertionError("a closed engine answered")


LAWS: Mapping[str, Law] = {
    law.__name__: law
    for law in (
        *(ids_and_logprobs, prompt_as_it_is, logprobs_of_the_model, supports_of_tokens, alternatives),
        *(streams_tokens, whole_equals_streamed, greedy_repeats, seeds_repeat, together_as_alone),
        *(
            stops_at_eos,
            stops_at_token_id,
            stops_at_string,
            stops_after_the_least_number,
            stops_at_length,
            refuses_what_is_too_long,
        ),
        *(abort_keeps_what_was_drawn, abort_of_the_unknown, leaving_stops, pause_and_resume, two_weight_versions),
        *(counts_what_it_runs, does_what_it_says),
        *(refuses_garbage, dies_clearly_and_comes_back),
    )
} | grammar_laws()
"""All laws for one engine, one after the other."""

LAST_LAWS: Mapping[str, Law] = {closes.__name__: closes}
"""Laws that close their engine: they come last."""
