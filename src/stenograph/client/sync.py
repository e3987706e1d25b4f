"""The client for code without an event loop: the same calls, run on a loop in a thread of its own."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, cast

from stenograph.client.batch import Rollout, RolloutBatch
from stenograph.client.claims import ClaimFields, SampleClaim, SampleReceipt
from stenograph.client.client import Client
from stenograph.client.progress import ProgressSink
from stenograph.client.rollouts import BatchOptions, FieldsOf, WrongAgent
from stenograph.client.samples import DecodedSamples, Reward, SampleOptions
from stenograph.client.scores import ScoreOptions, SessionScores
from stenograph.client.session import RolloutEnd, RolloutSession, SessionFields
from stenograph.client.shown import repr_line
from stenograph.client.tree import Tree

T = TypeVar("T")
R = TypeVar("R")

INTERRUPT_S = 10.0
"""Longest wait for the sessions of an interrupted call to be deleted."""


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="stenograph-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, R]) -> R:
        """Run `work` on the loop and wait. An interrupt of the waiting thread cancels it, and waits for its end."""
        ended = threading.Event()

        async def signalled() -> R:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(signalled(), self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(INTERRUPT_S)
            raise

    def close(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class SyncRolloutSession:
    """A `RolloutSession` with blocking calls."""

    def __init__(self, session: RolloutSession, thread: LoopThread) -> None:
        self._session, self._thread = session, thread
        self.id = session.id
        self.base_url = session.base_url
        self.root_url = session.root_url
        self.api_key = session.api_key

    def __repr__(self) -> str:
        return f"<SyncRolloutSession {self.root_url}>"

    def fork(
        self, *, turn: int, token: int | None = None, n: int = 1, group: str | None = None, replay: bool = False
    ) -> "list[SyncRolloutSession]":
        """As `RolloutSession.fork`."""
        forks = self._thread.run(self._session.fork(turn=turn, token=token, n=n, group=group, replay=replay))
        return [SyncRolloutSession(one, self._thread) for one in forks]

    def outcome(
        self,
        reward: Reward | None = None,
        *,
        verdict: RolloutEnd = "ok",
        detail: str | None = None,
        turns: Mapping[int, float] | None = None,
        tokens: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        """As `RolloutSession.outcome`."""
        said = self._session.outcome(reward, verdict=verdict, detail=detail, turns=turns, tokens=tokens)
        self._thread.run(said)

    def samples(self, **options: Unpack[SampleOptions]) -> DecodedSamples:
        """As `RolloutSession.samples`."""
        return self._thread.run(self._session.samples(**options))

    def tree(self, **options: Unpack[SampleOptions]) -> Tree:
        """As `RolloutSession.tree`."""
        return self._thread.run(self._session.tree(**options))

    def score(self, **options: Unpack[ScoreOptions]) -> SessionScores:
        """As `RolloutSession.score`."""
        return self._thread.run(self._session.score(**options))

    def media(self, sha256: str) -> bytes:
        """As `RolloutSession.media`."""
        return self._thread.run(self._session.media(sha256))

    def abort(self) -> int:
        """As `RolloutSession.abort`."""
        return self._thread.run(self._session.abort())

    def view(self) -> dict[str, object]:
        """As `RolloutSession.view`."""
        return self._thread.run(self._session.view())

    def drift(self) -> dict[str, object]:
        """As `RolloutSession.drift`."""
        return self._thread.run(self._session.drift())

    def ledger(self) -> list[dict[str, object]]:
        """As `RolloutSession.ledger`."""
        return self._thread.run(self._session.ledger())


SyncAgent = Callable[[T, SyncRolloutSession], Reward | None]
"""`agent(task, session)` gives the rollout's reward, or None if it comes from elsewhere."""


class SyncClient:
    """A `Client` with blocking calls. Use it as `with SyncClient("http://…") as client`."""

    def __init__(
        self,
        *urls: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        call_timeout_s: float = 60.0,
        retry_s: float = 30.0,
    ) -> None:
        self._client = Client(
            *urls, api_key=api_key, admin_key=admin_key, call_timeout_s=call_timeout_s, retry_s=retry_s
        )
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<Sync{repr(self._client)[1:]}"

    def __enter__(self) -> Self:
        self._thread = LoopThread()
        self._thread.run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, self._thread = self._open_thread(), None
        try:
            thread.run(self._client.__aexit__(kind, error, trace))
        finally:
            thread.close()

    @contextlib.contextmanager
    def session(self, **fields: Unpack[SessionFields]) -> Generator[SyncRolloutSession]:
        """As `Client.session`."""
        thread, opening = self._open_thread(), self._client.session(**fields)
        session = thread.run(opening.__aenter__())
        try:
            yield SyncRolloutSession(session, thread)
        finally:
            thread.run(opening.__aexit__(None, None, None))

    def rollouts(
        self,
        agent: SyncAgent[T],
        tasks: Iterable[T],
        *,
        progress: ProgressSink | None = None,
        session: FieldsOf[T] | None = None,
        samples: SampleOptions | None = None,
        ended: Callable[[Rollout[T]], None] | None = None,
        **options: Unpack[BatchOptions],
    ) -> RolloutBatch[T]:
        """As `Client.rollouts`, with a blocking agent and a blocking `ended`: each of their runs has a thread.

        A thread cannot be cancelled: an agent no longer needed, or too late, gets 404 for its next request, and is not
        waited for.
        """
        thread = self._open_thread()
        if not callable(agent):
            raise TypeError(f"agent must be callable, got {repr_line(agent)}")

        async def in_thread(task: T, opened: RolloutSession) -> Reward | None:
            made: object = await _ended(lambda: agent(task, SyncRolloutSession(opened, thread)))
            if inspect.iscoroutine(made):
                made.close()
                raise WrongAgent("the agent is an `async def`: use Client, or make it a function that blocks")
            return cast("Reward | None", made)

        async def ended_in_thread(rollout: Rollout[T]) -> None:
            assert ended is not None
            made: object = await asyncio.to_thread(ended, rollout)
            if inspect.iscoroutine(made):
                made.close()
                raise TypeError("`ended` is an `async def`: use Client, or make it a function that blocks")

        sink = None if ended is None else ended_in_thread
        return thread.run(
            self._client.rollouts(
                in_thread, tasks, progress=progress, session=session, samples=samples, ended=sink, **options
            )
        )

    def update_weights(self, model_path: str, *, version: str | None = None, timeout_s: float = 600.0) -> None:
        """As `Client.update_weights`."""
        self._open_thread().run(self._client.update_weights(model_path, version=version, timeout_s=timeout_s))

    def name_weights(self, version: str) -> None:
        """As `Client.name_weights`."""
        self._open_thread().run(self._client.name_weights(version))

    def pause(self, mode: Literal["abort", "retract", "in_place"] = "in_place") -> None:
        """As `Client.pause`."""
        self._open_thread().run(self._client.pause(mode))

    def resume(self) -> None:
        """As `Client.resume`."""
        self._open_thread().run(self._client.resume())

    def claim(self, step: int, n: int, **fields: Unpack[ClaimFields]) -> SampleClaim:
        """As `Client.claim`."""
        return self._open_thread().run(self._client.claim(step, n, **fields))

    def trees(
        self, *, group: str | None = None, sessions: Sequence[str] = (), **options: Unpack[SampleOptions]
    ) -> list[Tree]:
        """As `Client.trees`."""
        return self._open_thread().run(self._client.trees(group=group, sessions=sessions, **options))

    def claimed_samples(self, claim: SampleClaim, session_id: str, **options: Unpack[SampleOptions]) -> DecodedSamples:
        """As `Client.claimed_samples`."""
        return self._open_thread().run(self._client.claimed_samples(claim, session_id, **options))

    def receipt(self, claim: SampleClaim, trained: Iterable[str], *, left_out: Iterable[str] = ()) -> SampleReceipt:
        """As `Client.receipt`."""
        return self._open_thread().run(self._client.receipt(claim, trained, left_out=left_out))

    def abandon(self, group: str, *, first: int = 0) -> int:
        """As `Client.abandon`."""
        return self._open_thread().run(self._client.abandon(group, first=first))

    def accounts(self, *, by: str = "group", group: str | None = None) -> list[dict[str, object]]:
        """As `Client.accounts`."""
        return self._open_thread().run(self._client.accounts(by=by, group=group))

    def _open_thread(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("the client is not open: use it as `with SyncClient(…) as client`")
        return self._thread


async def _ended(work: Callable[[], R]) -> R:
    """The result of `work`, run in a thread, left alone if this is cancelled."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the batch judges it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody wants it
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="stenograph-agent", daemon=True).start()
    return await ended
