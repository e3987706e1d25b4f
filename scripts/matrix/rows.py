"""The samples of a matrix of rollouts as rows of each trainer: `rows.py DIR/rollouts`.

Needs the environment of scripts/test-trainers, for the classes of TRL, verl and tinker; the others' rows are dicts. A
cell counts the rows of a harness' samples; it is wrong unless these train the tokens that the samples train.
"""

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stenograph.client.batch import Rollout, RolloutGroup
from stenograph.client.samples import DecodedSample
from stenograph.envs.folder import RolloutFolder
from stenograph.trainers import dicts, rows, tinker, trl, verl

Groups = Sequence[RolloutGroup[str]]
Masks = Iterator[int]
"""For each row, the number of its trained tokens."""


def main(out: Path) -> int:
    """Print the table; 1 where a cell has other tokens than the samples."""
    shown = [f"| harness | samples | tokens | {' | '.join(TRAINERS)} |", "|---" * (len(TRAINERS) + 3) + "|"]
    wrong = 0
    for harness, groups in groups_of(out).items():
        samples = list(samples_of(groups))
        num_tokens = sum(sample.num_trained for sample in samples)
        cells = list[str]()
        for made in TRAINERS.values():
            numbers = list(made(groups))
            wrong += sum(numbers) != num_tokens
            cells.append(f"{len(numbers):,}" if sum(numbers) == num_tokens else f"{sum(numbers):,} tokens!")
        shown.append(f"| {harness} | {len(samples):,} | {num_tokens:,} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(shown) + "\n")
    return int(wrong > 0)


def groups_of(out: Path) -> Mapping[str, Groups]:
    """By harness, the folder's groups: the rollouts of a task that ended well."""
    folder = RolloutFolder(out)
    folder.read()
    found = defaultdict[str, list[Rollout[str]]](list)
    for one in folder:
        if one.end == "ok":
            rollout = Rollout(
                task=one.task, group=one.task, session_id=one.session, end=one.end, reward=one.reward, error=None,
                samples=folder.samples(one), seconds=one.seconds, num_tries=one.num_tries,
            )  # fmt: skip
            found[one.task].append(rollout)
    made = defaultdict[str, list[RolloutGroup[str]]](list)
    for index, (task, rollouts) in enumerate(found.items()):
        group = RolloutGroup(index=index, name=task, task=task, is_whole=True, rollouts=tuple(rollouts), others=())
        made[task.rsplit("-", 2)[0]].append(group)
    return made


def number(version: str) -> int:
    """A version as a trainer wants it: the stand-in's weights never change, and have SGLang's name for such."""
    assert version == "default"
    return 0


def samples_of(groups: Groups) -> Iterator[DecodedSample]:
    """The samples with a trained token."""
    for group in groups:
        for rollout in group.rollouts:
            yield from (sample for sample in rollout.samples or () if sample.num_trained)


def of_trl(groups: Groups) -> Masks:
    """`RolloutSample`s of its asynchronous trainer."""
    worker: Any = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    return (int(sum(one.completion_mask)) for one in trl.rollout_samples(groups, worker.RolloutSample, version=number))


def of_verl(groups: Groups) -> Masks:
    """`AgentLoopOutput`s."""
    loop: Any = importlib.import_module("verl.experimental.agent_loop.agent_loop")
    for group in groups:
        for rollout in group.rollouts:
            metrics = loop.AgentLoopMetrics()
            made = verl.agent_loop_outputs(
                rollout.samples, loop.AgentLoopOutput, metrics, reward=rollout.reward, version=number
            )
            yield from (int(one.as_dict()["response_mask"].sum()) for one in made)


def of_tinker(groups: Groups) -> Masks:
    """`Datum`s, by the advantages of the groups."""
    types: Any = importlib.import_module("tinker")
    for rollout, advantage in rows.advantages(groups):
        made = tinker.datums(
            rollout.samples or (), types.Datum, types.ModelInput.from_ints, advantage=advantage, with_mask=True
        )
        yield from (int(sum(one.loss_fn_inputs["mask"].data)) for one in made)


def of_skyrl(groups: Groups) -> Masks:
    """Rows of its `GeneratorOutput`."""
    masks: Any = dicts.skyrl(groups)["loss_masks"]
    return (int(sum(mask)) for mask in masks)


def of_nemo(groups: Groups) -> Masks:
    """NeMo RL's message logs."""
    for sample in samples_of(groups):
        log: list[Any] = dicts.nemo_rl(sample)
        yield sum(len(one["token_ids"]) for one in log if one["role"] == "assistant")


def of_own(groups: Groups) -> Masks:
    """A padded batch for each rollout."""
    for group in groups:
        for rollout in group.rollouts:
            samples = [sample for sample in rollout.samples or () if sample.num_trained]
            if samples:
                batch = dicts.padded(samples, [0.0] * len(samples), pad_id=0)
                yield from (int(row.sum()) for row in batch["mask"])


def one_each(made: Callable[[DecodedSample], int]) -> Callable[[Groups], Masks]:
    """Rows by samples."""
    return lambda groups: (made(sample) for sample in samples_of(groups))


def _ranges(sample: DecodedSample) -> int:
    found: Any = dicts.openrlhf(sample, reward=0.0)["action_ranges"]
    return sum(end - start for start, end in found)


TRAINERS: Mapping[str, Callable[[Groups], Masks]] = {
    "TRL 1.16.0": of_trl,
    "verl 0.9.1": of_verl,
    "tinker 0.38.0": of_tinker,
    "SkyRL": of_skyrl,
    "AReaL": one_each(lambda sample: int(dicts.areal(sample, reward=0.0, version=number)["loss_mask"].sum())),
    "OpenRLHF": one_each(_ranges),
    "NeMo RL": of_nemo,
    "rLLM": one_each(lambda sample: sum(len(step["response_ids"]) for step in dicts.rllm(sample, version=number))),
    "own loop": of_own,
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
