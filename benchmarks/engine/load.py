"""The measurements of `stenograph bench engine`: a batch that decodes, prompts that are read, a session that goes on.

Owns what is asked of a target and when its clocks are read. Knows no figure, no scenario's place in a run, no engine.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.engine.target import DrawnReply, MeasuredEngine, OnSampled, TargetFailed
from benchmarks.engine.window import Instant, WholeBatch, Window
from stenograph.core.types import token_ids

LIMIT_S = 600.0
"""The limit of a request."""

Note = Callable[[str], None]
"""Called with how far a measurement is, often."""


class TooShort(TargetFailed):
    """A request had all its tokens before the last of its batch had begun, or too soon after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt, until its first token."""

    num_prompt: int
    num_cached: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """A turn of a session: its first token, and all of it; `drawn` [reply tokens] is what was drawn."""

    num_prompt: int
    num_cached: int
    ttft_s: float
    cpu_s: float
    wall_s: float
    drawn: tuple[int, ...]


async def decode(target: MeasuredEngine, prompts: "Sequence[array[int]]", num_tokens: int, note: Note) -> Window:
    """All prompts at once, each with so many tokens.

    Raises TargetFailed, also where one failed of many: what decoded was no such batch.
    """
    batch = WholeBatch(num_requests=len(prompts), num_tokens=num_tokens, now=target.now)

    def watch(number: int) -> OnSampled:
        def drew(num_new: int) -> None:
            batch.drew(number, num_new)
            note(f"{batch.num_drawn} of {len(prompts) * num_tokens} tokens")

        return drew

    try:
        async with asyncio.TaskGroup() as tasks:
            for number, ids in enumerate(prompts):
                tasks.create_task(_asked(target, ids, num_tokens, watch(number)))
    except* TargetFailed as group:
        raise TargetFailed(str(_first_of(group))) from group
    if (window := batch.window()) is None:
        raise TooShort(
            f"{target.name}: {num_tokens} tokens are too few for a batch of {len(prompts)}: a reply was whole before"
            " all had begun; give more --max-tokens"
        )
    return window


async def prefill(target: MeasuredEngine, prompts: "Sequence[array[int]]", note: Note) -> list[Prefilled]:
    """Each prompt after the other, for one token. Raises TargetFailed."""
    heard: list[Prefilled] = []
    for number, ids in enumerate(prompts, 1):
        note(f"prompt {number} of {len(prompts)}")
        begin, first, reply = await _until_first(target, ids, 1)
        heard.append(
            Prefilled(
                num_prompt=len(ids),
                num_cached=reply.num_cached,
                cpu_s=first.cpu_s - begin.cpu_s,
                wall_s=first.wall_s - begin.wall_s,
            )
        )
    return heard


async def session(
    target: MeasuredEngine, new_ids: "Sequence[array[int]]", reply_tokens: int, note: Note
) -> list[SessionTurn]:
    """A session turn by turn: each prompt is every id so far and `new_ids` of its turn. Raises TargetFailed."""
    line, turns = token_ids(), list[SessionTurn]()
    for number, ids in enumerate(new_ids, 1):
        note(f"turn {number} of {len(new_ids)}")
        line = line + ids
        begin, first, reply = await _until_first(target, line, reply_tokens)
        end = target.now()
        if len(reply.ids) != reply_tokens:
            raise TargetFailed(f"{target.name}: told {len(reply.ids)} ids of {reply_tokens}: no session can go on so")
        turns.append(
            SessionTurn(
                num_prompt=len(line),
                num_cached=reply.num_cached,
                ttft_s=first.wall_s - begin.wall_s,
                cpu_s=end.cpu_s - begin.cpu_s,
                wall_s=end.wall_s - begin.wall_s,
                drawn=reply.ids,
            )
        )
        line = line + token_ids(reply.ids)
    return turns


async def _until_first(
    target: MeasuredEngine, ids: "array[int]", num_tokens: int
) -> tuple[Instant, Instant, DrawnReply]:
    """The instants before a request and at its first token, and its whole reply."""
    instants = [target.now()]

    def drew(_: int) -> None:
        if len(instants) == 1:
            instants.append(target.now())

    reply = await _asked(target, ids, num_tokens, drew)
    return instants[0], instants[1], reply


async def _asked(target: MeasuredEngine, ids: "array[int]", num_tokens: int, on_sampled: OnSampled) -> DrawnReply:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await target.ask(ids, num_tokens, on_sampled)
    except TimeoutError as error:
        raise TargetFailed(f"{target.name}: no whole reply within {LIMIT_S:g} s") from error


def _first_of(group: BaseExceptionGroup[TargetFailed]) -> BaseException:
    """The first failure; the others are of the same batch."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
