"""The tasks of `scripts/rl` reward what they say, and its faults change what they say and nothing else."""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage

from stenograph.client import DecodedSample
from stenograph.text.renderer import Renderer

RL = Path(__file__).parents[3] / "examples" / "rl"
TASKS = ("price", "errand")


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The example's modules, which import each other by their bare names."""
    sys.path.insert(0, str(RL))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in (*TASKS, "drift", "items")})
    finally:
        sys.path.remove(str(RL))
        for name in [
            name for name, one in sys.modules.items() if str(getattr(one, "__file__", "")).startswith(str(RL))
        ]:
            del sys.modules[name]


def drawn(parts: SimpleNamespace, task: str) -> Any:
    return getattr(parts, task).TASK.drawn("apple", random.Random(3))


class Scripted:
    """A model that says what it is given, and the conversation that it was shown last."""

    def __init__(self, replies: list[Any]) -> None:
        self.replies = iter(replies)
        self.shown: list[Any] = []

    async def __call__(self, messages: list[Any]) -> Any:
        self.shown = list(messages)
        return ChatCompletionMessage.model_validate(next(self.replies))


@pytest.mark.parametrize("task", TASKS)
async def test_a_demonstration_is_a_full_success(parts: SimpleNamespace, task: str) -> None:
    """And the tools answer as it says."""
    episode = drawn(parts, task)
    told = episode.demonstration()
    model = Scripted([one for one in told if one["role"] == "assistant"])
    assert await episode.played(model) == 1.0
    plain = [{name: one[name] for name in ("role", "content") if name in one} for one in told[:-1]]
    assert [{name: one[name] for name in ("role", "content") if name in one} for one in model.shown] == plain


@pytest.mark.parametrize("task", TASKS)
async def test_each_part_of_a_task_has_its_part_of_the_reward(parts: SimpleNamespace, task: str) -> None:
    """Each further right step is worth more; a wrong number at the end is no success."""
    episode = drawn(parts, task)
    right = [one for one in episode.demonstration() if one["role"] == "assistant"]
    wrong = {"role": "assistant", "content": "It is 7."}
    rewards = [await episode.played(Scripted([*right[:num], wrong, wrong])) for num in range(len(right))]
    assert rewards[0] == 0.0
    assert all(less < more for less, more in pairwise([*rewards, 1.0]))


async def test_a_wrong_call_of_an_errand_may_be_made_again(parts: SimpleNamespace) -> None:
    episode = drawn(parts, "errand")
    right = [one for one in episode.demonstration() if one["role"] == "assistant"]
    called = {"name": "read", "arguments": json.dumps({"shelf": episode.shelf + 1})}
    wrong = {"role": "assistant", "tool_calls": [{"id": "w", "type": "function", "function": called}]}
    assert await episode.played(Scripted([right[0], wrong, *right[1:]])) == 1.0
    # The last result is not there without the ones before.
    assert await episode.played(Scripted([right[2], right[2], *right[3:]])) == 0.0
    assert await episode.played(Scripted([right[0], *[wrong] * 4])) == 0.2


def test_no_item_is_in_two_of_the_three_sets(parts: SimpleNamespace) -> None:
    sets = [parts.items.DEMONSTRATED, parts.items.TRAINED, parts.items.HELD_OUT]
    assert sorted(item for one in sets for item in one) == sorted(parts.items.ITEMS)
    assert len(parts.items.ITEMS) == len(set(parts.items.ITEMS))


def sample_of(renderer: Renderer) -> DecodedSample:
    """Two replies between a prompt, a tool's result and an end; the first spells its call letter by letter."""
    tokenizer = renderer.tokenizer
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "pen"}}\n</tool_call>'
    parts = [
        (list(tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")), 0),
        ([one for letter in call for one in tokenizer.encode(letter)] + list(tokenizer.encode("<|im_end|>")), 1),
        (list(tokenizer.encode("\n<|im_start|>user\n512<|im_end|>\n<|im_start|>assistant\n")), 0),
        (list(tokenizer.encode("hello<|im_end|>")), 1),
    ]
    tokens = np.array([one for ids, _ in parts for one in ids], np.int64)
    mask = np.array([trained for ids, trained in parts for _ in ids], np.uint8)[len(parts[0][0]) :]
    nats = np.where(mask == 1, -np.arange(1, len(mask) + 1) / 10, 0.0)
    return DecodedSample(tokens=tokens, loss_mask=mask, log_probs=nats, status="completed", metadata={})


@pytest.mark.parametrize("kind", ["none", "retokenize", "mask", "retokenize-recorded", "compact-json", "shift"])
def test_a_fault_changes_what_it_says(parts: SimpleNamespace, renderer: Renderer, kind: str) -> None:
    drift, decode = parts.drift, renderer.tokenizer.decode
    sample = sample_of(renderer)
    exact = drift.TrainedRow.exact(sample)
    row = drift.with_drift(kind, sample, renderer, None, parts.price.TASK.tools)
    assert len(row.tokens) == len(row.mask) == len(row.nats)
    texts = [[decode(one.tokens[a:b].tolist()) for a, b in drift.runs(one.mask)] for one in (exact, row)]
    assert not np.isnan(row.nats[~row.mask]).any()
    if kind in ("none", "mask", "shift"):
        assert row.has_ids_of(exact)
    elif kind == "compact-json":
        assert texts[1] == [texts[0][0].replace(": ", ":").replace(", ", ","), texts[0][1]]
    else:
        assert texts[1] == texts[0]
        assert len(row.tokens) < len(exact.tokens)  # the call in fewer tokens
    if kind == "mask":
        assert row.mask.sum() == len(sample.loss_mask)
        assert (row.nats[exact.mask] == exact.nats[exact.mask]).all()
    if kind == "retokenize":
        assert np.isnan(row.nats[row.mask]).all()
    if kind in ("retokenize-recorded", "compact-json"):
        start, _ = drift.runs(exact.mask)[0]
        assert row.nats[start : start + 3].tolist() == exact.nats[start : start + 3].tolist()
    if kind == "shift":
        assert row.nats[exact.mask].tolist() != exact.nats[exact.mask].tolist()
    assert drift.changed_turns(exact, renderer) == (1, 2)


def test_a_demonstration_is_rendered_with_its_replies_trained(parts: SimpleNamespace, renderer: Renderer) -> None:
    """To the letter; TRL gets a row with a fault as a sample of the same tokens."""
    drift = parts.drift
    episode = drawn(parts, "errand")
    ids = drift.rendered(renderer, episode.demonstration(), parts.errand.TASK.tools)
    mask = drift.replies(renderer, ids)
    said = [renderer.tokenizer.decode(ids[a:b].tolist()) for a, b in drift.runs(mask)]
    assert len(said) == 4
    assert mask[-1]  # as in a sample, nothing comes after the reply
    assert said[-1] == f"The receipt's number is {episode.receipt}.<|im_end|>"
    assert json.dumps({"name": "read", "arguments": {"shelf": episode.shelf}}) in said[1]
    row = drift.TrainedRow(ids, mask, np.where(mask, np.nan, 0.0))
    sample = row.as_sample(sample_of(renderer))
    again = drift.TrainedRow.exact(sample)
    assert again.has_ids_of(row)
    assert (again.mask == mask).all()
