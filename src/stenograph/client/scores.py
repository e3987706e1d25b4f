"""Scores of a session's tokens as NumPy arrays. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from stenograph.client.errors import BadPayload


class ScoreOptions(TypedDict, total=False):
    """Fields of `POST /sessions/{id}/scores`; all optional, as docs/http-api.md has them."""

    name: str
    engine: str
    policy: str
    strand: int
    prompt: str | Sequence[Mapping[str, str]]
    top_k: int
    tokens: Sequence[str]
    position: int
    question: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopScores:
    """The K likeliest ids of each of N tokens: `ids` int64 and `log_probs` float64 [N, K]."""

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionScores:
    """An annotation: `turns` float64 [N] by node id, in nats, of each turn's sampled tokens; `top` where `top_k` was
    asked for; `tokens` are log-probabilities of named tokens. `was_scored`: it was there already."""

    name: str
    digest: str
    engine: str
    policy: str | None
    weight_version: str | None
    was_scored: bool
    turns: Mapping[int, NDArray[np.float64]]
    top: Mapping[int, TopScores]
    tokens: Mapping[str, float]

    def __repr__(self) -> str:
        num = sum(map(len, self.turns.values()))
        return f"<SessionScores {self.name} by {self.engine}: {num} tokens of {len(self.turns)} turns>"


def decoded_scores(body: Mapping[str, object]) -> SessionScores:
    """The scores of an answer. Raises BadPayload."""
    try:
        rows = cast("list[dict[str, object]]", body["turns"])
        turns = {cast("int", row["node_id"]): np.array(row["log_probs"], np.float64) for row in rows}
        return SessionScores(
            name=str(body["name"]),
            digest=str(body["digest"]),
            engine=str(body["engine"]),
            policy=cast("str | None", body["policy"]),
            weight_version=cast("str | None", body["weight_version"]),
            was_scored=bool(body["was_scored"]),
            turns=turns,
            top={
                cast("int", row["node_id"]): TopScores(
                    ids=np.array(row["top_ids"], np.int64).reshape(len(turns[cast("int", row["node_id"])]), -1),
                    log_probs=np.array(row["top_log_probs"], np.float64).reshape(
                        len(turns[cast("int", row["node_id"])]), -1
                    ),
                )
                for row in rows
                if "top_ids" in row
            },
            tokens=cast("dict[str, float]", body["tokens"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadPayload(f"an answer has no scores: {error!r}") from error
