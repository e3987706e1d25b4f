"""Anthropic's Messages in the service tests: requests, events, and the official types that every one must pass."""

import json
from typing import Any

import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from .conftest import Answer, Live

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BASH = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
LOOK = (
    "<think>\nLook first.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
)
HELLO = {"role": "user", "content": "hello"}


def client_of(live: Live, session: str | None, **options: Any) -> anthropic.AsyncAnthropic:
    """The official SDK on a session. Close it."""
    path = "" if session is None else f"/sessions/{session}"
    return anthropic.AsyncAnthropic(base_url=live.url + path, api_key="none", **options)


async def post(live: Live, session: str | None, *messages: dict[str, Any], **fields: Any) -> Answer:
    """One request; `path` and `headers` aside, all fields are the body's."""
    prefix = "" if session is None else f"/sessions/{session}"
    path, headers = fields.pop("path", "/v1/messages"), fields.pop("headers", {})
    body = {"model": "tiny", "max_tokens": 1000, "messages": list(messages), **fields}
    return await live.call("POST", prefix + path, {k: v for k, v in body.items() if v is not None}, **headers)


def checked(answer: Answer) -> dict[str, Any]:
    """A whole reply that passes the SDK's own type."""
    assert answer.status == 200, answer.body
    Message.model_validate(answer.json(), strict=True)
    return dict(answer.json())


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name and passes the SDK's own type."""
    events: list[dict[str, Any]] = []
    for text in body.decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        events.append(event)
    return events


def error_of(answer: Answer) -> tuple[int, str, str | None]:
    """Status, type and pointer of an error in Anthropic's shape."""
    body = answer.json()
    assert (body["type"], sorted(body["error"])) == ("error", ["code", "message", "param", "type"])
    return answer.status, body["error"]["type"], body["error"]["param"]
