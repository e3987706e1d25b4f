"""A batch of rollouts: groups, spare rollouts, time limits, and the blame for a failure.

Owns the order of rollouts and the completion of groups. A rollout is one session and one run of the agent; it ends in a
`Rollout` whatever happens in it. Over-sampling works in two additive ways: more tasks than `keep_groups`, and `spares`
beside each group's `group_size`. Once enough is whole, the other agents are cancelled and their sessions deleted, so
their turns are aborted at the engine.
"""

import asyncio
import inspect
import itertools
import logging
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypedDict, TypeVar, Unpack, cast

from stenograph.client.batch import Rollout, RolloutBatch, RolloutError, RolloutGroup, error_place
from stenograph.client.errors import AgentFailure, ClientError, InfraFailure, TryLater, WrongKey, WrongRequest
from stenograph.client.progress import BatchProgress, ProgressSink
from stenograph.client.samples import DecodedSamples, Reward, SampleOptions
from stenograph.client.session import RolloutEnd, RolloutSession, SessionFields, checked_reward
from stenograph.client.shown import repr_line

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

log = logging.getLogger(__name__)

AGENT_END_S = 5.0
"""Longest wait for a cancelled agent to end. If it goes on, it is left alone; its session is deleted all the same."""
_BUSY = (408, 429)
"""Statuses of a request without time or capacity for it at a server or an engine."""

Agent = Callable[[T_contra, RolloutSession], Awaitable[Reward | None]]
"""`await agent(task, session)` gives the rollout's reward, or None if it comes from elsewhere."""

FieldsOf = SessionFields | Callable[[T_contra], SessionFields]
"""The fields of every session, or of a task's."""

RolloutSink = Callable[[Rollout[T]], Awaitable[None]]
"""Takes each rollout with its samples as it ends; the batch then has it without them, so memory holds the running
ones alone."""


class BatchOptions(TypedDict, total=False):
    """The options of a batch.

    `group_size` (1): rollouts of a task for a whole group. `spares` (0): rollouts of a group beyond these, in case of
    failures; when the group is whole, the others are cancelled. `keep_groups` (all): whole groups after which the batch
    ends. `concurrency` (64): rollouts at a time. `timeout_s` (none): longest time of an agent; it has failed then.
    `failed_reward` (none): the reward of a rollout with a failed agent, so that it counts in its group; without it such
    a rollout does not count. `infra_retries` (2): new sessions for a rollout failed by infrastructure. `infra_errors`:
    an agent's exceptions for such a failure. `partial` (`drop`): `keep` collects the samples of cancelled rollouts too,
    with the tokens sampled in their last turns. `name`: begins the names of the groups on the server.
    """

    group_size: int
    spares: int
    keep_groups: int | None
    concurrency: int
    timeout_s: float | None
    failed_reward: Reward | None
    infra_retries: int
    infra_errors: tuple[type[BaseException], ...]
    partial: Literal["drop", "keep"]
    name: str


class SessionOpener(Protocol):
    """Opens sessions, deleted at the end: a client."""

    def session(self, **fields: Unpack[SessionFields]) -> AbstractAsyncContextManager[RolloutSession]:
        """A session."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """`BatchOptions` with their defaults, checked."""

    group_size: int = 1
    spares: int = 0
    keep_groups: int | None = None
    concurrency: int = 64
    timeout_s: float | None = None
    failed_reward: Reward | None = None
    infra_retries: int = 2
    infra_errors: tuple[type[BaseException], ...] = ()
    partial: Literal["drop", "keep"] = "drop"
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        for name in BatchOptions.__annotations__:
            check_option(name, getattr(self, name))
        least = {"group_size": 1, "spares": 0, "concurrency": 1, "infra_retries": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if self.keep_groups is not None and self.keep_groups < 1:
            raise ValueError(f"keep_groups must be at least 1, got {self.keep_groups}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.partial not in ("drop", "keep"):
            raise ValueError(f"partial must be 'drop' or 'keep', got {self.partial!r}")


_INTS = ("group_size", "spares", "keep_groups", "concurrency", "infra_retries")


def check_option(name: str, value: object) -> None:
    """Raise TypeError for an option of another type."""
    if value is None and name in ("keep_groups", "timeout_s", "failed_reward"):
        return
    if name in _INTS and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"{name} must be an int, got {repr_line(value)}")
    if name == "timeout_s" and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise TypeError(f"{name} must be a number, got {repr_line(value)}")
    if name == "name" and not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {repr_line(value)}")
    if name == "infra_errors" and not is_errors(value):
        raise TypeError(f"{name} must be a tuple of exception classes, got {repr_line(value)}")
    if name == "failed_reward":
        try:
            checked_reward(value)
        except ValueError as error:
            raise TypeError(f"{name}: {error}") from error


def is_errors(value: object) -> bool:
    """Whether it is a tuple of exception classes."""
    if not isinstance(value, tuple):
        return False
    return all(isinstance(one, type) and issubclass(one, BaseException) for one in cast("tuple[object, ...]", value))


@dataclass(slots=True, kw_only=True, eq=False)
class GroupState(Generic[T]):
    """A group while its batch runs. `stop` is done once none of its rollouts is needed any more."""

    index: int
    name: str
    task: T
    num_to_end: int
    stop: "asyncio.Future[None]"
    counted: list[Rollout[T]] = field(default_factory=list[Rollout[T]])
    others: list[Rollout[T]] = field(default_factory=list[Rollout[T]])

    def close(self) -> None:
        """End the running ones, and begin none."""
        if not self.stop.done():
            self.stop.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """The end of a run of an agent."""

    end: RolloutEnd
    reward: Reward | None = None
    error: BaseException | None = None


class WrongAgent(TypeError):
    """The agent is no agent, whatever its task: it returned something else than an awaitable."""


def task_list(tasks: object) -> list[object]:
    """The tasks. Raises TypeError for one task in the place of a list of them."""
    whole = repr_line(tasks)
    if isinstance(tasks, str | bytes | Mapping):
        raise TypeError(f"tasks is one {type(cast('object', tasks)).__name__}, {whole}: give a list, such as [{whole}]")
    if not isinstance(tasks, Iterable):
        raise TypeError(f"tasks is {whole}, of {type(tasks).__name__}: give a list of tasks")
    return list(cast("Iterable[object]", tasks))


def check_kinds(agent: object, session: object, samples: object, progress: object) -> None:
    """Raise TypeError for arguments of a batch with another type."""
    for name, value in (("agent", agent), ("progress", progress)):
        if not callable(value):
            raise TypeError(f"{name} must be callable, got {repr_line(value)}")
    if not isinstance(session, Mapping) and not callable(session):
        raise TypeError(f"session must be a mapping of fields, or a function of a task, got {repr_line(session)}")
    if not isinstance(samples, Mapping):
        raise TypeError(f"samples must be a mapping of fields, got {repr_line(samples)}")


class RolloutRun(Generic[T]):
    """One batch, while it runs."""

    def __init__(
        self,
        client: SessionOpener,
        agent: Agent[T],
        tasks: Iterable[T],
        *,
        session: FieldsOf[T],
        samples: SampleOptions,
        progress: ProgressSink,
        ended: RolloutSink[T] | None,
        **options: Unpack[BatchOptions],
    ) -> None:
        check_kinds(agent, session, samples, progress)
        if unknown := sorted(set(options) - set(BatchOptions.__annotations__)):
            known = ", ".join(BatchOptions.__annotations__)
            raise TypeError(f"rollouts has no option {', '.join(unknown)}; it has {known}")
        self._client, self._agent, self._progress, self._ended = client, agent, progress, ended
        self._fields, self._wishes = session, samples
        self._limits = limits = BatchLimits(**options)
        wanted = cast("list[T]", task_list(tasks))
        loop = asyncio.get_running_loop()
        num_started = limits.group_size + limits.spares
        self._groups = [
            GroupState(
                index=index,
                name=f"{limits.name}-{index}",
                task=task,
                num_to_end=num_started,
                stop=loop.create_future(),
            )
            for index, task in enumerate(wanted)
        ]
        self._num_wanted = len(wanted) if limits.keep_groups is None else limits.keep_groups
        if self._num_wanted > len(wanted):
            raise ValueError(f"keep_groups is {self._num_wanted}, but there are {len(wanted)} tasks")
        self._waiting = deque(itertools.chain.from_iterable([group] * num_started for group in self._groups))
        self._whole: list[GroupState[T]] = []
        self._ends: Counter[RolloutEnd] = Counter()
        self._first_error: RolloutError | None = None
        self._error_places: set[object] = set()
        self._num_running = 0
        self._loop = loop

    async def run(self) -> RolloutBatch[T]:
        """Run until enough groups are whole, or nothing is left to run. Cancelled, it deletes all of its sessions.

        Raises WrongRequest or WrongKey if the server refuses the batch's own calls.
        """
        began = self._loop.time()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self._limits.concurrency, len(self._waiting))):
                    tasks.create_task(self._work())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._report(is_over=True)
        kept = set(map(id, self._whole[: self._num_wanted]))
        return RolloutBatch(
            groups=tuple(self._shown(group) for group in self._groups if id(group) in kept),
            others=tuple(
                self._shown(group)
                for group in self._groups
                if id(group) not in kept and (group.counted or group.others)
            ),
            is_complete=len(kept) == self._num_wanted,
            seconds=self._loop.time() - began,
        )

    def _shown(self, group: GroupState[T]) -> RolloutGroup[T]:
        is_whole = len(group.counted) >= self._limits.group_size
        return RolloutGroup(
            index=group.index,
            name=group.name,
            task=group.task,
            is_whole=is_whole,
            rollouts=tuple(group.counted),
            others=tuple(group.others),
        )

    async def _work(self) -> None:
        """Run one rollout after the other until none is needed."""
        while self._waiting:
            group = self._waiting.popleft()
            if group.stop.done():
                continue
            self._num_running += 1
            self._report()
            try:
                rollout = await self._rollout(group)
                if self._ended is not None:
                    await self._ended(rollout)
                    rollout = replace(rollout, samples=None)
            finally:
                self._num_running -= 1
            self._settle(group, rollout)
            self._report()

    def _settle(self, group: GroupState[T], rollout: Rollout[T]) -> None:
        """Put an ended rollout into its group; end rollouts not needed any more."""
        limits = self._limits
        self._ends[rollout.end] += 1
        if rollout.error is not None and rollout.end != "aborted":
            self._first_error = self._first_error or RolloutError.of([rollout])
            self._error_places.add(error_place(rollout.error))
        group.num_to_end -= 1
        counts = rollout.end == "ok" or (rollout.end == "agent_failed" and limits.failed_reward is not None)
        if not counts or len(group.counted) == limits.group_size:
            group.others.append(rollout)
        else:
            group.counted.append(rollout)
            if len(group.counted) == limits.group_size:
                self._whole.append(group)
                group.close()
        if limits.keep_groups is None:
            return
        if len(group.counted) + group.num_to_end < limits.group_size:
            group.close()  # it cannot become whole
        if len(self._whole) >= limits.keep_groups:
            for other in self._groups:
                other.close()

    async def _rollout(self, group: GroupState[T]) -> Rollout[T]:
        """One rollout, with new sessions after failures by infrastructure."""
        began = self._loop.time()
        num_tries = 1
        session_id, ended, samples = await self._try(group)
        while ended.end == "infra_failed" and num_tries <= self._limits.infra_retries and not group.stop.done():
            log.info("a rollout of %s is run again: %s", group.name, ended.error)
            num_tries += 1
            session_id, ended, samples = await self._try(group)
        return Rollout(
            task=group.task,
            group=group.name,
            session_id=session_id,
            end=ended.end,
            reward=ended.reward,
            error=ended.error,
            samples=samples,
            seconds=self._loop.time() - began,
            num_tries=num_tries,
        )

    async def _try(self, group: GroupState[T]) -> tuple[str | None, AgentEnd, DecodedSamples | None]:
        """One session: the agent, the outcome, the samples."""
        session_id: str | None = None
        of_task = self._fields(group.task) if callable(self._fields) else self._fields
        fields = cast("SessionFields", {"group": group.name, **of_task})
        try:
            async with self._client.session(**fields) as session:
                session_id = session.id
                ended = await self._agent_end(group, session)
                await session.outcome(
                    ended.reward, verdict=ended.end, detail=_detail(ended.error), turns=session.turn_rewards
                )
                if ended.end == "infra_failed" or (ended.end == "aborted" and self._limits.partial == "drop"):
                    return session_id, ended, None
                return session_id, ended, await session.samples(**self._wishes)
        except (WrongRequest, WrongKey) as error:
            if error.code != "samples_inconsistent":
                raise  # every rollout's call would be refused
            return session_id, AgentEnd(end="agent_failed", reward=self._limits.failed_reward, error=error), None
        except ClientError as error:
            return session_id, AgentEnd(end="infra_failed", error=error), None

    async def _agent_end(self, group: GroupState[T], session: RolloutSession) -> AgentEnd:
        """Run the agent until it ends, its time is over, or nobody needs it."""
        running = asyncio.create_task(self._run_agent(group.task, session))
        try:
            news = cast("set[asyncio.Future[object]]", {running, group.stop})
            await asyncio.wait(news, timeout=self._limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_early, is_stopped = not running.done(), group.stop.done()
            if is_early and is_stopped and self._limits.partial == "keep":
                await session.settle()  # its agent may even end by the partial reply
        finally:
            if not running.done():
                await _end(running, session)
        if not is_early:
            return await self._judged(running, session)
        if is_stopped:
            return AgentEnd(end="aborted", error=asyncio.CancelledError("enough rollouts were whole without this one"))
        late = TimeoutError(f"the agent ran longer than timeout_s = {self._limits.timeout_s:g} s")
        return AgentEnd(end="agent_failed", reward=self._limits.failed_reward, error=late)

    async def _run_agent(self, task: T, session: RolloutSession) -> Reward | None:
        made = self._agent(task, session)
        if not inspect.isawaitable(cast("object", made)):
            raise WrongAgent(
                f"the agent returned {repr_line(made)}, which cannot be awaited: make it an `async def`, or use"
                " SyncClient for an agent that blocks"
            )
        return await made

    async def _judged(self, task: "asyncio.Task[Reward | None]", session: RolloutSession) -> AgentEnd:
        """The end of an agent that ended by itself, and whose fault it is."""
        error = asyncio.CancelledError("the agent cancelled itself") if task.cancelled() else task.exception()
        if isinstance(error, WrongAgent):
            raise error  # every rollout's would be
        try:
            if error is None:
                return AgentEnd(end="ok", reward=checked_reward(task.result()))
            if isinstance(error, AgentFailure) and error.reward is not None:
                return AgentEnd(end="agent_failed", reward=checked_reward(error.reward), error=error)
        except ValueError as wrong:
            return AgentEnd(end="agent_failed", reward=self._limits.failed_reward, error=wrong)
        assert error is not None, "an agent without an error has ended above"
        if isinstance(error, AgentFailure) or not await self._is_infra(error, session):
            return AgentEnd(end="agent_failed", reward=self._limits.failed_reward, error=error)
        return AgentEnd(end="infra_failed", error=error)

    async def _is_infra(self, error: BaseException, session: RolloutSession) -> bool:
        """Whether the policy and the agent are innocent: the server says how the agent's last request ended.

        A server without an answer, or without the session, is to blame itself.
        """
        if isinstance(error, (InfraFailure, TryLater, *self._limits.infra_errors)):
            return True
        try:
            requests = await session.ledger()
        except ClientError:
            return True
        status = requests[-1]["status"] if requests else None
        return isinstance(status, int) and (status >= 500 or status in _BUSY)

    def _report(self, *, is_over: bool = False) -> None:
        ends = self._ends
        self._progress(
            BatchProgress(
                num_wanted_groups=self._num_wanted,
                num_whole_groups=len(self._whole),
                num_running=self._num_running,
                num_ok=ends["ok"],
                num_agent_failed=ends["agent_failed"],
                num_infra_failed=ends["infra_failed"],
                num_aborted=ends["aborted"],
                num_distinct_errors=len(self._error_places),
                first_error=self._first_error,
                is_over=is_over,
            )
        )


async def _end(running: "asyncio.Task[Reward | None]", session: RolloutSession) -> None:
    """Cancel an agent, and wait for it."""
    running.cancel()
    await asyncio.wait([running], timeout=AGENT_END_S)
    if not running.done():
        log.warning("the agent of session %s goes on %g s after it was cancelled", session.id, AGENT_END_S)


def _detail(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
