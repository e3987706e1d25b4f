"""A soak's requests: chats and what else a session is asked, each with its outcome as a name."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from stenograph.bench.serving_http import HttpClient
from stenograph.bench.serving_reply import ReplyReader
from stenograph.bench.serving_target import ChatFailed

ANSWER_DEADLINE_S = 60.0
"""Every request is answered by then, whatever happens to it."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a chat: `seen` is its status and finish reason, or its error's code. `ids` None: they were not told.

    `detail` is for people.
    """

    seen: str
    rid: str = ""
    text: str = ""
    ids: tuple[int, ...] | None = None
    detail: str = ""


class _Message(msgspec.Struct):
    content: str | None


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, None]] = []


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str
    meta_info: _Meta


class _Completion(msgspec.Struct):
    id: str
    choices: list[_Choice]


_COMPLETION = msgspec.json.Decoder(_Completion)


async def chat(
    client: HttpClient, path: str, parts: list[bytes], *, streams: bool, headers: Sequence[tuple[str, str]] = ()
) -> Answered:
    """Ask, and hear the answer to its end."""
    reader = ReplyReader() if streams else None
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await client.asked("POST", path, parts, reader, headers)
        if reader is None:
            return _whole(client.body, client.request_id)
        reader.end(0.0)
    except ChatFailed as failure:
        return Answered(seen=failure.kind, detail=failure.detail)
    except TimeoutError:
        return Answered(seen="unanswered", detail=f"there was no answer within {ANSWER_DEADLINE_S:g} s")
    return Answered(seen=f"200 {reader.finish_reason}", rid=client.request_id, text=reader.content)


def _whole(body: bytes, rid: str) -> Answered:
    try:
        completion = _COMPLETION.decode(body)
        (choice,) = completion.choices
    except (msgspec.DecodeError, ValueError) as error:
        return Answered(seen="200 not a reply", detail=f"{error}: {body[:200]!r}")
    if completion.id != rid:
        return Answered(seen="200 of another", detail=f"the reply is {completion.id}, its x-request-id {rid}")
    ids = tuple(id_ for _, id_, _ in choice.meta_info.output_token_logprobs)
    return Answered(seen=f"200 {choice.finish_reason}", rid=rid, text=choice.message.content or "", ids=ids)


async def told(client: HttpClient, method: str, path: str, body: object = None) -> Any:
    """The JSON that a route answers; None where there is no body. Raises ChatFailed, also for no answer in time."""
    parts = [] if body is None else [msgspec.json.encode(body)]
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await client.asked(method, path, parts)
    except TimeoutError as error:
        raise ChatFailed("unanswered", f"{method} {path}: no answer within {ANSWER_DEADLINE_S:g} s") from error
    try:
        return msgspec.json.decode(client.body) if client.body else None
    except msgspec.DecodeError as error:
        raise ChatFailed("not JSON", f"{method} {path}: {error}") from error
