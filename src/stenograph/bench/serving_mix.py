"""What the clients of `bench serving` say: conversations drawn from declared distributions, the same for a seed. Pure.

Owns the mixes, and how a turn's request is spelled. Knows no socket and no clock. A session is drawn from the seed and
its own number alone, so that more sessions never change those that were there before.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from stenograph.bench.conversation import Conversation, Messages

SOURCE_BYTES = 2**20
TASK = "Answer the question, or go on with the task, in one short sentence. "
RESULT = "The tool returned:\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Sizes as they are in traffic: most small, some large. `sigma` is that of the logarithm; cut at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        """A whole number."""
        return min(self.most, max(self.least, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))

    def __str__(self) -> str:
        return f"log-normal, median {self.median:g}, sigma {self.sigma:g}, in [{self.least}, {self.most}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A kind of traffic. All sessions share one system prompt of `system_bytes`.

    After the first turn, the share `tool_share` of the turns brings a tool's result instead of a person's message. It
    comes as a user's message, as agents send it to models without tool calls: no model can be made to call a tool at
    a declared rate. `stop` ends replies of models that would seldom end one themselves.
    """

    name: str
    title: str
    system_bytes: int
    turns: LogNormal
    user_bytes: LogNormal
    tool_share: float
    tool_bytes: LogNormal
    max_tokens: LogNormal
    temperature: float
    stop: tuple[str, ...] = ()


MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            name="chat",
            title="short conversations, for an engine on a CPU",
            system_bytes=600,
            turns=LogNormal(median=3, sigma=0.5, least=1, most=8),
            user_bytes=LogNormal(median=120, sigma=0.7, least=20, most=800),
            tool_share=0.4,
            tool_bytes=LogNormal(median=300, sigma=0.8, least=40, most=2_000),
            max_tokens=LogNormal(median=40, sigma=0.5, least=12, most=128),
            temperature=0.7,
            stop=(".", "?", "\n"),
        ),
        Mix(
            name="agent",
            title="agents at work: long system prompt, tool results, many turns",
            system_bytes=6_000,
            turns=LogNormal(median=8, sigma=0.6, least=2, most=30),
            user_bytes=LogNormal(median=400, sigma=0.8, least=40, most=4_000),
            tool_share=0.8,
            tool_bytes=LogNormal(median=2_500, sigma=1.0, least=60, most=24_000),
            max_tokens=LogNormal(median=256, sigma=0.8, least=32, most=2_048),
            temperature=1.0,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What a client says in a turn, and for how many tokens it asks."""

    text: str
    is_tool: bool
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """All that the client of a session will say."""

    system: str
    turns: tuple[TurnPlan, ...]


def draw_sessions(mix: Mix, *, num: int, seed: int, max_tokens: int | None = None) -> list[SessionPlan]:
    """The first `num` sessions of a seed; no turn asks for more than `max_tokens`."""
    source = next(Messages(num_bytes=SOURCE_BYTES, num_messages=1).texts(1))
    system = TASK + _text(source, random.Random(f"system/{mix.name}"), mix.system_bytes)
    return [
        SessionPlan(system=system, turns=tuple(_turns(mix, source, random.Random(f"{seed}/{index}"), max_tokens)))
        for index in range(num)
    ]


def _turns(mix: Mix, source: str, rng: random.Random, most: int | None) -> Iterator[TurnPlan]:
    for number in range(mix.turns.draw(rng)):
        is_tool = number > 0 and rng.random() < mix.tool_share
        size = (mix.tool_bytes if is_tool else mix.user_bytes).draw(rng)
        text = _text(source, rng, size)
        asked = mix.max_tokens.draw(rng)
        yield TurnPlan(
            text=RESULT + text if is_tool else text,
            is_tool=is_tool,
            max_tokens=asked if most is None else min(asked, most),
            seed=rng.randrange(2**31),
        )


def _text(source: str, rng: random.Random, size: int) -> str:
    begin = rng.randrange(len(source) - size)
    return source[source.find(" ", begin) + 1 :][:size]


def arrivals_s(rate: float, *, num: int, seed: int) -> list[float]:
    """When the sessions of an open loop begin: a Poisson process of `rate` a second, from 0, the same for a seed."""
    rng = random.Random(f"arrivals/{seed}")
    now, due = 0.0, list[float]()
    for _ in range(num):
        due.append(now)
        now += rng.expovariate(rate)
    return due


class Line:
    """One session's side of the conversation, as JSON.

    A reply that was cut by `max_tokens` cannot be continued, so the client does what agents do: it takes the turn back
    and says the next thing in its place. The number of chats is thus the planned one, whatever the model says.
    """

    def __init__(self, mix: Mix, plan: SessionPlan) -> None:
        self._mix = mix
        self._system = _message("system", plan.system)
        self._conversation = Conversation()
        self._is_empty = True

    def new_messages(self, turn: TurnPlan) -> bytes:
        """What this turn adds, as JSON with commas between."""
        user = _message("user", turn.text)
        return self._system + b"," + user if self._is_empty else user

    def body_parts(self, turn: TurnPlan) -> list[bytes]:
        """A chat request's body, in pieces: everything so far, and what this turn adds."""
        parts = self._conversation.request_parts(self.new_messages(turn))
        return [*parts[:-1], b"],", self._parameters(turn)]

    def new_body(self, turn: TurnPlan) -> bytes:
        """The same, without what came before."""
        return b'{"messages":[' + self.new_messages(turn) + b"]," + self._parameters(turn)

    def answered(self, turn: TurnPlan, content: str) -> None:
        """Keep a turn whose reply came to its end."""
        self._conversation.add_turn(self.new_messages(turn), _message("assistant", content))
        self._is_empty = False

    def _parameters(self, turn: TurnPlan) -> bytes:
        parameters: dict[str, object] = {
            "max_tokens": turn.max_tokens,
            "temperature": self._mix.temperature,
            "seed": turn.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._mix.stop:
            parameters["stop"] = self._mix.stop
        return msgspec.json.encode(parameters)[1:]


def _message(role: str, content: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": content})
