"""A session as a rollout has it: its agent's address, and the calls when the agent is done."""

import asyncio
import contextlib
import hashlib
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Literal, Protocol, Self, SupportsFloat, TypedDict, Unpack, cast

from stenograph.client.calls import HttpCalls, JsonObject, as_object
from stenograph.client.errors import BadPayload, ClientError, SessionGone
from stenograph.client.samples import DecodedSamples, Reward, SampleOptions, decoded
from stenograph.client.scores import ScoreOptions, SessionScores, decoded_scores
from stenograph.client.tree import Tree, decoded_tree

RolloutEnd = Literal["ok", "agent_failed", "infra_failed", "aborted"]
"""The verdicts of `PUT …/outcome`."""

MAX_DETAIL_CHARS = 4096
LARGE_PAYLOAD_BYTES = 2**20
"""Payloads from this size on are decoded on a thread."""

SETTLE_S = 5.0
"""Longest wait for aborted turns to be recorded."""

_POLL_S = 0.02


class SessionFields(TypedDict, total=False):
    """Fields of `POST /sessions`; all optional, as docs/http-api.md has them."""

    history: Literal["strands", "linear", "tree"]
    compat: Literal["miles"]
    after_length: Literal["close", "refuse"]
    matcher: str
    metadata: Mapping[str, object]
    ttl_s: float
    max_turns: int
    max_requests: int
    max_total_tokens: int
    over_limit: Literal["error", "stop"]
    chat_template_kwargs: Mapping[str, object]
    sampling: Mapping[str, Mapping[str, object]]
    canonical: str
    support: bool
    cache_salt: Literal["pin", "follow", "off"]
    group: str
    policy: str


def checked_reward(reward: object) -> Reward | None:
    """A reward as plain floats: of any number, NumPy's and torch's too. Raises ValueError if it is none, or not finite:
    the server would refuse it."""
    if reward is None:
        return None
    try:
        if isinstance(reward, Mapping):
            named = cast("Mapping[object, SupportsFloat]", reward)
            found: Reward = {str(name): float(number) for name, number in named.items()}
        else:
            found = float(cast("SupportsFloat", reward))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a reward is a number, or numbers by name, got {reward!r}") from error
    if not all(map(math.isfinite, found.values() if isinstance(found, Mapping) else (found,))):
        raise ValueError(f"a reward is finite, got {reward!r}")
    return found


class RolloutSession:
    """An open session. `base_url` is for OpenAI's clients, `root_url` for Anthropic's and Google's, with `api_key`.

    `api_key` is the agent's: the session's token, on a server without keys the session's id. By it an SDK's requests
    belong to this session, also those of a tool with only the server's address and the key. A token is good for the
    session's turns, token counts and list of models, and for nothing else.

    `turn_rewards`, set by an agent, are rewards of single turns by node id; the rollout's outcome has them.
    """

    def __init__(
        self,
        calls: HttpCalls,
        *,
        id: str,  # noqa: A002
        base_url: str,
        root_url: str,
        api_key: str,
        uncut: "Uncut | None" = None,
    ) -> None:
        self._calls, self._uncut = calls, uncut
        self.id = id
        self.base_url = base_url
        self.root_url = root_url
        self.api_key = api_key
        self.turn_rewards: Mapping[int, float] = {}
        self._forks: list[RolloutSession] = []

    def __repr__(self) -> str:
        return f"<RolloutSession {self.root_url}>"

    @classmethod
    def opened(cls, calls: HttpCalls, server_url: str, answer: JsonObject, uncut: "Uncut | None") -> Self:
        """The session that a server opened, by its answer. Raises BadPayload."""
        session_id = answer.get("session_id")
        if not isinstance(session_id, str):
            raise BadPayload(f"{server_url} opens a session without an id: is it a Stenograph server?")
        root, token = f"{server_url}/sessions/{session_id}", answer.get("token", session_id)
        return cls(calls, id=session_id, base_url=f"{root}/v1", root_url=root, api_key=str(token), uncut=uncut)

    async def fork(
        self, *, turn: int, token: int | None = None, n: int = 1, group: str | None = None, replay: bool = False
    ) -> "list[RolloutSession]":
        """Open `n` sessions that begin with this one's exact tokens: down to the end of a turn, by its node's id, or to
        the first `token` sampled tokens of it. In the last case the turn's request, sent again, continues its reply.
        With `replay` an agent may begin anew: requests for the turns before get their recorded replies.

        A client deletes the forks of its session with it, at the end of its `async with`. Raises ServerRefused for a
        place that is not there.
        """
        work = self._forked({"turn": turn, "token": token, "n": n, "group": group, "replay": replay})
        forks = await (work if self._uncut is None else self._uncut(work, undo=_delete_each))
        self._forks += forks
        return forks

    async def _forked(self, body: JsonObject) -> "list[RolloutSession]":
        url, key = f"{self.root_url}/fork", {"idempotency-key": uuid.uuid4().hex}
        answer = as_object(await self._calls.call("POST", url, body, key), url)
        server_url = self.root_url.removesuffix(f"/sessions/{self.id}")
        opened = cast("list[JsonObject]", answer.get("forks", []))
        return [RolloutSession.opened(self._calls, server_url, one, self._uncut) for one in opened]

    async def outcome(
        self,
        reward: Reward | None = None,
        *,
        verdict: RolloutEnd = "ok",
        detail: str | None = None,
        turns: Mapping[int, float] | None = None,
        tokens: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        """Say how the rollout ended; it stands in the session's samples. A second call replaces the first.

        `turns` are rewards of single turns, `tokens` of each sampled token of a turn, both by node id. Raises
        ValueError for a reward other than a finite number, or numbers by name.
        """
        body: dict[str, object] = {"reward": checked_reward(reward), "verdict": verdict}
        if detail is not None:
            body["detail"] = detail[:MAX_DETAIL_CHARS]
        if turns:
            body["turns"] = [{"turn": node, "reward": float(reward)} for node, reward in turns.items()]
        if tokens:
            body["tokens"] = [{"turn": node, "rewards": [*map(float, row)]} for node, row in tokens.items()]
        await self._calls.call("PUT", f"{self.root_url}/outcome", body)

    async def samples(self, **options: Unpack[SampleOptions]) -> DecodedSamples:
        """The session's training samples. Raises ServerRefused `samples_inconsistent` if its turns make none."""
        payload = await self._calls.call("POST", f"{self.root_url}/samples", cast("dict[str, object]", options))
        if len(payload) < LARGE_PAYLOAD_BYTES:
            return decoded(payload)
        return await asyncio.to_thread(decoded, payload)

    async def tree(self, **options: Unpack[SampleOptions]) -> Tree:
        """The session's samples as a tree: what several begin with is in it once. Raises as `samples`."""
        body = {**cast("dict[str, object]", options), "format": "tree"}
        payload = await self._calls.call("POST", f"{self.root_url}/samples", body)
        return await asyncio.to_thread(decoded_tree, [payload])

    async def score(self, **options: Unpack[ScoreOptions]) -> SessionScores:
        """Score the session's recorded tokens by one pass, kept under its `name` for samples (`scores=[name]`)."""
        url, body = f"{self.root_url}/scores", cast("dict[str, object]", options)
        return decoded_scores(as_object(await self._calls.call("POST", url, body), url))

    async def media(self, sha256: str) -> bytes:
        """The bytes of an image of the session's messages, as its client sent them, by the hash that samples have.

        Raises BadPayload for bytes of another hash.
        """
        url = f"{self.root_url}/media/{sha256}"
        content = await self._calls.call("GET", url)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise BadPayload(f"{url} answers with bytes of another hash")
        return content

    async def abort(self) -> int:
        """End the running turns at the engine; their callers get the partial replies. Returns how many there were."""
        answer = await self._calls.json("POST", f"{self.root_url}/abort")
        return cast("int", answer["aborted"])

    async def settle(self) -> None:
        """Abort the running turns, and wait until their tokens are recorded, at most `SETTLE_S` seconds.

        If an agent goes on at once, it is aborted again.
        """
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while await self.abort() or any(row["ended"] is None for row in await self.ledger()):
            await asyncio.sleep(_POLL_S)
            if asyncio.get_running_loop().time() > deadline:
                return

    async def view(self, *, strand: int | None = None) -> dict[str, object]:
        """`GET /sessions/{id}`: the records of the main strand, or of a strand, and the metadata."""
        return await self._calls.json("GET", self.root_url + ("" if strand is None else f"?strand={strand}"))

    async def drift(self) -> dict[str, object]:
        """`GET /sessions/{id}/drift`: the drift report of each line."""
        return await self._calls.json("GET", f"{self.root_url}/drift")

    async def ledger(self) -> list[dict[str, object]]:
        """The rows of all requests of the session, in order."""
        rows: list[dict[str, object]] = []
        after: object = 0
        while after is not None:
            page = await self._calls.json("GET", f"{self.root_url}/ledger?after={after}")
            rows += cast("list[dict[str, object]]", page["requests"])
            after = page["next"]
        return rows

    async def delete(self) -> None:
        """Delete the session; running turns are aborted. An absent session is no error. Its forks stay."""
        with contextlib.suppress(SessionGone):
            await self._calls.call("DELETE", self.root_url)

    async def delete_all(self) -> None:
        """Delete the session, its forks made here, and theirs. What the server does not delete expires there."""
        with contextlib.suppress(ClientError):
            await self.delete()
        forks, self._forks = self._forks, []
        await _delete_each(forks)


class Uncut(Protocol):
    """The opening of forks, not cut off by the cancelling of its caller: `undo` gets them then."""

    def __call__(
        self,
        work: Coroutine[object, object, list[RolloutSession]],
        *,
        undo: Callable[[list[RolloutSession]], Coroutine[object, object, None]],
    ) -> Awaitable[list[RolloutSession]]: ...


async def _delete_each(sessions: list[RolloutSession]) -> None:
    await asyncio.gather(*(one.delete_all() for one in sessions))
