"""Several engines behind the one interface of an engine.

Owns the choice of a turn's engine (`placement` has the rule), the tokens left by sessions at each engine, and the
knowledge of an engine beyond its own word (`trust`). Knows nothing of HTTP. Holds no task: a turn runs in its reader's.

A turn is tried at another engine only before its first token, only where the error means an absent engine or a refusal
of the turn, and at each engine once. A reply, once begun, is not tried again: its tokens were sampled.

Engines join and leave while turns run. A leaving one gets no new turn; its sessions go on at others. While there is one
engine, turns go straight to it, and nothing is counted.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from stenograph.core.clock import Clock
from stenograph.core.errors import (
    CallerError,
    EngineUnavailable,
    StartupError,
    StenographError,
    UpstreamRefused,
    UpstreamUnreachable,
)
from stenograph.core.loaded import entry
from stenograph.core.messages import MediaKind
from stenograph.core.types import Chunk, Finish, FinishReason, RequestId
from stenograph.core.weights import ControlAnswer, NameWeights, UpdateWeights, WeightCommand
from stenograph.engine.base import (
    AFFINITY_HEADER,
    Capabilities,
    Engine,
    EngineHealth,
    EngineState,
    EngineStatus,
    GenerateRequest,
    Outcome,
)
from stenograph.engine.fleet.members import FleetMember, FleetSession, FleetSessions, MemberState
from stenograph.engine.fleet.placement import FIRST_PAUSE_S, Trust, choose, common_capabilities, cost_of, difference

if TYPE_CHECKING:
    from stenograph.engine.fleet.gate import MemoryGate
    from stenograph.engine.fleet.memory import MemoryTurn
    from stenograph.engine.http.transport import HttpReply

GATE = "stenograph.engine.fleet.gate:MemoryGate"
TRIAL_S = 10.0  # longer than a connection takes to fail, as a rule (`connect_timeout`)
DRAIN_LOOK_S = 0.05  # between two looks at whether an engine that leaves is idle
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(slots=True)
class _FleetTurn:
    """A generation under way: where it is, or was last, and where it has been. `media` are the kinds in its prompt, and
    `policy` its LoRA."""

    media: frozenset[MediaKind] = frozenset()
    policy: str | None = None
    post: MemberState | None = None
    tried: set[str] = field(default_factory=set[str])
    was_aborted: bool = False
    waits: "MemoryTurn[MemberState] | None" = None
    """While it waits for an engine's memory."""


@dataclass(slots=True)
class _Try:
    """One generation at one engine, where `num_expected` tokens of its prompt should be cached."""

    post: MemberState
    cost_tokens: int
    is_trial: bool
    num_expected: int
    num_sampled: int = 0
    has_yielded: bool = False
    outcome: Outcome = Outcome.LEFT


class Fleet(Engine):
    """Engines of one model, as one. Every method changes state without waiting; only engines are waited for."""

    def __init__(
        self,
        members: Sequence[FleetMember],
        *,
        clock: Clock,
        trial_s: float = TRIAL_S,
        make: Callable[[str], FleetMember] | None = None,
        load_interval_s: float = 0.0,
        max_wait_s: float = 0.0,
    ) -> None:
        """`make` makes an engine of an address, for more to join; None: none can. Engines are asked how full they are
        each `load_interval_s`, 0 for never, and turns wait for their memory, no longer than `max_wait_s`."""
        names = [member.name for member in members]
        if not names or len(set(names)) < len(names):
            raise StartupError(f"a fleet has one engine or more, each of its own name, not {names}")
        self._trial_s = trial_s
        self.make = make
        self._posts = [MemberState(one.name, one.engine, Trust(trial_s=trial_s), one.url) for one in members]
        self._clock = clock
        self._healths = [member.engine.health() for member in members]
        self._known: dict[str, Capabilities] = {}
        self._common: Capabilities | None = None
        self._turns: dict[RequestId, _FleetTurn] = {}
        self._sessions = FleetSessions()
        self._new_gate: Callable[[], MemoryGate[_Try]] = lambda: entry(GATE)(
            clock, interval_s=load_interval_s, max_wait_s=max_wait_s, refresh=self._sessions.fade
        )
        self._reads_loads = load_interval_s > 0
        self._gate: MemoryGate[_Try] | None = None
        self._closing = False

    def __repr__(self) -> str:
        num_ready = sum(post.is_ready for post in self._posts)
        return f"<Fleet {num_ready} of {len(self._posts)} ready, {len(self._turns)} running>"

    @property
    def capabilities(self) -> Capabilities:
        """Abilities shared by all engines; an engine may learn some as it comes up, and they count from then on."""
        if len(self._posts) == 1:
            return self._posts[0].engine.capabilities
        assert self._common is not None, "capabilities are known once start has returned"
        healths = [post.engine.health() for post in self._posts]
        if any(now is not before for now, before in zip(healths, self._healths, strict=True)):  # it learned something
            self._count_anew()
        return self._common

    @property
    def num_running(self) -> int:
        """Generations begun and not ended."""
        return self._posts[0].engine.num_running if len(self._posts) == 1 else len(self._turns)

    @property
    def forwards(self) -> bool:
        """Whether each of its engines does."""
        return all(post.engine.forwards for post in self._posts)

    def health(self) -> EngineHealth:
        """READY while any engine is."""
        if self._closing:
            return EngineHealth(state=EngineState.STOPPED, detail="stopped")
        if len(self._posts) == 1:
            return self._posts[0].engine.health()
        healths = {post.name: post.health for post in self._posts}
        states = {health.state for health in healths.values()}
        if EngineState.READY in states:
            return EngineHealth(state=EngineState.READY)
        state = EngineState.STARTING if EngineState.STARTING in states else EngineState.DOWN
        told = (f"{name}: {health.detail or health.state}" for name, health in healths.items())
        return EngineHealth(state=state, detail="; ".join(told))

    def statuses(self) -> Sequence[EngineStatus]:
        """Each engine, by its own word and by the outcomes of requests."""
        if len(self._posts) == 1:
            return self._posts[0].engine.statuses()
        now = self._clock.monotonic()
        gate = self._gate
        return [post.status(now, None if gate is None else gate.load_of(post.name)) for post in self._posts]

    @property
    def num_waiting(self) -> int:
        return 0 if self._gate is None else self._gate.num_waiting

    async def start(self) -> None:
        """Start all. Raises StartupError for one that fails to start, or is of another kind than the rest.

        An absent engine raises nothing: it is used when it comes.
        """
        outcomes = await asyncio.gather(*(post.engine.start() for post in self._posts), return_exceptions=True)
        for post, outcome in zip(self._posts, outcomes, strict=True):
            if isinstance(outcome, StartupError):
                raise StartupError(f"{post.name}: {outcome}") from outcome
            if outcome is not None:
                raise outcome
        self._count_anew()
        self._follow_loads()

    def _follow_loads(self) -> None:
        """Read how full the engines are, where there are several."""
        if self._reads_loads and len(self._posts) > 1 and self._gate is None:
            self._gate = self._new_gate()
        if self._gate is not None:
            self._gate.follow(self._posts if len(self._posts) > 1 else ())

    def join(self, member: FleetMember) -> None:
        """Give turns to one more engine, already started. Raises StartupError for one unfit to stand in for the others,
        or with a name in use."""
        if any(post.name == member.name for post in self._posts):
            raise StartupError(f"there is an engine {member.name} already")
        known = {post.name: post.engine.capabilities for post in self._posts if not post.misfit}
        self._common = common_capabilities({**known, member.name: member.engine.capabilities})
        self._posts.append(MemberState(member.name, member.engine, Trust(trial_s=self._trial_s), member.url))
        self._count_anew()
        self._follow_loads()

    @property
    def members(self) -> Mapping[str, Engine]:
        return {post.name: post.engine for post in self._posts if not post.is_leaving}

    @property
    def addresses(self) -> Mapping[str, str]:
        return {post.url: post.name for post in self._posts if not post.is_leaving}

    def dismiss(self, name: str) -> bool:
        """Give an engine no more turns. False for an unknown name. Raises StartupError for the last one staying."""
        if (post := self._named(name)) is None:
            return False
        if all(other.is_leaving for other in self._posts if other is not post):
            raise StartupError(f"{name} is the only engine: add another one first")
        post.is_leaving = True
        self._sessions.evict(post)
        return True

    async def leave(self, name: str) -> bool:
        """Dismiss an engine, and close it after the end of its turns. As `dismiss`."""
        if (post := self._named(name)) is None or not self.dismiss(name):
            return False
        while post.engine.num_running:  # noqa: ASYNC110 - no engine tells of it
            await asyncio.sleep(DRAIN_LOOK_S)
        await post.engine.aclose()
        if post in self._posts:
            self._posts.remove(post)
            self._count_anew()
            self._follow_loads()
        return True

    def _named(self, name: str) -> "MemberState | None":
        return next((post for post in self._posts if post.name == name), None)

    def _count_anew(self) -> None:
        """Raises StartupError for engines of several kinds at the start. Later, one of another kind than before gets no
        turns, as long as one of the same kind is up."""
        self._healths = [post.engine.health() for post in self._posts]
        known = {post.name: post.engine.capabilities for post in self._posts}
        if known == self._known:
            return
        self._known = known
        if (before := self._common) is not None:
            ready = EngineState.READY
            up = [post.engine.capabilities for post in self._posts if post.engine.health().state is ready]
            same = next((one for one in up if not difference(("", before), ("", one))), up[0] if up else before)
            for post in self._posts:
                post.misfit = difference(("it", known[post.name]), ("another", same))
            known = {post.name: known[post.name] for post in self._posts if not post.misfit} or {"": same}
        self._common = common_capabilities(known)

    async def aclose(self) -> None:
        """Close all, whatever becomes of one. Raises the first error, if there is any."""
        self._closing = True
        if self._gate is not None:
            await self._gate.aclose()
        outcomes = await asyncio.gather(*(post.engine.aclose() for post in self._posts), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def abort(self, request_id: RequestId) -> bool:
        """Tell its engine; a turn on the move ends where it is."""
        if (turn := self._turns.get(request_id)) is None:  # it began while there was one engine, or has ended
            return any([await post.engine.abort(request_id) for post in self._posts])
        turn.was_aborted = True
        if turn.waits is not None and self._gate is not None:
            self._gate.drop(turn.waits)
        if turn.post is not None:
            await turn.post.engine.abort(request_id)
        return True

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Sample, at the one engine, or at one of several."""
        if len(self._posts) == 1:
            return self._posts[0].engine.generate(request)
        return self._generate(request)

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Sample, at one engine after the other until one is there. Raises the last one's error."""
        assert request.request_id not in self._turns, "a request id is used once"
        media = frozenset(one.item.ref.kind for one in request.prompt.media)
        turn = self._turns[request.request_id] = _FleetTurn(media=media, policy=request.policy)
        try:
            while not (turn.tried and turn.was_aborted):
                run = await self._entered(request, turn)
                if run is None:
                    break
                try:
                    async with aclosing(run.post.engine.generate(request)) as chunks:
                        async for chunk in chunks:
                            self._saw(run, request, chunk)
                            yield chunk
                    return
                except StenographError as error:
                    if not self._moves_on(error, run, turn):
                        raise
                finally:
                    self._end(run)
            yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
        finally:
            del self._turns[request.request_id]

    def end_session(self, key: str) -> None:
        """Forget a session, and tell the engines that had turns of it."""
        session = self._sessions.end(key)
        for post in self._posts:
            if len(self._posts) == 1 or (session is not None and post.name in session.left_tokens):
                post.engine.end_session(key)

    def share_home(self, key: str, new: str) -> None:
        """A session begins with another's tokens: its first turn goes to that one's engine, which has them once."""
        if (known := self._sessions.known(key)) is not None and known.home is not None:
            self._sessions.settle(self._sessions.of(new), known.home, 0, self._clock.monotonic())

    async def find_version(self) -> str | None:
        """The name of the weights, common to all of them; None where they do not say one."""
        versions = set(await asyncio.gather(*(post.engine.find_version() for post in self._posts)))
        return versions.pop() if len(versions) == 1 else None

    def follow_version(self, version: str | None, lacking: Collection[str]) -> None:
        for post in self._posts:
            post.engine.follow_version(version, lacking)

    async def control(self, command: WeightCommand) -> Sequence[ControlAnswer]:
        """Tell all that are there now, at once; an engine leaving by the time of the last answer is not counted. Where
        some have taken new weights, the others get no turns until they have."""
        posts = tuple(self._posts)
        told = await asyncio.gather(*(post.engine.control(command) for post in posts))
        stayed = [(post, one) for post, one in zip(posts, told, strict=True) if not post.is_leaving]
        answers = [replace(answer, name=post.name) for post, one in stayed for answer in one]
        if isinstance(command, UpdateWeights | NameWeights) and not all(answer.problem for answer in answers):
            for (post, _), answer in zip(stayed, answers, strict=True):
                if answer.problem:
                    post.engine.require_version(command.version)
        return answers

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> "HttpReply":
        """Pass a request on to its session's home, or to an engine with little to do.

        An absent one is passed over if the method is safe: the effect of any other method is unknown.
        """
        if not self.forwards:
            return await super().forward(method, target, headers, body)
        turn = _FleetTurn()
        key = next((value for name, value in headers if name == AFFINITY_HEADER), None)
        known = self._sessions.known(key)
        while candidates := self._candidates(turn):
            post = choose(candidates, key=key or target, home=None if known is None else known.home, cost_tokens=0)
            turn.tried.add(post.name)
            try:
                return await post.engine.forward(method, target, headers, body)
            except UpstreamUnreachable as error:
                post.trust.failed(self._clock.monotonic(), error.message, was_trial=False)
                if method not in SAFE_METHODS or not self._candidates(turn):
                    raise
        raise EngineUnavailable(
            f"None of the {len(self._posts)} engines can be reached now.", retry_after_s=FIRST_PAUSE_S
        )

    # -- one try

    async def _entered(self, request: GenerateRequest, turn: _FleetTurn) -> _Try | None:
        """Give a turn to an engine not yet tried for it, once one has memory for it where engines say how full they
        are. None: it was aborted as it waited. Raises EngineUnavailable where there is none."""
        ready = self._candidates(turn)
        if not ready:
            what = f"turns with an {' and '.join(turn.media)}" if turn.media else "turns"
            told = f"None of the {len(self._posts)} engines takes {what} now."
            raise EngineUnavailable(told, retry_after_s=FIRST_PAUSE_S)
        session, cost = self._sessions.of(request.affinity_key), cost_of(request.prompt.num_tokens)
        key, home = request.affinity_key or request.request_id, session.home
        if self._gate is None:
            return self._begin(request, turn, session, choose(ready, key=key, home=home, cost_tokens=cost))
        num_kept = 0 if home is None else min(request.prompt.num_kept, session.left_tokens[home.name])
        turn.waits = self._gate.asked(
            key=key,
            home=home,
            cost_tokens=cost,
            kept_tokens=num_kept,
            candidates=partial(self._candidates, turn),
            needs=(turn.media, turn.policy, frozenset(turn.tried)),
        )
        try:
            return await self._gate.enter(turn.waits, partial(self._begin, request, turn, session), self._end)
        finally:
            turn.waits = None

    def _begin(self, request: GenerateRequest, turn: _FleetTurn, session: FleetSession, post: MemberState) -> _Try:
        """Note a turn at its engine."""
        turn.post, cost = post, cost_of(request.prompt.num_tokens)
        turn.tried.add(post.name)
        post.num_running += 1
        post.load_tokens += cost
        return _Try(
            post=post,
            cost_tokens=cost,
            is_trial=post.trust.began(self._clock.monotonic()),
            num_expected=min(request.prompt.num_kept, session.left_tokens.get(post.name, 0)),
        )

    def _candidates(self, turn: _FleetTurn | None = None) -> "list[MemberState]":
        """Candidates for a turn: ready and trusted, or due for a trial; without any, all engines that report ready."""
        now, turn = self._clock.monotonic(), turn or _FleetTurn()
        ready = [] if self._closing else [post for post in self._posts if post.name not in turn.tried and post.is_ready]
        if turn.media:
            ready = [post for post in ready if turn.media <= post.engine.capabilities.media]
        if turn.policy is not None:  # an engine may load one that it does not list
            ready = [post for post in ready if turn.policy in (post.engine.capabilities.policies or ())] or ready
        return [post for post in ready if post.trust.admits(now)] or ready

    def _saw(self, run: _Try, request: GenerateRequest, chunk: Chunk) -> None:
        """An engine said something: it is there, and nothing of this turn is tried again."""
        if not run.has_yielded:
            run.has_yielded = True
            run.post.trust.worked()
        run.num_sampled += len(chunk.ids)
        if chunk.finish is not None:
            run.outcome = Outcome.ANSWERED
            run.post.num_expected_cached += run.num_expected
            # What cannot be true is refused where the turn is checked; here it must not spoil a count.
            run.post.num_cached += min(chunk.num_cached_tokens, request.prompt.num_tokens)
            if request.affinity_key is not None:
                left = request.prompt.num_tokens + run.num_sampled
                session = self._sessions.of(request.affinity_key)
                self._sessions.settle(session, run.post, left, self._clock.monotonic())

    def _moves_on(self, error: StenographError, run: _Try, turn: _FleetTurn) -> bool:
        """Learn from an error; returns whether the turn is to go on without this engine."""
        if isinstance(error, UpstreamUnreachable | EngineUnavailable) or says_not_there(error):
            if turn.policy is None or not isinstance(error, EngineUnavailable):  # else it lacks the LoRA alone
                run.post.trust.failed(self._clock.monotonic(), error.message, was_trial=run.is_trial)
            goes_on = not run.has_yielded and says_not_there(error)
            if goes_on and (turn.was_aborted or self._candidates(turn)):
                run.outcome = Outcome.MOVED
                return True
            run.outcome = Outcome.FAILED
            return False
        run.post.trust.worked()
        run.outcome = Outcome.REFUSED if _blames_request(error) else Outcome.FAILED
        return False

    def _end(self, run: _Try) -> None:
        """End a try, in whatever way; give back its load."""
        post = run.post
        post.num_running -= 1
        post.load_tokens -= run.cost_tokens
        post.outcomes[run.outcome] += 1
        if run.outcome is Outcome.LEFT and not run.has_yielded:
            post.trust.left(was_trial=run.is_trial)
        if self._gate is not None:
            self._gate.freed(post)


def says_not_there(error: StenographError) -> bool:
    """Whether an error means an absent engine, or a refusal of the turn: nothing was sampled."""
    if isinstance(error, UpstreamUnreachable):
        return not error.reply_began
    if isinstance(error, UpstreamRefused):
        return error.engine_status == 503
    return isinstance(error, EngineUnavailable)


def _blames_request(error: StenographError) -> bool:
    return isinstance(error, CallerError) or (isinstance(error, UpstreamRefused) and 400 <= error.engine_status < 500)
