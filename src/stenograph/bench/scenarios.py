"""The loads whose figures are promised, and the promises, as data. docs/bench.md shows them as a table."""

from dataclasses import dataclass, replace

from stenograph.bench.figures import Goal
from stenograph.bench.reply_shape import ReplyShape

EARLY_TURNS = slice(5, 15)
"""Turns 6 to 15, whose median stands for turn 10: one turn of one session is nothing to build on."""
NUM_LAST_TURNS = 10
"""Of how many turns the median stands for the last one."""
DEFAULT_SHAPE = ReplyShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`sessions` at once, `turns` each. A message is `message_bytes` of text, or `message_tokens` if that is not 0.
    With `prompts`, turns are completions of so many texts, each of that size; 0 are chats.

    `two_rounds`: the load comes a second time after all was deleted, which shows whether memory is used again.
    """

    name: str
    title: str
    sessions: int
    turns: int
    message_bytes: int = 200
    message_tokens: int = 0
    prompts: int = 0
    shape: ReplyShape = DEFAULT_SHAPE
    two_rounds: bool = False
    goals: tuple[Goal, ...] = ()

    def scaled(self, scale: float) -> "Scenario":
        """The same with `scale` of its chats: fewer turns, and fewer sessions only where turns do not suffice."""
        turns = max(1, round(self.turns * scale))
        left = scale * self.turns / turns
        return replace(self, turns=turns, sessions=max(1, round(self.sessions * min(1.0, left))))


SCENARIOS = (
    Scenario(
        name="A",
        title="1.3 MiB replies that are mostly one base64 field",
        sessions=64,
        turns=5,
        shape=ReplyShape(base64_bytes=1_360_000),
        goals=(
            Goal(figure="share_of_direct", value=0.5),
            Goal(figure="cpu_ms_per_chat", value=3.0),
            Goal(figure="health_p99_ms", value=25),
            Goal(figure="health_max_ms", value=60),
        ),
    ),
    Scenario(
        name="At",
        title="1.2 MB replies that are mostly 37k logprob triples",
        sessions=64,
        turns=2,
        shape=ReplyShape(num_tokens=37_000),
        goals=(Goal(figure="cpu_ms_per_chat", value=12.0), Goal(figure="health_p99_ms", value=50)),
    ),
    Scenario(
        name="B",
        title="4 KiB replies",
        sessions=64,
        turns=20,
        goals=(
            Goal(figure="chats_per_s", value=1200),
            Goal(figure="cpu_ms_per_chat", value=0.8),
            Goal(figure="chat_p99_over_p50", value=3.0),
        ),
    ),
    Scenario(
        name="C",
        title="200 KB user messages",
        sessions=32,
        turns=4,
        message_bytes=200_000,
        goals=(
            Goal(figure="chats_per_s", value=30),
            Goal(figure="health_p99_ms", value=25),
            Goal(figure="health_max_ms", value=100),
        ),
    ),
    Scenario(
        name="D",
        title="one session of 200 turns, 2 KB messages",
        sessions=1,
        turns=200,
        message_bytes=2_000,
        goals=(Goal(figure="last_over_early_turn", value=1.3), Goal(figure="last_turn_ms", value=2.0)),
    ),
    Scenario(
        name="E",
        title="200 sessions of 50 turns, all kept, then deleted",
        sessions=200,
        turns=50,
        two_rounds=True,
        goals=(Goal(figure="kept_kib_per_turn", value=6.0), Goal(figure="given_back_share", value=0.8)),
    ),
    Scenario(
        name="L",
        title="60 requests of 300k tokens, to chat",
        sessions=60,
        turns=1,
        message_tokens=300_000,
        goals=(Goal(figure="health_p99_ms", value=10),),
    ),
    Scenario(
        name="L1",
        title="60 requests of 300k tokens, to completions",
        sessions=60,
        turns=1,
        message_tokens=300_000,
        prompts=1,
        goals=(Goal(figure="health_p99_ms", value=10),),
    ),
    Scenario(
        name="L2",
        title="60 requests of 300k tokens, to completions, as two prompts",
        sessions=60,
        turns=1,
        message_tokens=150_000,
        prompts=2,
        goals=(Goal(figure="health_p99_ms", value=10),),
    ),
)
"""Goals are those of the specification, but for `given_back_share`: it says "given back", and 0.8 is our reading."""


def scenarios_named(names: str) -> tuple[Scenario, ...]:
    """The scenarios of a comma-separated list, or all. Raises ValueError for a name that there is not."""
    if names == "all":
        return SCENARIOS
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in by_name]:
        raise ValueError(f"there is no scenario {unknown[0]!r}; there are {', '.join(by_name)}, and all")
    return tuple(by_name[name] for name in asked)
