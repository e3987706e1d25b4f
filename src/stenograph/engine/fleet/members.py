"""The engines of a fleet as it knows them, and the engines of sessions' last turns. Synchronous."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

from stenograph.engine.base import (
    Engine,
    EngineCounts,
    EngineHealth,
    EngineLoad,
    EngineState,
    EngineStatus,
    Outcome,
)
from stenograph.engine.fleet.placement import Trust

MAX_SESSIONS = 2**15
"""The most recently used sessions: their engines are remembered. A forgotten session is placed anew."""
RESIDENT_S = 60.0
"""So long after its last turn a session's tokens count as wanted at its home. A tool is quicker, as a rule; a session
that takes longer may never come back, and must not keep others out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """An engine and its name: its address, as a rule. `url` is where it is, with a password if it has one."""

    name: str
    engine: Engine
    url: str = ""


@dataclass(slots=True, eq=False)
class MemberState:
    """A member, its turns under way, and the knowledge of it. `num_sessions` are at home here; those of them that had a
    turn lately left `home_tokens`."""

    name: str
    engine: Engine
    trust: Trust
    url: str
    num_running: int = 0
    load_tokens: int = 0
    num_sessions: int = 0
    home_tokens: int = 0
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

    def status(self, now: float, load: EngineLoad | None) -> EngineStatus:
        """As people and monitors see it; `load` is its own word, if it is known."""
        (status,) = self.engine.statuses()
        health = self.health
        if self.is_leaving:
            health = EngineHealth(state=EngineState.STOPPED, detail="it leaves when its turns have ended")
        elif self.trust.in_doubt and not health.detail:
            doubt = f"in doubt, tried again in {self.trust.retry_in_s(now):.0f} s: {self.trust.why}"
            health = EngineHealth(state=health.state, detail=doubt)
        counts = EngineCounts(
            outcomes=self.outcomes.copy(),
            num_expected_cached=self.num_expected_cached,
            num_cached=self.num_cached,
        )
        return replace(status, name=self.name, health=health, num_running=self.num_running, counts=counts, load=load)


@dataclass(slots=True, eq=False)
class FleetSession:
    """The engine of a session's last turn, and the number of tokens left at each engine by its last turn there.
    `is_resident`: that was lately."""

    home: MemberState | None = None
    left_tokens: dict[str, int] = field(default_factory=dict[str, int])
    is_resident: bool = False

    def fade(self) -> None:
        """It had no turn for long."""
        if self.home is not None and self.is_resident:
            self.home.home_tokens -= self.left_tokens[self.home.name]
        self.is_resident = False

    def leave(self) -> None:
        """It has no home any more."""
        self.fade()
        if self.home is not None:
            self.home.num_sessions -= 1
            self.home = None


class FleetSessions:
    """Sessions as the fleet knows them, by affinity key."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, FleetSession] = OrderedDict()
        self._resident: OrderedDict[FleetSession, float] = OrderedDict()
        """By the time of their last turn's end, the oldest first."""

    def __repr__(self) -> str:
        return f"<FleetSessions of {len(self._by_key)} sessions>"

    def of(self, key: str | None) -> FleetSession:
        """The session of a key; a new one for an unknown key."""
        if key is None:
            return FleetSession()
        session = self._by_key.setdefault(key, FleetSession())
        self._by_key.move_to_end(key)
        if len(self._by_key) > MAX_SESSIONS:
            _, forgotten = self._by_key.popitem(last=False)
            forgotten.leave()
        return session

    def settle(self, session: FleetSession, post: MemberState, left_tokens: int, now: float) -> None:
        """A turn of a session has ended at an engine, its home from now on."""
        session.leave()
        session.home, session.left_tokens[post.name], session.is_resident = post, left_tokens, True
        post.num_sessions += 1
        post.home_tokens += left_tokens
        self._resident[session] = now
        self._resident.move_to_end(session)
        self.fade(now)

    def fade(self, now: float) -> None:
        """Forget the wants of sessions that had no turn for long."""
        while self._resident:
            session, at = next(iter(self._resident.items()))
            if session.is_resident and now - at < RESIDENT_S:
                return
            session.fade()
            del self._resident[session]

    def known(self, key: str | None) -> FleetSession | None:
        """The same, without use of it."""
        return None if key is None else self._by_key.get(key)

    def end(self, key: str) -> FleetSession | None:
        """Forget a session. Returns it, for the engines that had turns of it."""
        session = self._by_key.pop(key, None)
        if session is not None:
            session.leave()
            self._resident.pop(session, None)
        return session

    def evict(self, post: MemberState) -> None:
        """An engine leaves: nobody is at home there."""
        for session in self._by_key.values():
            if session.home is post:
                session.leave()
