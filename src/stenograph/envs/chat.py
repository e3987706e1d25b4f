"""A chat with a session for environments that bring no agent: one request, one message. Needs aiohttp alone."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

import aiohttp

from stenograph.client.session import RolloutSession

Message = Mapping[str, object]


class ChatRefused(Exception):
    """The server did not answer a chat with a message; it has the status and the server's words."""


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
        async with self._http.post(self._url, json=body, headers=self._headers) as answer:
            if answer.status != 200:
                raise ChatRefused(f"{answer.status}: {(await answer.text())[:500]}")
            said = cast("dict[str, list[dict[str, dict[str, object]]]]", await answer.json())
        return said["choices"][0]["message"]


@asynccontextmanager
async def chat(session: RolloutSession, fields: Mapping[str, object]) -> AsyncGenerator[SessionChat]:
    """A chat of a session, without a time limit of its own: the rollout has one."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as http:
        yield SessionChat(session, http, fields)
