"""One conversation of `stenograph chat`: its messages, its session, and the turn under way. Knows no terminal."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from stenograph.cli.session_calls import CallFailed, ServerCalls

STOPPED, ABORTED = "abort", "aborted"
"""The finish reason of a stopped reply, and the status of its record."""


@dataclass(slots=True)
class ChatTurn:
    """A reply as it comes. `rows` are the sampled tokens: id, log-probability in nats, text."""

    id: str = ""
    text: str = ""
    reasoning: str = ""
    finish: str = ""
    first_s: float | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_sampled: int = 0
    rows: list[tuple[int, float, str]] = field(default_factory=list[tuple[int, float, str]])


class ChatTalk:
    """The messages of one session's main strand, as the client of it has them."""

    def __init__(self, calls: ServerCalls, session_id: str) -> None:
        self.session_id = session_id
        self.last: ChatTurn | None = None
        """The last reply of this conversation, None if there is none."""
        self._calls = calls
        self._messages: list[Mapping[str, object]] = []
        self._tools: Sequence[object] = ()

    def __repr__(self) -> str:
        return f"<ChatTalk {self.session_id}, {len(self._messages)} messages>"

    @property
    def num_messages(self) -> int:
        """Messages so far, replies included."""
        return len(self._messages)

    def resume(self) -> None:
        """Take the messages and tools of the session as it is. Raises CallFailed."""
        for record in self._calls.records(self.session_id):
            if record["status"] == ABORTED:
                continue  # the last one: nothing goes on from it
            request = cast("Mapping[str, object]", record["request"])
            added = cast("Sequence[Mapping[str, object]]", request["messages"])
            self._messages += [_sendable(message) for message in (*added, _choice(record)["message"])]
            self._tools = cast("Sequence[object]", request["tools"])

    def turn(self, text: str, show: Callable[[ChatTurn, str, str], None]) -> ChatTurn:
        """Say something, and show each piece of the reply: the turn so far, and the new reasoning and text.

        A stopped reply is recorded, and no part of the conversation: the server lets nothing go on from it. Raises
        CallFailed; then the conversation is as it was, too.
        """
        said = {"role": "user", "content": text}
        turn, began = ChatTurn(), time.monotonic()
        body: dict[str, object] = {
            "messages": [*self._messages, said],
            "logprobs": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **({"tools": self._tools} if self._tools else {}),
        }
        for chunk in self._calls.chunks(self.session_id, body):
            reasoning, content = _add(turn, chunk)
            if turn.first_s is None and (reasoning or content):
                turn.first_s = time.monotonic() - began
            show(turn, reasoning, content)
        replied: dict[str, object] = {"role": "assistant", "content": turn.text}
        if turn.reasoning:
            replied["reasoning_content"] = turn.reasoning
        if turn.finish != STOPPED:
            self._messages += [said, replied]
        self.last = turn
        return turn

    def stages_s(self) -> Mapping[str, float]:
        """Seconds of each stage of the last turn, in order. Raises CallFailed."""
        for record in reversed(self._calls.records(self.session_id)):
            if self.last is not None and cast("Mapping[str, object]", record["response"])["id"] == self.last.id:
                return cast("Mapping[str, float]", record["stage_seconds"])
        raise CallFailed("the session has no record of the last turn")


def _add(turn: ChatTurn, chunk: Mapping[str, object]) -> tuple[str, str]:
    """Add a chunk to its turn; returns its reasoning and its text."""
    turn.id = str(chunk.get("id") or turn.id)
    if usage := cast("Mapping[str, object] | None", chunk.get("usage")):
        turn.num_prompt = cast("int", usage["prompt_tokens"])
        turn.num_sampled = cast("int", usage["completion_tokens"])
        details = cast("Mapping[str, int]", usage.get("prompt_tokens_details") or {})
        turn.num_cached = details.get("cached_tokens", 0)
    choices = cast("Sequence[Mapping[str, object]]", chunk.get("choices") or ())
    if not choices:
        return "", ""
    choice = choices[0]
    delta = cast("Mapping[str, str | None]", choice.get("delta") or {})
    logprobs = cast("Mapping[str, Sequence[Mapping[str, object]]]", choice.get("logprobs") or {})
    ids = cast("Sequence[int]", choice.get("token_ids") or ())
    for id_, row in zip(ids, logprobs.get("content") or (), strict=False):
        turn.rows.append((id_, cast("float", row["logprob"]), str(row["token"])))
    reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
    turn.reasoning += reasoning
    turn.text += content
    turn.finish = str(choice.get("finish_reason") or turn.finish)
    return reasoning, content


def _choice(record: Mapping[str, object]) -> Mapping[str, object]:
    choices = cast("Mapping[str, Sequence[Mapping[str, object]]]", record["response"])["choices"]
    if "message" not in choices[0]:
        raise CallFailed("the session's last turn is a completion, which no chat goes on from")
    return choices[0]


def _sendable(message: object) -> Mapping[str, object]:
    """A recorded message as a client sends it: without null fields."""
    fields = cast("Mapping[str, object]", message)
    return {name: value for name, value in fields.items() if value is not None or name == "content"}
