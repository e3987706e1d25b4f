"""A soak's requests: chats and what else a session is asked, each with its outcome as a name."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.kit.client import LoadClient, RequestFailed
from benchmarks.serving.reply import StreamedReply

ANSWER_DEADLINE_S = 60.0
"""Every request is answered by then, whatever happens to it."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a chat: `seen` is its status and finish reason, or its error's code. `ids` None: they were not told.

    `detail` is for people.
    """

    seen: str
    rid: str = ""
    text: str = ""
    ids: tuple[int, ...] | None = None
    detail: str = ""


class _SoakMessage(msgspec.Struct):
    content: str | None


class _ReplyMeta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, str | None]] = []


class _WholeChoice(msgspec.Struct):
    message: _SoakMessage
    finish_reason: str
    meta_info: _ReplyMeta


class _SoakCompletion(msgspec.Struct):
    id: str
    choices: list[_WholeChoice]


_COMPLETION = msgspec.json.Decoder(_SoakCompletion)


async def chat(
    client: LoadClient, path: str, parts: list[bytes], *, streams: bool, headers: Sequence[tuple[str, str]] = ()
) -> Answered:
    """Ask, and hear the answer to its end."""
    reader = StreamedReply() if streams else None
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            answer = await client.asked("POST", path, parts, None if reader is None else reader.feed, headers)
        if reader is None:
            return _whole(answer.body, answer.request_id)
        reader.end(0.0)
    except RequestFailed as failure:
        return Answered(seen=failure.kind, detail=failure.detail)
    except TimeoutError:
        return Answered(seen="unanswered", detail=f"there was no answer within {ANSWER_DEADLINE_S:g} s")
    return Answered(seen=f"200 {reader.finish_reason}", rid=answer.request_id, text=reader.text)


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


async def told(client: LoadClient, method: str, path: str, body: object = None) -> Any:
    """The JSON that a route answers; None where there is no body. Raises RequestFailed, also for no answer in time."""
    parts = [] if body is None else [msgspec.json.encode(body)]
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            answer = await client.asked(method, path, parts)
    except TimeoutError as error:
        raise RequestFailed("unanswered", f"{method} {path}: no answer within {ANSWER_DEADLINE_S:g} s") from error
    try:
        return msgspec.json.decode(answer.body) if answer.body else None
    except msgspec.DecodeError as error:
        raise RequestFailed("not JSON", f"{method} {path}: {error}") from error
