"""Repeatable HTTP calls: each is retried on its own until it succeeds, is refused, or its time is over.

Every call here is safe to repeat: it reads, it ends in the same state, or it has an idempotency key.
"""

import asyncio
import itertools
import json
import os
import random
from collections.abc import Mapping
from types import TracebackType
from typing import Self, cast

import aiohttp

from stenograph.client.errors import BadPayload, ClientError, ServerRefused, ServerUnreachable, refusal

KEEP_ALIVE_S = 4.0
"""Seconds to keep an idle connection: less than the server's five, so none is used while it closes."""

FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 5.0

JsonObject = Mapping[str, object]


class HttpCalls:
    """A pool of connections, with the key for each call."""

    def __init__(self, *, api_key: str | None, call_timeout_s: float, retry_s: float) -> None:
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=call_timeout_s)
        self._retry_s = retry_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def json(self, method: str, url: str) -> dict[str, object]:
        """The answer's JSON object, after retries. Raises as `call`."""
        return as_object(await self.call(method, url), url)

    async def call(
        self, method: str, url: str, body: JsonObject | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The answer's body, after retries. Raises ServerUnreachable, ServerRefused."""
        retries = Retries(self._retry_s)
        while True:
            try:
                return await self.once(method, url, body, headers)
            except (ServerUnreachable, ServerRefused) as error:
                await retries.pause_or_raise(error)

    async def once(
        self,
        method: str,
        url: str,
        body: JsonObject | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """The answer's body, by one try, of `timeout_s` seconds instead of the pool's. Raises ServerUnreachable,
        ServerRefused."""
        if self._http is None:
            raise RuntimeError("the client is not open: use it as `async with Client(…) as client`")
        data = None if body is None else json.dumps(body).encode()
        sent = dict(headers or {})
        if data is not None:
            sent["content-type"] = "application/json"
        timeout = self._timeout if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(
                method, url, data=data, headers=sent, allow_redirects=False, timeout=timeout
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnreachable(f"{method} {url}: the server does not answer: {_why(error)}") from error
        if answer.status not in (200, 204):
            raise refusal(f"{method} {url}", answer.status, answer.headers, content)
        return content


class Retries:
    """The pauses between tries, until `retry_s` seconds have passed since it was made."""

    def __init__(self, retry_s: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + retry_s
        self._pauses = itertools.chain([0.0], (min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in itertools.count()))

    async def pause_or_raise(self, error: ClientError) -> None:
        """Wait before the next try, or raise `error` if another try is of no use or comes too late.

        The first pause is none: most failures are of a connection closed by the server.
        """
        if isinstance(error, ServerRefused) and not error.should_retry:
            raise error
        pause_s = next(self._pauses) * random.uniform(0.5, 1.0)
        if isinstance(error, ServerRefused):
            pause_s = max(pause_s, error.retry_after_s or FIRST_PAUSE_S)
        if asyncio.get_running_loop().time() + pause_s > self._deadline:
            raise error
        await asyncio.sleep(pause_s)


def as_object(content: bytes, url: str) -> dict[str, object]:
    """A JSON object. Raises BadPayload."""
    try:
        found: object = json.loads(content)
    except ValueError as error:
        raise BadPayload(f"{url} answers with what is no JSON: is it a Stenograph server?") from error
    if not isinstance(found, dict):
        raise BadPayload(f"{url} answers with JSON that is no object: is it a Stenograph server?")
    return cast("dict[str, object]", found)


def _why(error: BaseException) -> str:
    """The reason for the lack of an answer, in the system's words: aiohttp's own name the address once more."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number, strerror = error.os_error.errno, error.os_error.strerror
        return os.strerror(number) if number is not None and number > 0 else strerror or str(error)
    return str(error) or type(error).__name__
