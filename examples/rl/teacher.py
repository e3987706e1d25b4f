"""On-policy distillation: a teacher's log-probabilities of the student's own tokens in the place of a reward.

The teacher is what another run has trained. Once a step's rollouts have ended, its weights go into the student's own
server, which scores the recorded tokens (docs/samples.md#scores); the swap after the update brings the student's back.
A token's advantage is the teacher's log-probability less the student's: their mean is the reverse KL, below 0.
"""

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
from agent import Episode
from numpy.typing import NDArray

from stenograph.client import Client, DecodedSample, Rollout, RolloutBatch, RolloutSession
from stenograph.trainers.rows import whole

if TYPE_CHECKING:
    from stenograph.client.session import SessionFields

NAME = "teacher"
"""Of the annotation, of its weights' version, and of their folder in the run's."""


class TaughtClient(Client):
    """A client whose sessions, within `kept`, outlive their rollouts."""

    def __init__(self, *urls: str) -> None:
        super().__init__(*urls)
        self._until: AsyncExitStack | None = None
        self.open: dict[str, RolloutSession] = {}

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Delete the sessions opened meanwhile at the end."""
        try:
            async with AsyncExitStack() as self._until:
                yield
        finally:
            self._until = None
            self.open.clear()

    @asynccontextmanager
    async def session(self, **fields: "Unpack[SessionFields]") -> AsyncGenerator[RolloutSession]:
        """As a client's."""
        opened = super().session(**fields)
        if self._until is None:
            async with opened as session:
                yield session
            return
        session = await self._until.enter_async_context(opened)
        self.open[session.id] = session
        yield session


@dataclasses.dataclass(frozen=True, slots=True)
class Teacher:
    """The weights of another run's policy, in a folder that the server may read."""

    folder: Path

    @classmethod
    def of_run(cls, run: Path, weights: Path) -> "Teacher":
        """That which a run that is over has left. Raises SystemExit if it is not, or has left none."""
        left = sorted((run / "weights").glob("policy*"))  # one: a run with --stale numbers it
        if not (run / "summary.json").exists() or not left:
            raise SystemExit(f"--teacher names the folder of a run that is over; {run} has none")
        folder = weights / NAME
        shutil.copytree(left[-1], folder, dirs_exist_ok=True)
        return cls(folder)

    async def scored(self, client: TaughtClient, batch: RolloutBatch[Episode]) -> RolloutBatch[Episode]:
        """The batch of sessions that are kept, its samples with the teacher's scores."""
        await client.update_weights(str(self.folder.resolve()), version=NAME)
        groups = [
            dataclasses.replace(
                group, rollouts=tuple(await asyncio.gather(*(_taught(client, one) for one in group.rollouts)))
            )
            for group in batch.groups
        ]
        return dataclasses.replace(batch, groups=tuple(groups))


async def _taught(client: TaughtClient, rollout: Rollout[Episode]) -> Rollout[Episode]:
    if not any(sample.num_trained for sample in rollout.samples or ()):
        return rollout
    session = client.open[rollout.session_id or ""]
    await session.score(name=NAME)
    return dataclasses.replace(rollout, samples=await session.samples(scores=[NAME]))


def taught_advantages(
    batch: RolloutBatch[Episode],
) -> Iterator[tuple[Rollout[Episode], DecodedSample, NDArray[np.float64]]]:
    """Each sample with an advantage for each token [T], 0 where none is trained."""
    for rollout in (one for group in batch.groups for one in group.rollouts):
        for sample in rollout.samples or ():
            if sample.num_trained:
                yield rollout, sample, distances(sample)


def distances(sample: DecodedSample) -> NDArray[np.float64]:
    """The teacher's log-probability less the student's of each token [T], 0 where none is trained."""
    row = whole(sample)
    found = np.zeros(len(row.tokens))
    found[sample.prompt_length :] = sample.scores[NAME]
    return np.where(row.mask, found - row.log_probs, 0.0)
