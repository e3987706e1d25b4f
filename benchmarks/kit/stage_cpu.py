"""A server's CPU by the stages of a turn, from the stacks that the sampler saw. Pure.

Knows the functions in which a stage begins. A stack is that of the innermost of them, so that what a stage calls is its
own, however deep. What no stage called is the rest: the event loop, and `/health`, which the probe asks for.
"""

from collections import defaultdict
from collections.abc import Mapping

_TURN_ROUTE = "stenograph.http.turn_route.TurnRoute"
_MANAGER = "stenograph.session.manager.SessionManager"
_TURN = "stenograph.session.turn"
_REQUEST = "stenograph.session.request"

BEGINS: Mapping[str, str] = {
    "stenograph.http.connection": "receive",
    "stenograph.http.wire.read_body": "receive",
    "stenograph.http.auth": "admit",
    f"{_TURN_ROUTE}._admit": "admit",
    f"{_MANAGER}.settle": "admit",
    f"{_MANAGER}.admit": "admit",
    "stenograph.dialects.openai.dialect.ChatDialect.decode": "decode",
    f"{_MANAGER}.begin": "decode",
    f"{_TURN_ROUTE}._decode_large": "decode",
    f"{_TURN}.TurnRun.open": "render",
    f"{_REQUEST}.RequestRun._grant": "render",
    "aiohttp": "engine",
    "stenograph.engine.fleet.fleet": "engine",
    "stenograph.engine.http.engine": "engine",
    "stenograph.engine.embedded": "engine",
    "stenograph.engine.http.connections": "engine",
    "stenograph.engine.http.transport": "engine",
    f"{_TURN}.TurnRun.sample": "engine",
    "stenograph.engine.http.engine.HttpEngine._whole": "validate",
    "stenograph.engine.validate": "validate",
    f"{_TURN}.TurnRun._read": "validate",
    f"{_REQUEST}.RequestRun._commit": "commit",
    f"{_MANAGER}._ended": "commit",
    f"{_TURN_ROUTE}._whole": "reply",
    f"{_TURN_ROUTE}._stream": "reply",
    "(other threads)": "workers",
}
"""Functions, classes and modules with all that is in them, and the stage that begins there.

`engine` is sending the ids and reading the reply, which as stages are prefill and decode_tokens; `workers` is what runs
on threads, most of it tokenization (render)."""

REST = "rest"
STAGES = (*dict.fromkeys(BEGINS.values()), REST)


def figure_of(stage: str) -> str:
    """The figure's name."""
    return f"cpu_{stage}_ms"


def stage_of(stack: tuple[str, ...]) -> str:
    """The stage that a stack is of, outermost function first."""
    for function in reversed(stack):
        name = function
        while name:
            if name in BEGINS:
                return BEGINS[name]
            name = name.rpartition(".")[0]
    return REST


def stage_cpu(by_stack_s: Mapping[tuple[str, ...], float], *, num_chats: int) -> dict[str, float]:
    """CPU of a chat in milliseconds, by the name of the figure; every stage has one."""
    spent_s: defaultdict[str, float] = defaultdict(float)
    for stack, seconds in by_stack_s.items():
        spent_s[stage_of(stack)] += seconds
    return {figure_of(stage): 1e3 * spent_s[stage] / num_chats for stage in STAGES}
