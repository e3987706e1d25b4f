"""A committed reply kept to be asked for again, as values: no task, no buffer, nothing running.

Owns how such a reply is shown once more, whole or streamed. The session decides when and to which request.
"""

import asyncio
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from stenograph.core.chat import (
    ChatReply,
    Remaining,
    ReplyOptions,
    Spelling,
    StreamPiece,
    TurnRequest,
)
from stenograph.core.messages import whole_delta
from stenograph.core.stages import Stage
from stenograph.core.types import Chunk, Prompt, RequestId, Usage
from stenograph.engine.base import Capabilities
from stenograph.session.reply_buffer import parts_of
from stenograph.session.retries import RequestIdentity
from stenograph.session.turn import TurnOutcome
from stenograph.session.watch import Delivery
from stenograph.trajectory.commits import RequestMark
from stenograph.trajectory.turn import Node, line_ids

_CHUNKS_AT_ONCE = 1024
"""Chunks made before the loop goes on: 3 ms."""


class KeptReply(Struct, frozen=True, kw_only=True):
    """The outcome of a request with committed turns, and all that is needed to show it again.

    `budget` is what was left before anything was sampled; a streamed reply begins with it. `created` is when it was
    asked for, in whole seconds of the epoch.
    """

    request_id: RequestId
    identity: RequestIdentity | RequestMark
    options: ReplyOptions
    spelling: Spelling
    outcome: TurnOutcome
    budget: Remaining
    created: int
    delivery: Delivery

    def watch(self) -> "KeptWatch":
        """One more client of this reply."""
        return KeptWatch(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReply:
    """A reply committed before this process began, as its record: it is written anew for a retry.

    `nodes` are its turns, the first in the strand of the number `strand`. The form of the reply is up to the retry's
    request.
    """

    request_id: RequestId
    identity: RequestMark
    reply_id: str
    nodes: tuple[Node, ...]
    strand: int | None
    delivery: Delivery

    def watch(self, request: TurnRequest, capabilities: Capabilities) -> "KeptWatch":
        """A client of this reply, in the form wanted by its repeated request."""
        limit, session = capabilities.max_context_tokens, self.identity.budget.session_tokens
        replies = tuple(
            replace(
                held_reply(node, capabilities.model),
                stages_s=node.turn.stages.durations_s(),
                fills_context=limit is not None and node.num_effective >= limit,
            )
            for node in self.nodes
        )
        longest = max(node.num_effective for node in self.nodes)
        turns = [node.turn for node in self.nodes]
        num_added = sum(len(turn.sampled.ids) + turn.num_effective - turn.num_tokens for turn in turns)
        outcome = TurnOutcome(
            reply_id=self.reply_id,
            replies=replies,
            committed=True,
            remaining=Remaining(
                context_tokens=None if limit is None else limit - longest,
                session_tokens=None if session is None else session - num_added,
            ),
            strand=self.strand,
            node=self.nodes[0].id,
            rewrites=self.nodes[0].turn.rewrites,
        )
        kept = KeptReply(
            request_id=self.request_id,
            identity=self.identity,
            options=request.reply,
            spelling=request.spelling,
            outcome=outcome,
            budget=self.identity.budget,
            created=int(self.nodes[0].turn.requested_at),
            delivery=self.delivery,
        )
        return kept.watch()


class KeptWatch:
    """One client's view of a kept reply: all of it at once. A `Watch`."""

    def __init__(self, kept: KeptReply) -> None:
        self.kept, self._is_read = kept, False
        self.request_id, self.options, self.spelling = kept.request_id, kept.options, kept.spelling
        self.created, self.remaining = kept.created, kept.budget
        self.params, self.reply_id = kept.outcome.reply.params, kept.outcome.reply_id

    def __repr__(self) -> str:
        return f"<KeptWatch of {self.request_id}>"

    @property
    def prompts(self) -> "list[array[int]]":
        return [reply.prompt.ids for reply in self.kept.outcome.replies]

    async def take(self) -> list[StreamPiece] | None:
        """The whole replies the first time, None after that, or where nothing was sampled."""
        if self._is_read:
            return None
        self._is_read = True
        pieces = [await _piece(reply, index) for index, reply in enumerate(self.kept.outcome.replies)]
        return [piece for piece in pieces if piece.delta or piece.chunks] or None

    def call(self) -> None:
        """Nothing ever waits."""

    async def result(self) -> TurnOutcome:
        return self.kept.outcome

    def timings_s(self) -> Mapping[Stage, float]:
        return self.kept.outcome.reply.stages_s

    def delivered(self) -> None:
        self.kept.delivery.done()

    def leave(self) -> None:
        self._is_read = True


def held_reply(node: Node, model: str) -> ChatReply:
    """The reply of a kept turn, as it was given to its client."""
    turn = node.turn
    num_prompt = node.num_tokens - len(turn.sampled.ids)
    num_expanded = node.num_effective - len(turn.sampled.ids)
    return ChatReply(
        id=turn.reply_id,
        created=int(turn.committed_at),
        model=model,
        prompt=Prompt(new_ids=line_ids(node)[:num_prompt]),
        params=turn.params,
        parsed=turn.reply,
        sampled=turn.sampled,
        usage=Usage(
            num_prompt=num_expanded,
            num_completion=len(turn.sampled.ids),
            num_cached=turn.sampled.num_cached_tokens,
            num_reasoning=turn.reply.num_reasoning_tokens,
        ),
    )


async def _piece(reply: ChatReply, index: int) -> StreamPiece:
    """A whole reply, with no more ids in a chunk than while sampling. The loop goes on between some."""
    chunks: list[Chunk] = []
    for chunk in parts_of(reply.sampled):
        chunks.append(chunk)
        if len(chunks) % _CHUNKS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return StreamPiece(delta=whole_delta(reply.parsed.message), chunks=tuple(chunks), index=index)
