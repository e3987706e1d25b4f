"""The conversations of `bench serving`: sampled from declared distributions, or of a file in ShareGPT's form.

They are the same for a seed. Owns the mixes, and how a turn's request is spelled. Knows no socket and no clock.
A sampled session depends on the seed and its own number alone, so that more sessions never change those before.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.kit.conversation import Messages
from benchmarks.kit.datasets import AskedAndAnswered, read_sharegpt

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

    def sampled(self, rng: random.Random) -> int:
        """A whole number."""
        return min(self.most, max(self.least, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A kind of traffic. All sessions share one system prompt of `system_bytes`.

    After the first turn, the share `tool_share` of the turns brings a tool's result instead of a person's message. It
    comes as a user's message, as agents send it to models without tool calls: no model can be made to call a tool at
    a declared rate. `stop` ends replies of models that would seldom end one themselves.
    """

    name: str
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
            # short conversations, for an engine on a CPU
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
            name="sharegpt",
            # the conversations of a file in ShareGPT's form; its sizes are theirs
            system_bytes=0,
            turns=LogNormal(median=3, sigma=1.0, least=1, most=100),
            user_bytes=LogNormal(median=100, sigma=1.0, least=1, most=16_000),
            tool_share=0.0,
            tool_bytes=LogNormal(median=1, sigma=0.0, least=1, most=1),
            max_tokens=LogNormal(median=200, sigma=1.0, least=8, most=4_000),
            temperature=1.0,
        ),
        Mix(
            name="agent",
            # agents at work: long system prompt, tool results, many turns
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
CHAT, COMPLETIONS = "chat", "completions"
SHAREGPT = "sharegpt"
"""The mix whose conversations are those of a file."""
BYTES_PER_TOKEN = 4
"""Of a reply in a data set: how many tokens a turn asks for."""
MOST_TALK_BYTES = 16_000
"""Of a conversation of a data set, what is asked and answered: the turns beyond it are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """A client's message in a turn, and the tokens that it asks for."""

    text: str
    is_tool: bool
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """All that the client of a session will say."""

    system: str
    turns: tuple[TurnPlan, ...]


def sample_sessions(mix: Mix, *, num: int, seed: int, max_tokens: int | None = None) -> list[SessionPlan]:
    """The first `num` sessions of a seed; no turn asks for more than `max_tokens`."""
    source = next(Messages(num_bytes=SOURCE_BYTES, num_messages=1).texts(1))
    system = TASK + _text(source, random.Random(f"system/{mix.name}"), mix.system_bytes)
    return [
        SessionPlan(system=system, turns=tuple(_turns(mix, source, random.Random(f"{seed}/{index}"), max_tokens)))
        for index in range(num)
    ]


def read_sessions(path: Path, *, num: int, seed: int, max_tokens: int | None = None) -> list[SessionPlan]:
    """`num` conversations of ShareGPT's file, shuffled by the seed; a turn asks for as much as was answered there.

    Raises OSError, and ValueError where there are too few that are short enough.
    """
    rng = random.Random(f"sharegpt/{seed}")
    talks = read_sharegpt(path)
    rng.shuffle(talks)
    plans = (SessionPlan(system="", turns=tuple(_said(talk, rng, max_tokens))) for talk in talks)
    found = list(islice((plan for plan in plans if plan.turns), num))
    if len(found) < num:
        raise ValueError(f"{path} has {len(found)} conversations of up to {MOST_TALK_BYTES} bytes, asked for are {num}")
    return found


def _said(talk: Sequence[AskedAndAnswered], rng: random.Random, most: int | None) -> Iterator[TurnPlan]:
    num_bytes = 0
    for exchange in talk:
        num_tokens = max(MIXES[SHAREGPT].max_tokens.least, len(exchange.answered.encode()) // BYTES_PER_TOKEN)
        num_tokens = num_tokens if most is None else min(num_tokens, most)
        num_bytes += len(exchange.asked.encode()) + BYTES_PER_TOKEN * num_tokens
        if num_bytes > MOST_TALK_BYTES:
            return
        yield TurnPlan(text=exchange.asked, is_tool=False, max_tokens=num_tokens, seed=rng.randrange(2**31))


def _turns(mix: Mix, source: str, rng: random.Random, most: int | None) -> Iterator[TurnPlan]:
    for number in range(mix.turns.sampled(rng)):
        is_tool = number > 0 and rng.random() < mix.tool_share
        size = (mix.tool_bytes if is_tool else mix.user_bytes).sampled(rng)
        text = _text(source, rng, size)
        asked = mix.max_tokens.sampled(rng)
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


class ChatHistory:
    """One session's side of the conversation.

    A reply that was cut by `max_tokens` cannot be continued, so the client does what agents do: it takes the turn back
    and says the next thing in its place. The number of chats is thus the planned one, whatever the model says.
    """

    def __init__(self, mix: Mix, plan: SessionPlan) -> None:
        self._mix = mix
        self._so_far = [_message("system", plan.system)] if plan.system else []
        self._is_answered = False

    def body(self, turn: TurnPlan, *, only_new: bool = False) -> bytes:
        """A chat request's body: everything so far, unless `only_new`, and what this turn adds."""
        before = [] if only_new and self._is_answered else self._so_far
        messages = [*before, _message("user", turn.text)]
        return msgspec.json.encode({"model": "bench", "messages": messages, **_parameters(self._mix, turn)})

    def answered(self, turn: TurnPlan, content: str) -> None:
        """Keep a turn whose reply came to its end."""
        self._so_far += [_message("user", turn.text), _message("assistant", content)]
        self._is_answered = True


class TextHistory:
    """One session's side as one growing text, for completions. A cut reply is taken back, as in `ChatHistory`."""

    def __init__(self, mix: Mix, plan: SessionPlan) -> None:
        self._mix = mix
        self._text = plan.system

    def body(self, turn: TurnPlan, *, only_new: bool = False) -> bytes:
        """A completion request's body. It has all of the text, whatever `only_new` says."""
        del only_new
        return msgspec.json.encode({"model": "bench", "prompt": self._with(turn), **_parameters(self._mix, turn)})

    def answered(self, turn: TurnPlan, content: str) -> None:
        """Keep a turn whose reply came to its end."""
        self._text = self._with(turn) + content

    def _with(self, turn: TurnPlan) -> str:
        return f"{self._text}\n\nUser: {turn.text}\nAssistant:".lstrip()


History = ChatHistory | TextHistory


def make_history(endpoint: str, mix: Mix, plan: SessionPlan) -> History:
    """The empty history of a session whose turns go to `endpoint`."""
    return TextHistory(mix, plan) if endpoint == COMPLETIONS else ChatHistory(mix, plan)


def _parameters(mix: Mix, turn: TurnPlan) -> dict[str, object]:
    parameters: dict[str, object] = {
        "max_tokens": turn.max_tokens,
        "temperature": mix.temperature,
        "seed": turn.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if mix.stop:
        parameters["stop"] = mix.stop
    return parameters


def _message(role: str, content: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"role": role, "content": content}))
