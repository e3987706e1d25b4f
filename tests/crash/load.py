"""Clients whose servers are killed: each works on a rollout, and asks again, with the same key, until it is answered.

Chat, Messages and Responses, streamed and not; strands and trees with siblings side by side; outcomes, deletes, looks;
one client whose replies are of 1.3 MiB. What they are told goes into the book.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from standins.planned_server import AskedRequest, ReplyScript

from .book import Acknowledged, Book, Generated, Rollout, shot_of

END = 2
MAX_TURNS = 20
LARGE_BYTES = 1_000_000
"""Of the experts of a whole prompt and reply, about; those of a first turn make a reply of 1.3 MiB as base64."""
LARGE_MARK = "large"
CLIENTS = ("chat", "chat", "chat", "messages", "messages", "responses", "responses", "tree", "tree", "large")
BUSY = (409, 429, 503)
"""Of a turn that has not ended, of a server with no room or that ends."""


class Gone(Exception):
    """There is no such session."""


@dataclass(slots=True)
class Load:
    """Clients of one server after the other. `moved` is set, and made anew, at each event that a kill may wait for."""

    book: Book
    chosen: random.Random
    name: str = ""
    url: str = ""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    num_generated: int = 0
    num_asked_again: int = 0
    large_ids: tuple[int, ...] = ()
    """The ids of the mark by which a prompt asks for a large reply."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, asked: AskedRequest) -> ReplyScript:
        """What the engine says: each generation its own ids and logprobs, so that one that is kept twice is seen."""
        self.num_generated += 1
        number, draw = self.num_generated, self.chosen
        unique = tuple(3 + number // 200**place % 200 for place in range(4))
        ids = (*unique, *(draw.randrange(3, 250) for _ in range(draw.randrange(0, 30))), END)
        logprobs = tuple(-draw.random() for _ in ids)
        prompt = tuple(asked.json["input_ids"])
        payload = digest = None
        if self._is_large(prompt):
            num_rows = len(prompt) + len(ids) - 1
            row_bytes = LARGE_BYTES // num_rows // 4 * 4
            payload = draw.randbytes(num_rows * row_bytes)
            digest = Book.digest(payload[asked.json.get("routed_experts_start_len", 0) * row_bytes :])
        self.book.generated[ids] = Generated(prompt_ids=prompt, logprobs=logprobs, payload_digest=digest)
        self._note()
        return ReplyScript(ids=ids, logprobs=logprobs, matched=END, routed_experts=payload, per_event=8)

    def _is_large(self, prompt: tuple[int, ...]) -> bool:
        size = len(self.large_ids)
        return any(prompt[start : start + size] == self.large_ids for start in range(len(prompt) - size + 1))

    def _note(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of what has come to pass."""
        while not holds():
            await self.moved.wait()

    # --- clients

    async def work(self, client: aiohttp.ClientSession, number: int) -> None:
        """One client, rollout after rollout, until all is over."""
        kind, opened = CLIENTS[number % len(CLIENTS)], 0
        while not self.is_over:
            opened += 1
            history = "tree" if kind == "tree" else "strands"
            body = {"history": history, "metadata": {"client": number, "opened": opened}}
            answer = await self._call(client, "POST", "/sessions", body, key=f"open-{self.name}-{number}-{opened}")
            rollout = self.book.opened(answer["session_id"], history)
            with contextlib.suppress(Gone):
                await self._roll(client, kind, rollout, number)

    async def _roll(self, client: aiohttp.ClientSession, kind: str, rollout: Rollout, number: int) -> None:
        draw, messages = self.chosen, list[dict[str, str]]()
        num_turns = draw.randrange(1, 4) if kind == "large" else draw.randrange(1, MAX_TURNS)
        for turn in range(num_turns):
            if self.is_over:
                return
            asked = f"{LARGE_MARK if kind == 'large' else 'client'} {number}, question {turn}"
            messages.append({"role": "user", "content": asked})
            width = draw.randrange(2, 5) if kind == "tree" else 1
            replies = await asyncio.gather(
                *(self._turn(client, kind, rollout, messages, f"{turn}-{one}") for one in range(width))
            )
            messages.append({"role": "assistant", "content": draw.choice(replies).text})
            if draw.random() < 0.1:
                await self._say_outcome(client, rollout, draw.random())
            if kind != "large" and draw.random() < 0.1:  # whose payload is of no real shape: it has no samples
                await self.look(client, rollout)
        if draw.random() < (0.9 if kind == "large" else 0.3):
            await self._delete(client, rollout)

    async def _turn(
        self, client: aiohttp.ClientSession, kind: str, rollout: Rollout, messages: list[dict[str, str]], key: str
    ) -> Acknowledged:
        """One turn, asked for until it is answered; a protocol and a stream at each attempt as at the first."""
        is_streamed = self.chosen.random() < 0.5
        protocol = kind if kind in PROTOCOLS else "chat"
        path, body_of, read = PROTOCOLS[protocol]
        body = {**body_of(list(messages)), "stream": is_streamed}
        rollout.num_asked += 1
        self.book.touched.add(rollout.session_id)
        answer = await self._call(
            client, "POST", f"/sessions/{rollout.session_id}{path}", body, key=f"{rollout.session_id}-{key}"
        )
        reply = read(answer)
        rollout.acknowledged.append(reply)
        self.book.touched.add(rollout.session_id)
        self.book.num_acknowledged += 1
        self._note()
        return reply

    async def _say_outcome(self, client: aiohttp.ClientSession, rollout: Rollout, reward: float) -> None:
        rollout.outcomes.append(reward)
        rollout.all_outcomes.append(reward)
        self.book.touched.add(rollout.session_id)
        await self._call(client, "PUT", f"/sessions/{rollout.session_id}/outcome", {"reward": reward})
        rollout.outcomes = [reward]

    async def _delete(self, client: aiohttp.ClientSession, rollout: Rollout) -> None:
        rollout.is_delete_asked = True
        self.book.touched.add(rollout.session_id)
        with contextlib.suppress(Gone):  # the attempt before took place
            await self._call(client, "DELETE", f"/sessions/{rollout.session_id}")
        rollout.deleted_at = time.monotonic()
        self.book.touched.add(rollout.session_id)

    async def look(self, client: aiohttp.ClientSession, rollout: Rollout) -> None:
        """What a server shows of a session at rest is what one showed before, and is kept for the next time."""
        path, before = f"/sessions/{rollout.session_id}", rollout.state
        view = await self._call(client, "GET", path)
        samples = await self._call(client, "POST", path + "/samples", {"format": "json", "include_side": True})
        shot = shot_of(view, samples, before)
        if rollout.state != before:  # its client went on meanwhile
            return
        self.book.check_shot(rollout, shot)
        if rollout.history != "tree":  # whose shown line may be another next time
            rollout.shot = shot

    async def _call(
        self, client: aiohttp.ClientSession, method: str, path: str, body: Any = None, key: str | None = None
    ) -> Any:
        """Ask until there is a whole answer. Raises Gone for 404."""
        headers = {} if key is None else {"idempotency-key": key}
        while True:
            await self.up.wait()
            url = self.url
            try:
                async with client.request(method, url + path, json=body, headers=headers) as response:
                    content = await response.read()
                    if response.status == 404:
                        raise Gone(path)
                    if response.status in BUSY:
                        await asyncio.sleep(0)
                        continue
                    assert response.status in (200, 204), (response.status, content[:500])
                    if response.content_type == "text/event-stream":
                        return _events(content)
                    return json.loads(content) if content else None
            except (aiohttp.ClientError, ConnectionError):
                self.num_asked_again += 1
                await asyncio.sleep(0)  # a server that ends refuses at once


class _Cut(aiohttp.ClientError):
    """A stream that ended before its last event."""


def _events(content: bytes) -> list[Any]:
    """The events of a stream that is whole: it is cut if the last is not there."""
    datas = [line.removeprefix("data: ") for line in content.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(one) for one in datas if one != "[DONE]"]
    is_whole = datas[-1:] == ["[DONE]"] or (
        bool(events) and events[-1].get("type") in ("message_stop", "response.completed")
    )
    if not is_whole:
        raise _Cut("the stream ended before its last event")
    return events


def _read_chat(answer: Any) -> Acknowledged:
    if isinstance(answer, list):
        choices = [choice for event in answer for choice in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return Acknowledged(reply_id=answer[0]["id"], text=text)
    choice = answer["choices"][0]
    return Acknowledged(reply_id=answer["id"], text=choice["message"]["content"] or "", ids=tuple(choice["token_ids"]))


def _read_messages(answer: Any) -> Acknowledged:
    if isinstance(answer, list):
        texts = [event["delta"].get("text", "") for event in answer if event["type"] == "content_block_delta"]
        return Acknowledged(reply_id=answer[0]["message"]["id"], text="".join(texts))
    return Acknowledged(reply_id=answer["id"], text="".join(block.get("text", "") for block in answer["content"]))


def _read_responses(answer: Any) -> Acknowledged:
    if isinstance(answer, list):
        answer = answer[-1]["response"]
    texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
    return Acknowledged(reply_id=answer["id"], text="".join(texts))


def _chat_body(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"messages": messages, "return_token_ids": True}


def _messages_body(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 4000, "messages": messages}


def _responses_body(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "tiny", "input": messages}


PROTOCOLS: dict[str, tuple[str, Callable[[list[dict[str, str]]], dict[str, Any]], Callable[[Any], Acknowledged]]] = {
    "chat": ("/v1/chat/completions", _chat_body, _read_chat),
    "messages": ("/v1/messages", _messages_body, _read_messages),
    "responses": ("/v1/responses", _responses_body, _read_responses),
}
