"""The loads whose figures are promised, and the promises, as data. docs/bench.md shows them as a table."""

from dataclasses import dataclass, replace

from benchmarks.kit.figures import NO_WORSE, Goal
from benchmarks.kit.reply_shape import ReplyShape

EARLY_TURNS = slice(5, 15)
"""Turns 6 to 15, whose median stands for turn 10: one turn of one session is nothing to build on."""
NUM_LAST_TURNS = 10
"""The median of so many turns stands for the last one."""
DEFAULT_SHAPE = ReplyShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`sessions` at once, `turns` each. A message is `message_bytes` of text, or `message_tokens` if that is not 0.
    With `prompts`, turns are completions of so many texts, each of that size; 0 are chats. With `guided_tokens`, they
    are streamed chats without a session, held to a JSON Schema, of so many tokens, by the embedded engine and not a
    stand-in.

    `beside_idle`: `/health` is measured without a load too, before it. `two_rounds`: the load comes a second time after
    all was deleted, which shows whether memory is used again. `idle_sessions` were opened before the load and had one
    turn each; the same load is measured without them too.

    `goals` hold for every run. `before_goals` are ratios to the same figure of an older server, and hold for a run that
    measures one (`--before`).
    """

    name: str
    title: str
    sessions: int
    turns: int
    message_bytes: int = 200
    message_tokens: int = 0
    prompts: int = 0
    shape: ReplyShape = DEFAULT_SHAPE
    guided_tokens: int = 0
    beside_idle: bool = False
    two_rounds: bool = False
    idle_sessions: int = 0
    goals: tuple[Goal, ...] = ()
    before_goals: tuple[Goal, ...] = ()

    def scaled(self, scale: float) -> "Scenario":
        """The same with `scale` of its chats: fewer turns, and fewer sessions only where turns do not suffice."""
        turns = max(1, round(self.turns * scale))
        left = scale * self.turns / turns
        idle_sessions = max(1, round(self.idle_sessions * scale)) if self.idle_sessions else 0
        sessions = max(1, round(self.sessions * min(1.0, left)))
        return replace(self, turns=turns, sessions=sessions, idle_sessions=idle_sessions)


def _goals(**values: float) -> tuple[Goal, ...]:
    return tuple(Goal(figure=figure, value=value) for figure, value in values.items())


def _before_goals(**ratios: float) -> tuple[Goal, ...]:
    """Ratios to reach; `/health` is never to get worse."""
    return _goals(**ratios, health_p99_ms=NO_WORSE)


_300K_TOKENS = Scenario(
    name="L",
    title="60 requests of 300k tokens, to chat",
    sessions=60,
    turns=1,
    message_tokens=300_000,
    beside_idle=True,
    goals=_goals(health_p99_ms=5),
    before_goals=_before_goals(),
)
_SMALL_REPLIES = Scenario(
    name="B", title="4 KiB replies", sessions=64, turns=20, before_goals=_before_goals(cpu_ms_per_chat=0.53)
)


SCENARIOS = (
    Scenario(
        name="A",
        title="1.3 MiB replies that are mostly one base64 field",
        sessions=64,
        turns=5,
        shape=ReplyShape(base64_bytes=1_360_000),
        before_goals=_before_goals(cpu_ms_per_chat=0.6),
    ),
    Scenario(
        name="At",
        title="1.2 MB replies that are mostly 37k logprob triples",
        sessions=64,
        turns=2,
        shape=ReplyShape(num_tokens=37_000),
        before_goals=_before_goals(cpu_ms_per_chat=0.8),
    ),
    _SMALL_REPLIES,
    Scenario(
        name="C",
        title="200 KB user messages",
        sessions=32,
        turns=4,
        message_bytes=200_000,
        before_goals=_before_goals(chats_per_s=NO_WORSE, cpu_ms_per_chat=NO_WORSE),
    ),
    Scenario(
        name="D",
        title="one session of 200 turns, 2 KB messages",
        sessions=1,
        turns=200,
        message_bytes=2_000,
        before_goals=_before_goals(early_turn_ms=0.57, last_turn_ms=0.5),
    ),
    Scenario(
        name="E",
        title="200 sessions of 50 turns, all kept, then deleted",
        sessions=200,
        turns=50,
        two_rounds=True,
        before_goals=_before_goals(kept_kib_per_turn=NO_WORSE, given_back_share=NO_WORSE),
    ),
    _300K_TOKENS,
    replace(_300K_TOKENS, name="L1", title="60 requests of 300k tokens, to completions", prompts=1),
    replace(
        _300K_TOKENS,
        name="L2",
        title="60 requests of 300k tokens, to completions, as two prompts",
        message_tokens=150_000,
        prompts=2,
    ),
    Scenario(
        name="G",
        title="64 guided streams on the embedded engine",
        sessions=64,
        turns=1,
        guided_tokens=32,
        beside_idle=True,
        goals=_goals(health_p99_over_idle=1.5),
        before_goals=_before_goals(),
    ),
    replace(
        _SMALL_REPLIES,
        name="W",
        title="4 KiB replies beside 2,000 idle sessions",
        idle_sessions=2_000,
        goals=_goals(cpu_over_alone=1.03),
        before_goals=_before_goals(),
    ),
)
"""The goals are those of the specification, section 14; where it has a time and a ratio, the ratio, which holds on any
machine. W's idle sessions are scaled with `--scale`; its title says how many a whole load has."""


def scenarios_named(names: str) -> tuple[Scenario, ...]:
    """The scenarios of a comma-separated list, or all. Raises ValueError for a name that there is not."""
    if names == "all":
        return SCENARIOS
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in by_name]:
        raise ValueError(f"there is no scenario {unknown[0]!r}; there are {', '.join(by_name)}, and all")
    return tuple(by_name[name] for name in asked)
