"""A fleet of scripted engines, asked directly: where turns go, what is tried again, what is counted."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    StartupError,
    StenographError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnreachable,
)
from stenograph.core.types import Chunk, FinishReason, GrammarKind, Prompt, RequestId, SamplingParams, token_ids
from stenograph.engine.base import (
    Capabilities,
    EngineState,
    EngineStatus,
    GenerateRequest,
    Outcome,
)
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.fleet.placement import FIRST_PAUSE_S, common_capabilities

SAID = (5, 6, 7)
GONE = UpstreamUnreachable("connection refused")


class Rig:
    """A started fleet of so many engines, each of which says the same to whatever it is asked."""

    def __init__(self, num_engines: int = 3) -> None:
        self.clock = ManualClock()
        self.says = [Script(ids=SAID)] * num_engines
        self.engines = [
            ScriptedEngine(vocab_size=100, model=lambda _, at=at: self.says[at]) for at in range(num_engines)
        ]
        members = [FleetMember(name=f"e{at}", engine=engine) for at, engine in enumerate(self.engines)]
        self.fleet = Fleet(members, clock=self.clock)
        self._num_requests = 0

    def request(self, key: str | None = None, *, num_prompt: int = 4, num_kept: int = 0) -> GenerateRequest:
        self._num_requests += 1
        return GenerateRequest(
            request_id=RequestId(f"r{self._num_requests}"),
            prompt=Prompt.of(token_ids(range(num_prompt)), num_kept=num_kept),
            params=SamplingParams(),
            affinity_key=key,
        )

    async def draw(self, key: str | None = None, **prompt: int) -> list[Chunk]:
        return [chunk async for chunk in self.fleet.generate(self.request(key, **prompt))]

    async def one_begun(self) -> None:
        """Wait until some engine has been asked."""
        waits = {asyncio.ensure_future(engine.begun(1)) for engine in self.engines}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)

    @property
    def statuses(self) -> Sequence[EngineStatus]:
        return self.fleet.statuses()

    def num_asked(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines]

    def outcomes(self, outcome: Outcome) -> list[int]:
        return [0 if status.counts is None else status.counts.outcomes.get(outcome, 0) for status in self.statuses]

    def check_idle(self) -> None:
        """Nothing is held for a turn that is over."""
        assert self.fleet.num_running == 0
        assert [status.num_running for status in self.statuses] == [0] * len(self.engines)
        assert [post.load_tokens for post in self.fleet._posts] == [0] * len(self.engines)


@pytest.fixture
async def rig() -> Rig:
    made = Rig()
    await made.fleet.start()
    return made


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id_ for chunk in chunks for id_ in chunk.ids]


def error_script(error: StenographError, *ids: int) -> Script:
    return Script(ids=ids, error=error)


# -- where turns go


async def test_sessions_spread_evenly_one_after_the_other_and_all_at_once(rig: Rig) -> None:
    for number in range(63):
        await rig.draw(f"s{number}")
    assert rig.num_asked() == [21, 21, 21]
    rig.says = [Script(ids=SAID, paused=True)] * 3
    drawing = [asyncio.ensure_future(rig.draw(f"t{number}")) for number in range(63)]
    await asyncio.gather(*(engine.begun(42) for engine in rig.engines))
    assert rig.num_asked() == [42, 42, 42]
    assert [status.num_running for status in rig.statuses] == [21, 21, 21]
    for engine in rig.engines:
        engine.step(21 * (len(SAID) + 1))
    await asyncio.gather(*drawing)
    rig.check_idle()


async def test_a_session_stays_where_its_last_turn_ran(rig: Rig) -> None:
    for _ in range(3):
        await asyncio.gather(*(rig.draw(f"s{number}") for number in range(12)))
    for engine in rig.engines:
        asked = Counter(request.affinity_key for request in engine.requests)
        assert set(asked.values()) == {3}


async def test_a_session_leaves_a_home_that_has_too_much_to_do_and_stays_where_it_went(rig: Rig) -> None:
    await rig.draw("s")
    home = next(at for at, num in enumerate(rig.num_asked()) if num)
    rig.says[home] = Script(ids=SAID, paused=True)
    busy = [asyncio.ensure_future(rig.draw("s", num_prompt=5000)) for _ in range(2)]
    await rig.engines[home].begun(2)
    await rig.draw("s")
    assert sum(rig.num_asked()) == 4
    moved_to = next(at for at, num in enumerate(rig.num_asked()) if num and at != home)
    await rig.draw("s")
    assert rig.num_asked()[moved_to] >= 2
    rig.engines[home].step(20)
    await asyncio.gather(*busy)
    rig.check_idle()


# -- what is tried again


@pytest.mark.parametrize(
    "error",
    [
        GONE,
        EngineUnavailable("it is full"),
        UpstreamRefused(status=503, content_type="text/plain", headers=(), body=b"busy"),
    ],
)
async def test_an_engine_that_is_not_there_is_passed_over_and_only_before_the_first_token(
    rig: Rig, error: StenographError
) -> None:
    rig.says = [error_script(error), Script(ids=SAID), Script(ids=SAID)]
    for _ in range(6):
        assert ids_of(await rig.draw()) == list(SAID)
    assert rig.outcomes(Outcome.MOVED) == [rig.num_asked()[0], 0, 0]
    assert rig.num_asked()[0] <= 1, "it is in doubt after the first"
    rig.says = [error_script(error, 5)] * 3
    rig.clock.advance(FIRST_PAUSE_S)
    before = sum(rig.num_asked())
    with pytest.raises(type(error)):
        await rig.draw()
    assert sum(rig.num_asked()) == before + 1, "something had come of it"
    rig.check_idle()


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no"),
        UpstreamInvalid("id_in_vocab", "no"),
        UpstreamUnreachable("cut", reply_began=True),
        *(UpstreamRefused(status=s, content_type="", headers=(), body=b"") for s in (400, 404, 429, 500, 502, 504)),
    ],
)
async def test_what_was_drawn_or_would_be_refused_again_is_not_tried_again(rig: Rig, error: StenographError) -> None:
    rig.says = [error_script(error)] * 3
    with pytest.raises(type(error)) as caught:
        await rig.draw()
    assert caught.value is error
    assert sum(rig.num_asked()) == 1
    blames = isinstance(error, InvalidRequest) or (isinstance(error, UpstreamRefused) and error.engine_status < 500)
    assert sum(rig.outcomes(Outcome.REFUSED if blames else Outcome.FAILED)) == 1
    rig.check_idle()


async def test_when_nobody_is_left_the_last_error_is_told_after_one_try_at_each(rig: Rig) -> None:
    rig.says = [error_script(UpstreamUnreachable(f"e{at} is gone")) for at in range(3)]
    with pytest.raises(UpstreamUnreachable, match="is gone"):
        await rig.draw()
    assert rig.num_asked() == [1, 1, 1]
    assert sorted(rig.outcomes(Outcome.MOVED)) == [0, 1, 1]
    assert sorted(rig.outcomes(Outcome.FAILED)) == [0, 0, 1]
    # All are in doubt, but each says that it is ready: better than a refusal.
    rig.says = [Script(ids=SAID)] * 3
    assert ids_of(await rig.draw()) == list(SAID)


async def test_one_in_doubt_gets_one_trial_and_then_its_share(rig: Rig) -> None:
    rig.says[0] = error_script(GONE)
    while not rig.num_asked()[0]:
        await rig.draw()
    rig.says[0] = Script(ids=SAID, paused=True)
    asked = rig.num_asked()[0]
    for number in range(6):
        await rig.draw(f"a{number}")
    assert rig.num_asked()[0] == asked
    assert "in doubt" in rig.statuses[0].health.detail
    rig.clock.advance(FIRST_PAUSE_S)
    trial = asyncio.ensure_future(rig.draw("trial"))
    await rig.engines[0].begun(asked + 1)
    for number in range(6):
        await rig.draw(f"b{number}")
    assert rig.num_asked()[0] == asked + 1, "one trial at a time"
    rig.engines[0].step(len(SAID) + 1)
    await trial
    rig.says[0] = Script(ids=SAID)
    for number in range(6):
        await rig.draw(f"c{number}")
    assert rig.num_asked()[0] > asked + 1
    assert rig.statuses[0].health.detail == ""


async def test_one_that_says_it_is_down_gets_nothing_and_all_down_is_unavailable(rig: Rig) -> None:
    await rig.engines[0].aclose()
    for _ in range(6):
        await rig.draw()
    assert rig.num_asked()[0] == 0
    assert rig.fleet.health().state is EngineState.READY
    for engine in rig.engines:
        await engine.aclose()
    assert rig.fleet.health().state is EngineState.DOWN
    assert "e1: stopped" in rig.fleet.health().detail
    with pytest.raises(EngineUnavailable):
        await rig.draw()
    await rig.engines[1].start()
    assert ids_of(await rig.draw()) == list(SAID)


# -- aborts, leaving, closing


async def test_an_abort_reaches_the_engine_that_runs_the_turn_and_no_other(rig: Rig) -> None:
    rig.says = [Script(ids=SAID, paused=True)] * 3
    requests = [rig.request() for _ in range(3)]
    streams = [rig.fleet.generate(request) for request in requests]
    drawing = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.gather(*(engine.begun(1) for engine in rig.engines))
    assert await rig.fleet.abort(requests[1].request_id)
    chunk = await drawing[1]
    assert chunk.finish is not None
    assert chunk.finish.reason is FinishReason.ABORT
    assert [drawn.done() for drawn in drawing] == [False, True, False]
    for drawn in (drawing[0], drawing[2]):
        drawn.cancel()
    await asyncio.wait(drawing)
    for stream in streams:
        await stream.aclose()
    assert not await rig.fleet.abort(requests[1].request_id)
    assert sum(len(engine.stopped) for engine in rig.engines) == 2
    assert sum(rig.outcomes(Outcome.LEFT)) == 2
    rig.check_idle()


async def test_a_turn_that_is_aborted_while_its_engine_fails_ends_aborted_and_goes_nowhere_else(rig: Rig) -> None:
    rig.says = [Script(ids=(), error=GONE, paused=True, deaf=True)] * 3
    request = rig.request()
    async with aclosing(rig.fleet.generate(request)) as chunks:
        drawing = asyncio.ensure_future(anext(chunks))
        await rig.one_begun()
        assert await rig.fleet.abort(request.request_id)
        for engine in rig.engines:
            engine.step()
        chunk = await drawing
        assert [more async for more in chunks] == []
    assert chunk.finish is not None
    assert (list(chunk.ids), chunk.finish.reason) == ([], FinishReason.ABORT)
    assert sum(rig.num_asked()) == 1
    rig.check_idle()


async def test_a_closed_fleet_has_closed_all_and_moves_nothing(rig: Rig) -> None:
    rig.says = [Script(ids=SAID, paused=True)] * 3
    drawing = asyncio.ensure_future(rig.draw())
    await rig.one_begun()
    await rig.fleet.aclose()
    with pytest.raises(EngineUnavailable):
        await drawing
    assert sum(rig.num_asked()) == 1
    assert rig.fleet.health().state is EngineState.STOPPED
    assert {engine.health().state for engine in rig.engines} == {EngineState.STOPPED}


# -- what is counted


async def test_expected_reuse_is_what_the_session_left_at_that_engine(rig: Rig) -> None:
    def told() -> list[tuple[int, int]]:
        counts = [status.counts for status in rig.statuses if status.counts is not None]
        return sorted((c.num_expected_cached, c.num_cached) for c in counts if c.outcomes)

    rig.says = [Script(ids=SAID, num_cached=2)] * 3
    await rig.draw("s", num_prompt=10)
    assert told() == [(0, 2)]
    await rig.draw("s", num_prompt=20, num_kept=13)
    assert told() == [(13, 4)]
    await rig.draw("s", num_prompt=15, num_kept=10)  # the last turn is regenerated
    assert told() == [(23, 6)]
    home = next(engine for engine in rig.engines if engine.requests)
    await home.aclose()
    await rig.draw("s", num_prompt=30, num_kept=18)
    assert told() == [(0, 2), (23, 6)], "nothing of it is at the other engine"
    await rig.draw(num_prompt=30, num_kept=18)
    assert sum(expected for expected, _ in told()) == 23


faults = st.sampled_from(["ok", "gone", "refused", "midway", "leave"])


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(faults, min_size=3, max_size=3)), max_size=25))
@settings(max_examples=60)
def test_whatever_happens_nothing_stays_held_and_every_try_has_an_outcome(plan: list[tuple[int, list[str]]]) -> None:
    async def play() -> None:
        rig = Rig()
        await rig.fleet.start()
        scripts = {
            "ok": Script(ids=SAID),
            "gone": error_script(GONE),
            "refused": error_script(InvalidRequest("no")),
            "midway": error_script(GONE, 5, 6),
            "leave": Script(ids=SAID),
        }
        for session, acts in plan:
            rig.says = [scripts[act] for act in acts]
            try:
                async with aclosing(rig.fleet.generate(rig.request(f"s{session}"))) as chunks:
                    async for _ in chunks:
                        if "leave" in acts:
                            break
            except StenographError:
                pass
            rig.clock.advance(0.5)
            rig.check_idle()
        counts = [status.counts for status in rig.statuses if status.counts is not None]
        assert [sum(count.outcomes.values()) for count in counts] == rig.num_asked()
        places = [place for place in rig.fleet._sessions._by_key.values() if place.home is not None]
        homes = Counter(place.home.name for place in places if place.home is not None)
        assert {post.name: post.num_sessions for post in rig.fleet._posts if post.num_sessions} == dict(homes)
        left = Counter[str]()
        for place in (one for one in places if one.is_resident):
            assert place.home is not None
            left[place.home.name] += place.left_tokens[place.home.name]
        assert {post.name: post.home_tokens for post in rig.fleet._posts if post.home_tokens} == dict(left)

    asyncio.run(play())


# -- what a fleet is


def capabilities(**changes: object) -> Capabilities:
    made = Capabilities(
        engine="e", model="m", vocab_size=10, max_context_tokens=None, grammars=frozenset(GrammarKind), streams=True
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_fleet_can_do_what_all_can_do() -> None:
    some = frozenset({GrammarKind.REGEX, GrammarKind.CHOICE})
    common = common_capabilities(
        {
            "a": capabilities(max_context_tokens=500, note="slow route"),
            "b": capabilities(grammars=some),
            "c": capabilities(max_context_tokens=400, grammars=frozenset({GrammarKind.CHOICE})),
        }
    )
    assert (common.max_context_tokens, common.grammars) == (400, {GrammarKind.CHOICE})
    assert common.note == "a: slow route"
    assert common_capabilities({"a": capabilities()}) == capabilities()


async def test_what_an_engine_learns_of_itself_as_it_comes_up_counts_for_all(rig: Rig) -> None:
    engine = rig.engines[0]
    assert rig.fleet.capabilities.max_context_tokens == 65536
    await engine.aclose()
    engine._capabilities = replace(engine.capabilities, max_context_tokens=100)
    await engine.start()
    assert rig.fleet.capabilities.max_context_tokens == 100
    assert rig.fleet.capabilities is rig.fleet.capabilities


async def test_an_engine_that_comes_up_as_another_kind_gets_no_turns(rig: Rig) -> None:
    engine, right = rig.engines[0], rig.engines[0].capabilities
    engine._capabilities = replace(right, vocab_size=101)
    await engine.aclose()
    await engine.start()
    assert rig.fleet.capabilities.vocab_size == 100
    for number in range(9):
        assert ids_of(await rig.draw(f"s{number}")) == list(SAID)
    assert rig.num_asked() == [0, 4, 5]
    assert "it has 101, another has 100" in rig.statuses[0].health.detail
    assert rig.fleet.health().state is EngineState.READY
    engine._capabilities = right
    await engine.aclose()
    await engine.start()
    assert rig.fleet.capabilities.vocab_size == 100
    await rig.draw("again")
    assert rig.num_asked()[0] == 1


@pytest.mark.parametrize("what", ["vocab_size", "parses", "takes_json", "model", "engine"])
def test_engines_that_cannot_stand_in_for_each_other_are_refused(what: str) -> None:
    other: object = {"vocab_size": 11, "model": "n", "engine": "f"}.get(what, not getattr(capabilities(), what))
    with pytest.raises(StartupError, match=f"engines differ in {what}: a has .*, b has "):
        common_capabilities({"a": capabilities(), "b": capabilities(**{what: other})})


def test_a_fleet_streams_where_all_of_it_do() -> None:
    one, other = replace(capabilities(), streams=True), replace(capabilities(), streams=False)
    assert common_capabilities({"a": one, "b": one}).streams
    assert not common_capabilities({"a": one, "b": other}).streams


async def test_an_engine_that_cannot_be_started_stops_the_start_by_name() -> None:
    class Broken(ScriptedEngine):
        async def start(self) -> None:
            raise StartupError("no such model")

    engines = [ScriptedEngine(vocab_size=10), Broken(vocab_size=10)]
    fleet = Fleet([FleetMember(name=f"e{at}", engine=e) for at, e in enumerate(engines)], clock=ManualClock())
    with pytest.raises(StartupError, match="e1: no such model"):
        await fleet.start()
    await fleet.aclose()


def test_names_are_needed_once_and_only_servers_are_forwarded_to() -> None:
    members = [FleetMember(name="e", engine=ScriptedEngine(vocab_size=10))] * 2
    for wrong in (members, []):
        with pytest.raises(StartupError, match="one engine or more, each of its own name"):
            Fleet(wrong, clock=ManualClock())
    assert not Fleet(members[:1], clock=ManualClock()).forwards
