"""People who look at a server's console while it works: the moment as a stream, a long session page after page.

    python -m stenograph.bench.kit.viewers '{"host": "127.0.0.1", "port": 8080, "num_viewers": 8, …}'

Makes the long session, says `{"ready": true}`, looks from the first line on stdin to the second, and reports how long
pages took. Each viewer holds a stream of moments, and asks for a page when one is due and the one before is there.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from stenograph.bench.kit.client import BUFFER_BYTES, Failures, LoadClient, RequestFailed, open_session, unread
from stenograph.bench.kit.conversation import Conversation, Messages
from stenograph.bench.kit.quantiles import summary_ms
from stenograph.bench.kit.reply_shape import ReplyShape, assistant_fragment
from stenograph.bench.kit.steps import new_runner, nothing_collected, say

PAGE_TOKENS = 8192
"""As the page asks for them."""
NUM_TURNS = 3


class ViewersPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whom to look at, and how many do: with none there is only the long session."""

    host: str
    port: int
    num_viewers: int
    shape: ReplyShape = ReplyShape()
    message_bytes: int
    """Bytes of each of the long session's messages."""
    period_s: float = 0.25
    """Between two pages of a viewer."""


class _Columns(msgspec.Struct):
    num_tokens: list[int]


class _Shape(msgspec.Struct):
    turns: _Columns


@dataclass(slots=True)
class _Views:
    """What the viewers saw."""

    latencies_s: list[float] = field(default_factory=list[float])
    num_bytes: int = 0
    num_events: int = 0
    failures: Failures = field(default_factory=Failures)

    def heard(self, data: bytes, now: float) -> None:
        """Bytes of a stream of moments."""
        del now
        self.num_events += data.count(b"event: now")


class Viewers:
    """The viewers of a plan."""

    def __init__(self, plan: ViewersPlan) -> None:
        self._plan = plan
        self._views = _Views()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    async def run(self) -> None:
        """Make the session, look while they may, and report. Raises RequestFailed for a session that is refused."""
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        session, num_tokens = await self._long_session()
        say({"ready": True, "num_tokens": num_tokens})
        await lines.readline()
        async with asyncio.TaskGroup() as tasks:
            looking = [
                tasks.create_task(work)
                for number in range(self._plan.num_viewers)
                for work in (self._watch(), self._turn_pages(session, num_tokens, number))
            ]
            await lines.readline()
            for task in looking:
                task.cancel()
        pipe.close()

    def report(self) -> dict[str, object]:
        """How long pages took, how many there were, and the events and errors."""
        views = self._views
        return {
            "step": "look",
            **summary_ms(views.latencies_s),
            "num_pages": len(views.latencies_s),
            "num_bytes": views.num_bytes,
            "num_events": views.num_events,
            **views.failures.report(),
        }

    def _client(self) -> LoadClient:
        return LoadClient(self._plan.host, self._plan.port, self._buffer)

    async def _long_session(self) -> tuple[str, int]:
        client, conversation = self._client(), Conversation()
        messages = Messages(num_bytes=self._plan.message_bytes, num_messages=NUM_TURNS)
        session = await open_session(client)
        for turn in range(NUM_TURNS):
            user = messages.fragment(turn)
            path = f"/sessions/{session}/v1/chat/completions"
            await client.asked("POST", path, conversation.request_parts(user), unread)
            conversation.add_turn(user, assistant_fragment(self._plan.shape))
        answer = await client.asked("GET", f"/console/api/sessions/{session}", [])
        client.close()
        return session, msgspec.json.decode(answer.body, type=_Shape).turns.num_tokens[-1]

    async def _watch(self) -> None:
        """Read a stream of moments. It ends when this is cancelled."""
        headers = [("accept", "text/event-stream")]
        try:
            await self._client().asked("GET", "/console/api/now", [], self._views.heard, headers)
        except RequestFailed as error:
            self._views.failures.add(error)

    async def _turn_pages(self, session: str, num_tokens: int, number: int) -> None:
        """Ask for page after page of the session, each when it is due; those that cannot keep up ask at once."""
        loop, client = asyncio.get_running_loop(), self._client()
        due = loop.time() + self._plan.period_s * number / self._plan.num_viewers
        try:
            for path in pages_of(session, num_tokens, first=number):
                await asyncio.sleep(due - loop.time())
                due = max(due + self._plan.period_s, loop.time())
                begun = time.perf_counter()
                try:
                    answer = await client.asked("GET", path, [], unread)
                except RequestFailed as error:
                    self._views.failures.add(error)
                    continue
                self._views.latencies_s.append(time.perf_counter() - begun)
                self._views.num_bytes += answer.num_bytes
        finally:
            client.close()


def pages_of(session: str, num_tokens: int, *, first: int) -> Iterator[str]:
    """What a person asks for who opens a session and scrolls through it, again and again: its shape, turns, tokens."""
    path, num_pages = f"/console/api/sessions/{session}", -(-num_tokens // PAGE_TOKENS)
    for number in itertools.count(first):
        match number % 8:
            case 0:
                yield path
            case 1:
                yield f"{path}/turns?start=0&limit=1"
            case _:
                yield f"{path}/tokens?start={number % num_pages * PAGE_TOKENS}&limit={PAGE_TOKENS}"


def main() -> None:
    """Look as the plan in the first argument says."""
    viewers = Viewers(msgspec.json.decode(sys.argv[1], type=ViewersPlan))
    with new_runner() as runner, nothing_collected():
        runner.run(viewers.run())
    say(viewers.report())


if __name__ == "__main__":
    main()
