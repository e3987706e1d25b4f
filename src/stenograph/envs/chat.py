"""A chat with a session for environments that bring no agent: one request, one message. Needs aiohttp alone."""

import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import cast

import aiohttp

from stenograph.client.session import RolloutSession

Message = Mapping[str, object]


class ChatRefused(Exception):
    """The server did not answer a chat with a message; it has the status and the server's words."""


class ChatsDiffer(Exception):
    """An environment that is run again says something else after the same replies."""


@dataclass(slots=True, kw_only=True)
class RetracedChats:
    """The requests and replies of a run so far, `said`, as JSON. The first ones are `past`, of an earlier run: they are
    answered again without the server."""

    past: Sequence[tuple[str, str]] = ()
    said: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def known(self, request: str) -> dict[str, object] | None:
        """The reply to the next request, if it is of the past. Raises ChatsDiffer for another request than then."""
        number = len(self.said)
        if number >= len(self.past):
            return None
        if self.past[number][0] != request:
            raise ChatsDiffer(
                f"request {number} of the run is not what it was: the environment depends on more than the replies"
            )
        self.said.append(self.past[number])
        reply: dict[str, object] = json.loads(self.past[number][1])
        return reply


_RETRACED: ContextVar[RetracedChats | None] = ContextVar("_RETRACED", default=None)


@contextmanager
def retraced(chats: RetracedChats) -> Generator[None]:
    """Within it, all chats of this task are noted in `chats`, and answered from its past."""
    token = _RETRACED.set(chats)
    try:
        yield
    finally:
        _RETRACED.reset(token)


class SessionChat:
    """Chats of one session. `fields` go into each request (`max_tokens`, `temperature`, …)."""

    def __init__(self, session: RolloutSession, http: aiohttp.ClientSession, fields: Mapping[str, object]) -> None:
        self._url = f"{session.base_url}/chat/completions"
        self._headers = {"authorization": f"Bearer {session.api_key}"}
        self._http = http
        self._fields = fields

    def __repr__(self) -> str:
        return f"<SessionChat {self._url}>"

    async def say(self, messages: Sequence[Message], *, tools: Sequence[object] = ()) -> dict[str, object]:
        """The assistant's message after these. Raises ChatRefused, and aiohttp's errors."""
        body = {"model": "any", "messages": list(messages), **self._fields, **({"tools": list(tools)} if tools else {})}
        chats, request = _RETRACED.get(), json.dumps([messages, tools], default=str)
        if chats is not None and (known := chats.known(request)) is not None:
            return known
        async with self._http.post(self._url, json=body, headers=self._headers) as answer:
            if answer.status != 200:
                raise ChatRefused(f"{answer.status}: {(await answer.text())[:500]}")
            said = cast("dict[str, list[dict[str, dict[str, object]]]]", await answer.json())
        message = said["choices"][0]["message"]
        if chats is not None:
            chats.said.append((request, json.dumps(message)))
        return message


@asynccontextmanager
async def chat(session: RolloutSession, fields: Mapping[str, object]) -> AsyncGenerator[SessionChat]:
    """A chat of a session, without a time limit of its own: the rollout has one."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as http:
        yield SessionChat(session, http, fields)
