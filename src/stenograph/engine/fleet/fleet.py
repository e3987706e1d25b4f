"""Several engines behind the one interface of an engine.

Owns the choice of a turn's engine (`placement` has the rule), the tokens left by sessions at each engine, and the
knowledge of an engine beyond its own word (`trust`). Knows nothing of HTTP. Holds no task: a turn runs in its reader's.

A turn is tried at another engine only before its first token, only where the error means an absent engine or a refusal
of the turn, and at each engine once. A reply, once begun, is not tried again: its tokens were sampled.

Engines join and leave while turns run. A leaving one gets no new turn; its sessions go on at others. While there is one
engine, turns go straight to it, and nothing is counted.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from stenograph.core.clock import Clock
from stenograph.core.errors import (
    CallerError,
    EngineUnavailable,
    StartupError,
    StenographError,
    UpstreamRefused,
    UpstreamUnreachable,
)
from stenograph.core.messages import MediaKind
from stenograph.core.types import Chunk, Finish, FinishReason, RequestId
from stenograph.core.weights import ControlAnswer, NameWeights, UpdateWeights, WeightCommand
from stenograph.engine.base import (
    AFFINITY_HEADER,
    Capabilities,
    Engine,
    EngineCounts,
    EngineHealth,
    EngineState,
    EngineStatus,
    ForwardedAnswer,
    GenerateRequest,
    Outcome,
)
from stenograph.engine.fleet.placement import FIRST_PAUSE_S, Trust, choose, common_capabilities, cost_of, difference

MAX_SESSIONS = 2**15
"""The most recently used sessions: their engines are remembered. A forgotten session is placed anew."""
TRIAL_S = 10.0  # longer than a connection takes to fail, as a rule (`connect_timeout`)
DRAIN_LOOK_S = 0.05  # between two looks at whether an engine that leaves is idle
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """An engine and its name: its address, as a rule. `url` is where it is, with a password if it has one."""

    name: str
    engine: Engine
    url: str = ""


@dataclass(slots=True, eq=False)
class _MemberState:
    """A member, its turns under way, and the knowledge of it. `num_sessions` are at home here."""

    name: str
    engine: Engine
    trust: Trust
    url: str
    num_running: int = 0
    load_tokens: int = 0
    num_sessions: int = 0
    num_expected_cached: int = 0
    num_cached: int = 0
    is_leaving: bool = False
    misfit: str = ""
    """The ability that keeps it from standing in for the others, in words; "" for none."""
    outcomes: Counter[Outcome] = field(default_factory=Counter[Outcome])

    @property
    def health(self) -> EngineHealth:
        """By its own word, unless it is up as an engine of another kind than the rest."""
        told = self.engine.health()
        is_misfit = self.misfit and told.state is EngineState.READY
        return EngineHealth(state=EngineState.DOWN, detail=self.misfit) if is_misfit else told

    @property
    def is_ready(self) -> bool:
        """Whether it stays, and reports itself ready for turns."""
        return not self.is_leaving and self.health.state is EngineState.READY


@dataclass(slots=True)
class _SessionPlace:
    """The engine of a session's last turn, and the number of tokens left at each engine by its last turn there."""

    home: _MemberState | None = None
    left_tokens: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _FleetTurn:
    """A generation under way: where it is, or was last, and where it has been. `media` are the kinds in its prompt, and
    `policy` its LoRA."""

    media: frozenset[MediaKind] = frozenset()
    policy: str | None = None
    post: _MemberState | None = None
    tried: set[str] = field(default_factory=set[str])
    was_aborted: bool = False


@dataclass(slots=True)
class _Try:
    """One generation at one engine, where `num_expected` tokens of its prompt should be cached."""

    post: _MemberState
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
    ) -> None:
        """`make` makes an engine of an address, for more to join; None: none can."""
        names = [member.name for member in members]
        if not names or len(set(names)) < len(names):
            raise StartupError(f"a fleet has one engine or more, each of its own name, not {names}")
        self._trial_s = trial_s
        self.make = make
        self._posts = [_MemberState(one.name, one.engine, Trust(trial_s=trial_s), one.url) for one in members]
        self._clock = clock
        self._healths = [member.engine.health() for member in members]
        self._known: dict[str, Capabilities] = {}
        self._common: Capabilities | None = None
        self._turns: dict[RequestId, _FleetTurn] = {}
        self._sessions: OrderedDict[str, _SessionPlace] = OrderedDict()
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
        return [_status_of(post, now) for post in self._posts]

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

    def join(self, member: FleetMember) -> None:
        """Give turns to one more engine, already started. Raises StartupError for one unfit to stand in for the others,
        or with a name in use."""
        if any(post.name == member.name for post in self._posts):
            raise StartupError(f"there is an engine {member.name} already")
        known = {post.name: post.engine.capabilities for post in self._posts if not post.misfit}
        self._common = common_capabilities({**known, member.name: member.engine.capabilities})
        self._posts.append(_MemberState(member.name, member.engine, Trust(trial_s=self._trial_s), member.url))
        self._count_anew()

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
        for session in self._sessions.values():
            if session.home is post:
                session.home = None
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
        return True

    def _named(self, name: str) -> "_MemberState | None":
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
        outcomes = await asyncio.gather(*(post.engine.aclose() for post in self._posts), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def abort(self, request_id: RequestId) -> bool:
        """Tell its engine; a turn on the move ends where it is."""
        if (turn := self._turns.get(request_id)) is None:  # it began while there was one engine, or has ended
            return any([await post.engine.abort(request_id) for post in self._posts])
        turn.was_aborted = True
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
                run = self._begin(request, turn)
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
        """Forget a session's place, and tell the engines that had turns of it."""
        session = self._sessions.pop(key, None)
        if session is not None and session.home is not None:
            session.home.num_sessions -= 1
        for post in self._posts:
            if len(self._posts) == 1 or (session is not None and post.name in session.left_tokens):
                post.engine.end_session(key)

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

    async def forward(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> ForwardedAnswer:
        """Pass a request on to its session's home, or to an engine with little to do.

        An absent one is passed over if the method is safe: the effect of any other method is unknown.
        """
        if not self.forwards:
            return await super().forward(method, target, headers, body)
        turn = _FleetTurn()
        key = next((value for name, value in headers if name == AFFINITY_HEADER), None)
        known = self._sessions.get(key) if key is not None else None
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

    def _begin(self, request: GenerateRequest, turn: _FleetTurn) -> _Try:
        """Give a turn to an engine not yet tried for it. Raises EngineUnavailable where there is none."""
        ready = self._candidates(turn)
        if not ready:
            what = f"turns with an {' and '.join(turn.media)}" if turn.media else "turns"
            told = f"None of the {len(self._posts)} engines takes {what} now."
            raise EngineUnavailable(told, retry_after_s=FIRST_PAUSE_S)
        session, cost = self._session_of(request.affinity_key), cost_of(request.prompt.num_tokens)
        key = request.affinity_key or request.request_id
        post = choose(ready, key=key, home=session.home, cost_tokens=cost)
        turn.post = post
        turn.tried.add(post.name)
        post.num_running += 1
        post.load_tokens += cost
        return _Try(
            post=post,
            cost_tokens=cost,
            is_trial=post.trust.began(self._clock.monotonic()),
            num_expected=min(request.prompt.num_kept, session.left_tokens.get(post.name, 0)),
        )

    def _candidates(self, turn: _FleetTurn | None = None) -> "list[_MemberState]":
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
                self._settle(self._session_of(request.affinity_key), run.post, left)

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

    # -- sessions

    def _session_of(self, key: str | None) -> _SessionPlace:
        """The place kept for a session; an empty one for an unknown session."""
        if key is None:
            return _SessionPlace()
        session = self._sessions.setdefault(key, _SessionPlace())
        self._sessions.move_to_end(key)
        if len(self._sessions) > MAX_SESSIONS:
            _, forgotten = self._sessions.popitem(last=False)
            if forgotten.home is not None:
                forgotten.home.num_sessions -= 1
        return session

    def _settle(self, session: _SessionPlace, post: _MemberState, left_tokens: int) -> None:
        """A session's turn has ended at an engine, its home from now on."""
        if session.home is not None:
            session.home.num_sessions -= 1
        post.num_sessions += 1
        session.home = post
        session.left_tokens[post.name] = left_tokens


def says_not_there(error: StenographError) -> bool:
    """Whether an error means an absent engine, or a refusal of the turn: nothing was sampled."""
    if isinstance(error, UpstreamUnreachable):
        return not error.reply_began
    if isinstance(error, UpstreamRefused):
        return error.engine_status == 503
    return isinstance(error, EngineUnavailable)


def _blames_request(error: StenographError) -> bool:
    return isinstance(error, CallerError) or (isinstance(error, UpstreamRefused) and 400 <= error.engine_status < 500)


def _status_of(post: _MemberState, now: float) -> EngineStatus:
    (status,) = post.engine.statuses()
    health = post.health
    if post.is_leaving:
        health = EngineHealth(state=EngineState.STOPPED, detail="it leaves when its turns have ended")
    elif post.trust.in_doubt and not health.detail:
        doubt = f"in doubt, tried again in {post.trust.retry_in_s(now):.0f} s: {post.trust.why}"
        health = EngineHealth(state=health.state, detail=doubt)
    return replace(
        status,
        name=post.name,
        health=health,
        num_running=post.num_running,
        counts=EngineCounts(
            outcomes=post.outcomes.copy(),
            num_expected_cached=post.num_expected_cached,
            num_cached=post.num_cached,
        ),
    )
