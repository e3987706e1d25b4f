"""An SGLang stand-in that does what a request's last message orders: a process, for load that comes with faults.

    python -m standins.ordered_engine --replies '[{"text": "ok", "ids": [9, 2]}]'

The last message begins with a line of JSON, an `Order`; so whoever sends it knows what will come of it. Of each
generation it keeps what came, by session, until that is asked for: `POST /soak/session` hands it out and forgets it.
`POST /soak/begun` and `/soak/ended` wait for a turn's request to come, and to be over; `GET /soak/state` counts.
"""

import argparse
import asyncio
import base64
import json
import os
import sys
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import uvloop

from standins.faults import Answer, Fault
from standins.planned_server import AskedRequest, ReplyScript
from standins.sglang_server import SGLangServer

SESSION_HEADER = "x-smg-routing-key"
Reply = dict[str, Any]


class OrderedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Something to say: its text, and the ids that are it, with the one that ends a turn."""

    text: str
    ids: tuple[int, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order for `turn`: its n-th generation is the n-th of `plays`, or the last, as (act, reply's number).

    `filler_bytes` come with the reply: as `routed_experts` if it `replays`, else in a field that nobody reads.
    """

    turn: str
    plays: tuple[tuple[str, int], ...]
    filler_bytes: int = 0
    replays: bool = False


class Generation(msgspec.Struct, kw_only=True):
    """A request that came: the `play`-th of its turn. `prompt_crc` is the CRC-32 of its ids as int32."""

    turn: str
    play: int
    rid: str
    num_prompt: int
    prompt_crc: int


class _OrderedMessage(msgspec.Struct):
    content: str


class _OrderedChat(msgspec.Struct):
    messages: list[_OrderedMessage]
    input_ids: list[int]
    rid: str


class _Named(msgspec.Struct):
    turn: str = ""
    session: str = ""


def _choice(reply: Reply) -> Any:
    return reply["choices"][0]


def _rows(reply: Reply) -> Any:
    return _choice(reply)["meta_info"]["output_token_logprobs"]


def _fill(filler: str, reply: Reply) -> None:
    _choice(reply)["meta_info"]["hidden_states"] = filler


LIES: Mapping[str, Callable[[Reply], object]] = {
    "null_content": lambda reply: _choice(reply)["message"].update(content=None),
    "no_meta_info": lambda reply: _choice(reply).pop("meta_info"),
    "no_logprobs": lambda reply: _choice(reply)["meta_info"].pop("output_token_logprobs"),
    "a_token_less": lambda reply: _rows(reply).pop(),
    "id_beyond_vocabulary": lambda reply: _rows(reply)[0].__setitem__(1, 10**6),
    "nan_logprob": lambda reply: _rows(reply)[0].__setitem__(0, float("nan")),
    "another_prompt": lambda reply: _choice(reply)["meta_info"].update(prompt_tokens=10**6),
    "another_finish": lambda reply: _choice(reply).update(finish_reason="eos"),
}
STATUSES = (400, 429, 500, 503)
NEVER = (Fault.HANG, Fault.HELD_HEADERS, Fault.HELD_BODY)
"""Faults that end only when someone ends them."""


def _acts() -> dict[str, dict[str, Any]]:
    """Differences from a script that only replies, by the name of the act."""
    acts: dict[str, dict[str, Any]] = {str(fault): {"fault": fault, "released": fault not in NEVER} for fault in Fault}
    acts["slow_headers"] = {"fault": Fault.HELD_HEADERS, "released": True}
    acts["slow_body"] = {"fault": Fault.HELD_BODY, "released": True}
    acts["paused"] = {"paused": True}
    acts["length"] = {"finish": "length"}
    acts["abort"] = {"finish": "abort"}
    acts |= {f"status_{status}": {"status": status} for status in STATUSES}
    return acts | {f"lie_{name}": {"edit": edit} for name, edit in LIES.items()}


ACTS = _acts()


class OrderedEngine:
    """The server and what it knows of its generations. `server` is to be started and closed."""

    def __init__(self, replies: tuple[OrderedReply, ...]) -> None:
        self.server = SGLangServer(answers=self._script, routes=self._route, remembers=False)
        self.num_generations = 0
        self._replies = replies
        self._by_session: defaultdict[str, list[Generation]] = defaultdict(list)
        self._begun: dict[str, asyncio.Event] = {}

    def __repr__(self) -> str:
        return f"<OrderedEngine {self.server!r}, {self.num_generations} generations>"

    def _script(self, asked: AskedRequest) -> ReplyScript:
        """The order of a request. Records its arrival."""
        chat = msgspec.json.decode(asked.body, type=_OrderedChat)
        order = msgspec.json.decode(chat.messages[-1].content.partition("\n")[0], type=Order)
        generations = self._by_session[asked.header(SESSION_HEADER) or ""]
        play = Counter(generation.turn for generation in generations)[order.turn]
        crc = zlib.crc32(array("i", chat.input_ids).tobytes())
        generations.append(
            Generation(turn=order.turn, play=play, rid=chat.rid, num_prompt=len(chat.input_ids), prompt_crc=crc)
        )
        self.num_generations += 1
        if (event := self._begun.get(order.turn)) is not None:
            event.set()
        act, number = order.plays[min(play, len(order.plays) - 1)]
        reply = self._replies[number]
        script: dict[str, Any] = {
            "ids": reply.ids,
            "text": reply.text,
            "matched": reply.ids[-1],
            "num_drawn": len(reply.ids) // 2,
        }
        if order.filler_bytes and order.replays:
            script["routed_experts"] = bytes(order.filler_bytes)
        elif order.filler_bytes:
            script["edit"] = partial(_fill, base64.b64encode(bytes(order.filler_bytes)).decode())
        return ReplyScript(**script | ACTS[act])

    async def _route(self, asked: AskedRequest) -> Answer | None:
        """The control routes."""
        named = msgspec.json.decode(asked.body or b"{}", type=_Named)
        match asked.path:
            case "/soak/begun":
                await self._has_begun(named.turn, named.session)
                told: object = {}
            case "/soak/ended":
                rids = [g.rid for g in self._by_session.get(named.session, ()) if g.turn == named.turn]
                for rid in rids:
                    await self.server.ended(rid)
                told = {}
            case "/soak/session":
                told = {"generations": self._by_session.pop(named.session, [])}
            case "/soak/state":
                told = {
                    "running": self.server.num_running,
                    "sessions": len(self._by_session),
                    "generations": self.num_generations,
                }
            case _:
                return None
        return Answer(body=msgspec.json.encode(told))

    async def _has_begun(self, turn: str, session: str) -> None:
        if any(generation.turn == turn for generation in self._by_session.get(session, ())):
            return
        event = self._begun.setdefault(turn, asyncio.Event())
        try:
            await event.wait()
        finally:
            self._begun.pop(turn, None)


async def _serve(replies: tuple[OrderedReply, ...]) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _read_stdin, ended)
    async with OrderedEngine(replies).server as server:
        sys.stdout.write(json.dumps({"url": server.url}) + "\n")
        sys.stdout.flush()
        await ended.wait()


def _read_stdin(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        ended.set()


def main() -> None:
    """Serve until stdin closes."""
    parser = argparse.ArgumentParser(prog="python -m standins.ordered_engine", description=__doc__)
    parser.add_argument("--replies", required=True, help="what can be said: texts and ids, as JSON")
    replies = msgspec.json.decode(parser.parse_args().replies, type=tuple[OrderedReply, ...])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(replies))


if __name__ == "__main__":
    main()
