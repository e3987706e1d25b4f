"""The client of one server, or of several: sessions deleted however they end, and batches of rollouts.

START READING HERE in this package. It knows the server by HTTP alone.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, cast
from urllib.parse import urlencode

from stenograph.client.batch import RolloutBatch
from stenograph.client.calls import HttpCalls, JsonObject, Retries, as_object
from stenograph.client.claims import ClaimFields, SampleClaim, SampleReceipt, decoded_claim, decoded_receipt
from stenograph.client.errors import BadPayload, ClientError, ServerUnreachable, TryLater
from stenograph.client.progress import PrintedProgress, ProgressSink
from stenograph.client.rollouts import Agent, BatchOptions, FieldsOf, RolloutRun, RolloutSink
from stenograph.client.samples import DecodedSamples, SampleOptions
from stenograph.client.session import RolloutSession, SessionFields
from stenograph.client.tree import Tree, framed_tree

T = TypeVar("T")

REST_S = 10.0
"""Seconds for an unanswering address to be tried after the others."""

CLOSE_S = 30.0
"""Longest wait in closing the client for sessions being deleted."""


@dataclass(slots=True, eq=False)
class ServerAddress:
    """One server: its sessions opened by this client, and until when it is tried last."""

    url: str
    num_open: int = 0
    rests_until: float = 0.0


class Client:
    """One server, or several as one: a session is opened on the one with the fewest of this client's, and stays there.

    Use it as `async with Client("http://…") as client`. `api_key` is the server's key, if it has one, `admin_key` the
    one for its weights; no agent is given either. Calls are retried for `retry_s` seconds; one try takes at most
    `call_timeout_s`.
    """

    def __init__(
        self,
        *urls: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        call_timeout_s: float = 60.0,
        retry_s: float = 30.0,
    ) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no address: give http://HOST:PORT")
        if not urls:
            raise ValueError("no address of a server was given: Client('http://127.0.0.1:8080')")
        self._admin = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
        self._retry_s = retry_s
        self._calls = HttpCalls(api_key=api_key, call_timeout_s=call_timeout_s, retry_s=retry_s)
        self._addresses = [ServerAddress(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._owned: set[asyncio.Task[object]] = set()

    def __repr__(self) -> str:
        urls = ", ".join(address.url for address in self._addresses)
        return f"<Client {urls}, {sum(address.num_open for address in self._addresses)} sessions open>"

    async def __aenter__(self) -> Self:
        await self._calls.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until every pending deletion is done, then close the connections."""
        try:
            with contextlib.suppress(TimeoutError):
                await self._settled()
        finally:
            for task in self._owned:
                task.cancel()
            await self._calls.__aexit__(kind, error, trace)

    async def _settled(self) -> None:
        """Wait for the deletions, also of a session just being opened."""
        async with asyncio.timeout(CLOSE_S):
            while self._owned:
                await asyncio.wait(self._owned)

    @asynccontextmanager
    async def session(self, **fields: Unpack[SessionFields]) -> AsyncGenerator[RolloutSession]:
        """A session, deleted at the end, also on an error and when the task is cancelled.

        A cancelled caller need not wait for the deletion; the client's end does.
        """
        address, session = await self._uncut(self._opened(cast("JsonObject", fields)), undo=self._deleted)
        try:
            yield session
        finally:
            await self._uncut(self._deleted((address, session)))

    async def rollouts(
        self,
        agent: Agent[T],
        tasks: Iterable[T],
        *,
        progress: ProgressSink | None = None,
        session: FieldsOf[T] | None = None,
        samples: SampleOptions | None = None,
        ended: RolloutSink[T] | None = None,
        **options: Unpack[BatchOptions],
    ) -> RolloutBatch[T]:
        """Run `agent(task, session)` for each task, `group_size` times, and collect rewards and samples.

        `session` has fields for every session, or gives those of a task's. `ended` takes each rollout with its samples
        as it ends; the batch has it without them. `docs/client.md` has the options. A failing agent is a `Rollout` with
        its error, never an exception here. Raises TypeError for a string in the place of tasks, for an agent other than
        an `async def`, and the like.
        """
        run = RolloutRun(
            self,
            agent,
            tasks,
            session={} if session is None else session,
            samples={} if samples is None else samples,
            progress=PrintedProgress() if progress is None else progress,
            ended=ended,
            **options,
        )
        return await run.run()

    async def update_weights(self, model_path: str, *, version: str | None = None, timeout_s: float = 600.0) -> None:
        """Let every server's engines sample with the weights in this folder from now on; the servers must see it.

        Running turns go on with the new ones; a sample has the version of each token. `version` names them; None counts
        on. Raises ServerRefused, with the reason, if one server does not take them: it keeps the old ones.
        """
        body: dict[str, object] = {"model_path": model_path}
        if version is not None:
            body["weight_version"] = version
        await self._administer("update_weights_from_disk", body, timeout_s)

    async def name_weights(self, version: str) -> None:
        """Name the weights sent to the engines by the trainer itself."""
        await self._administer("update_weight_version", {"new_version": version})

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "in_place") -> None:
        """Let new turns wait on every server; running ones end (`abort`) or stand still until `resume`."""
        await self._administer("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """End the pause."""
        await self._administer("continue_generation", {})

    async def _administer(self, route: str, body: JsonObject, timeout_s: float | None = None) -> None:
        """Call a route of every server, with the key for it; the first error is raised after all have answered."""
        calls = (
            self._calls.once("POST", f"{address.url}/{route}", body, self._admin, timeout_s=timeout_s)
            for address in self._addresses
        )
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    async def claim(self, step: int, n: int, **fields: Unpack[ClaimFields]) -> SampleClaim:
        """At most `n` rollouts that ended, for a step of the trainer, from the first server with some.

        No other claim has them before the end of the lease, and none once `receipt` says that they were trained.
        """
        body: JsonObject = {"step": step, "n": n, "claim": uuid.uuid4().hex, **fields}  # a retry has the same sessions
        *others, last = self._addresses
        for address in others:
            told = decoded_claim(await self._post(f"{address.url}/samples/claim", body), address.url)
            if told.sessions:
                return told
        return decoded_claim(await self._post(f"{last.url}/samples/claim", body), last.url)

    async def receipt(
        self, claim: SampleClaim, trained: Iterable[str], *, left_out: Iterable[str] = ()
    ) -> SampleReceipt:
        """Say which sessions of a claim were trained, and which nobody will train; the others come back."""
        body: JsonObject = {"claim": claim.id, "trained": list(trained), "left_out": list(left_out)}
        return decoded_receipt(await self._post(f"{claim.url}/samples/receipt", body))

    async def claimed_samples(
        self, claim: SampleClaim, session_id: str, **options: Unpack[SampleOptions]
    ) -> DecodedSamples:
        """The samples of a claimed session; give `max_seq_len` here as in the claim."""
        root = f"{claim.url}/sessions/{session_id}"
        session = RolloutSession(self._calls, id=session_id, base_url=f"{root}/v1", root_url=root, api_key=session_id)
        return await session.samples(**options)

    async def trees(
        self, *, group: str | None = None, sessions: Sequence[str] = (), **options: Unpack[SampleOptions]
    ) -> list[Tree]:
        """The samples of a group's sessions, or of these, as one tree of each server that has some: a session with its
        forks, the rollouts of a task. One of a group deleted meanwhile is in none. Raises BadPayload where one has an
        error in place of samples, or one of `sessions` is nowhere."""
        if group is not None and sessions:
            raise ValueError("trees takes a group or sessions, not both")
        asked: JsonObject = {"group": group} if group is not None else {"sessions": list(sessions)}
        body = {**asked, **cast("JsonObject", options), "format": "tree"}
        answers = [await self._calls.call("POST", f"{one.url}/samples", body) for one in self._addresses]
        absent = [set[str]() for _ in answers]
        trees = [await asyncio.to_thread(framed_tree, *one) for one in zip(answers, absent, strict=True)]
        if group is None and (lost := absent[0].intersection(*absent)):
            raise BadPayload(f"session {min(lost)} has no samples: no server has it")
        return [tree for tree in trees if tree.paths]

    async def abandon(self, group: str, *, first: int = 0) -> int:
        """End a group's open rollouts on every server, once `first` of a server's have ended; how many there were."""
        calls = (self._post(f"{one.url}/abandon", {"group": group, "first": first}) for one in self._addresses)
        return sum(len(cast("list[str]", told["abandoned"])) for told in await asyncio.gather(*calls))

    async def accounts(self, *, by: str = "group", group: str | None = None) -> list[dict[str, object]]:
        """Each server's `GET /accounts`: the fate of all sampled tokens, and their cost."""
        query = urlencode({"by": by} | ({} if group is None else {"group": group}))
        return [await self._calls.json("GET", f"{one.url}/accounts?{query}") for one in self._addresses]

    async def num_sessions(self) -> int:
        """The servers' sessions, of whomever; as far as one page of each shows them."""
        pages = [await self._calls.json("GET", f"{address.url}/sessions?limit=1000") for address in self._addresses]
        return sum(len(cast("list[object]", page["sessions"])) for page in pages)

    async def _post(self, url: str, body: JsonObject) -> dict[str, object]:
        return as_object(await self._calls.call("POST", url, body), url)

    async def _opened(self, fields: JsonObject) -> tuple[ServerAddress, RolloutSession]:
        """A new session on the first address that opens one, in the order of their load.

        The key of the call lets a broken connection be tried again without a second session.
        """
        key, retries, loop = {"idempotency-key": uuid.uuid4().hex}, Retries(self._retry_s), asyncio.get_running_loop()
        while True:
            failure: ClientError | None = None
            now = loop.time()
            for address in sorted(self._addresses, key=lambda one: (one.rests_until > now, one.num_open)):
                try:
                    content = await self._calls.once("POST", f"{address.url}/sessions", fields, key)
                except (ServerUnreachable, TryLater) as error:
                    address.rests_until = now + REST_S
                    failure = error
                    continue
                address.rests_until = 0.0
                address.num_open += 1
                answer = as_object(content, address.url)
                return address, RolloutSession.opened(self._calls, address.url, answer, self._uncut)
            assert failure is not None, "there is an address"
            await retries.pause_or_raise(failure)

    async def _deleted(self, opened: tuple[ServerAddress, RolloutSession]) -> None:
        """Delete a session and its forks. A server that does not answer any more has none, or drops it when its ttl has
        passed."""
        address, session = opened
        address.num_open -= 1
        await session.delete_all()

    async def _uncut(
        self, work: Coroutine[object, object, T], *, undo: Callable[[T], Coroutine[object, object, None]] | None = None
    ) -> T:
        """The result of `work`, run in a task; a cancelled caller leaves it running, and the client's end awaits it.

        If the caller is cancelled, the work's result is undone once it is there.
        """
        task = self._owns(work)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if undo is not None:
                self._owns(_undone(task, undo))
            raise
        return task.result()

    def _owns(self, work: Coroutine[object, object, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._owned.add(cast("asyncio.Task[object]", task))
        task.add_done_callback(lambda done: self._owned.discard(cast("asyncio.Task[object]", done)))
        return task


async def _undone(task: "asyncio.Task[T]", undo: Callable[[T], Coroutine[object, object, None]]) -> None:
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        await undo(task.result())
