"""A plain model, and rollouts of which every sampled token has the log-probability that this model gives it."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from stenograph.client import DecodedSample, Rollout, RolloutGroup, decoded
from stenograph.core.types import FinishReason, LogprobsKind, SamplingParams
from stenograph.export.safetensors import to_safetensors
from stenograph.export.samples import make_samples
from tests.pure.export.conftest import Session

IDS = st.integers(0, 9)
ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])


def log_prob(before: list[int], token: int) -> float:
    """The plain model: ln p(token | before), any number at or below zero that all tokens before decide."""
    return -(zlib.crc32(np.array([*before, token], np.int64).tobytes()) % 10_000) / 1000


def teacher(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """A teacher-forced pass, aligned as logits are: index t is about token t + 1."""
    ids: list[int] = tokens.tolist()
    return np.array([log_prob(ids[: t + 1], ids[t + 1]) for t in range(len(ids) - 1)])


@dataclass
class Grown:
    """A session that grows by turns of the plain model."""

    session: Session = field(default_factory=Session)
    lines: dict[int | None, list[int]] = field(default_factory=lambda: {None: []})
    ended: dict[int | None, int] = field(default_factory=lambda: {None: 0})

    def turn(
        self,
        parent: Any,
        prompt: list[int],
        drawn: list[int],
        *,
        trimmed: int = 0,
        reason: FinishReason = FinishReason.STOP,
        temperature: float = 1.0,
        version: str | None = "3",
    ) -> Any:
        """A turn after `parent`; `trimmed` of the parent's sampled tokens are replaced by the prompt."""
        before = self.lines[None if parent is None else parent.id]
        before = before[: len(before) - trimmed] + prompt
        pairs: list[tuple[int, float]] = []
        for token in drawn:
            pairs.append((token, log_prob(before, token)))
            before = [*before, token]
        node = self.session.add(
            parent,
            prompt,
            pairs,
            trimmed=trimmed,
            reason=reason,
            versions=[] if version is None or not drawn else [(version, 0, len(drawn))],
            params=SamplingParams(temperature=temperature),
            kind=LogprobsKind.TEMPERED,
        )
        self.lines[node.id] = before
        return node

    def samples(self, max_seq_len: int | None = None) -> tuple[DecodedSample, ...]:
        """Its samples, as the client decodes them from the server's payload."""
        made = make_samples(self.session.nodes, decode=lambda ids: "…", max_trim_tokens=1, max_seq_len=max_seq_len)
        payload = to_safetensors(made.samples, session_metadata={}, empty_reason=made.empty_reason)
        return decoded(b"".join(payload)).samples


@st.composite
def rollouts_samples(draw: st.DrawFn) -> tuple[DecodedSample, ...]:
    """The samples of a tree of turns: branches, cut and aborted turns, replaced openers, versions, temperatures."""
    grown = Grown()
    for _ in range(draw(st.integers(1, 5))):
        parent = draw(st.none() | st.sampled_from(grown.session.nodes)) if grown.session.nodes else None
        reason = draw(ENDS)
        drawn = draw(st.lists(IDS, min_size=0 if reason is FinishReason.ABORT else 1, max_size=4))
        can_trim = parent is not None and len(parent.turn.sampled.ids) > 0
        grown.turn(
            parent,
            draw(st.lists(IDS, min_size=1, max_size=4)),
            drawn,
            trimmed=draw(st.integers(0, 1)) if can_trim else 0,
            reason=reason,
            temperature=draw(st.sampled_from([0.5, 1.0, 1.5])),
            version=draw(st.sampled_from(["3", "4", None])),
        )
    return grown.samples(draw(st.none() | st.integers(2, 12)))


def group_of(samples: tuple[DecodedSample, ...], *rewards: float) -> RolloutGroup[str]:
    """A group whose rollouts all have these samples, one rollout for each reward."""
    made = partial(
        Rollout, task="t", group="g", session_id="s", end="ok", error=None, samples=samples, seconds=1.0, num_tries=1
    )
    rollouts = tuple(made(reward=reward) for reward in rewards)
    return RolloutGroup(index=5, name="g", task="t", is_whole=True, rollouts=rollouts, others=())


@pytest.fixture(scope="session")
def grown() -> Callable[[], Grown]:
    """Makes an empty session of the plain model."""
    return Grown
