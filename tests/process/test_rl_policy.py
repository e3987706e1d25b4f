"""The step of `scripts/rl` is the clipped policy gradient that it says, whatever batches it is computed in."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if "TEST_TRAINERS" not in os.environ:  # scripts/test-trainers has it
    pytest.importorskip("torch", reason="torch is an extra; scripts/test-trainers runs this")
    pytest.importorskip("transformers")

RL = Path(__file__).parents[2] / "examples" / "rl"

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # of transformers' own imports


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The example's modules, which import each other by their bare names."""
    sys.path.insert(0, str(RL))
    before = set(sys.modules)
    try:
        names = ("torch", "transformers", "policy", "drift")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(RL))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(RL)):
                del sys.modules[name]


def tiny(parts: SimpleNamespace) -> Any:
    parts.torch.manual_seed(0)
    config = parts.transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return parts.transformers.LlamaForCausalLM(config).eval()


def rows_of(parts: SimpleNamespace, chance: np.random.Generator, advantages: list[float], shared: int = 0) -> list[Any]:
    """Rows of different lengths, whose log-probabilities are about those of a flat policy, here and there unknown; the
    first tokens are `shared`, and the mask begins after the third or, in places, just after these."""
    begin = chance.integers(0, 64, shared)
    made = []
    for _ in advantages:
        length = shared + int(chance.integers(5, 40))
        mask = np.arange(length) >= shared + int(chance.integers(1, 4))
        mask[shared + 4] = False
        nats = np.where(mask, -np.log(64) + chance.normal(0, 0.3, length), 0.0)
        nats[-1] = np.nan
        tokens = np.concatenate([begin, chance.integers(0, 64, length - shared)])
        made.append(parts.drift.TrainedRow(tokens, mask, nats))
    return made


def plain_loss(
    parts: SimpleNamespace, model: Any, rows: list[Any], advantages: list[float], before: Any = None, **said: Any
) -> Any:
    """A row after the other, a token after the other; `before` is the model before the step, where that is another."""
    torch = parts.torch
    parts_of_loss, num_tokens = [], 0
    for row, advantage in zip(rows, advantages, strict=True):
        ids, temperature = torch.from_numpy(row.tokens)[None], said.get("temperature", 1.0)
        nats = (model(ids).logits[0] / temperature).log_softmax(-1)
        earlier = ((before or model)(ids).logits[0] / temperature).log_softmax(-1).detach()
        for at in np.flatnonzero(row.mask):
            here, own = nats[at - 1, row.tokens[at]], earlier[at - 1, row.tokens[at]]
            recorded = own if np.isnan(row.nats[at]) else torch.tensor(row.nats[at]).float()
            ratio = (here - (own if said.get("old") == "recomputed" else recorded)).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0 and "dual_clip" in said:
                gain = torch.maximum(gain, torch.tensor(said["dual_clip"] * advantage))
            if "truncate_ratios" in said:
                gain = gain * torch.minimum((own - recorded).exp(), torch.tensor(said["truncate_ratios"]))
            parts_of_loss.append(-gain)
            num_tokens += 1
    return torch.stack(parts_of_loss).sum() / num_tokens


@pytest.mark.parametrize("shared", [0, 1, 20])
@pytest.mark.parametrize(
    "advantages", [[1.0, -1.0, 0.0, 0.5, -0.5, 0.0], [0.3] * 11], ids=["some without a gradient", "several batches"]
)
def test_a_step_is_the_clipped_policy_gradient(
    parts: SimpleNamespace, advantages: list[float], shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.policy, "BATCH_TOKENS", 100)  # two to four rows
    rows = rows_of(parts, np.random.default_rng(7), advantages, shared)
    assert max(0, shared - 1) <= parts.policy.shared_tokens(rows) <= shared + 2
    ours, plain = tiny(parts), tiny(parts)
    policy = parts.policy.Policy(ours, lr=1e-2)
    found = policy.step(rows, advantages)
    assert found.num_tokens == sum(int(row.mask[1:].sum()) for row in rows)
    optimizer = parts.torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    plain_loss(parts, plain, rows, advantages).backward()
    norm = parts.torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    assert found.gradient_norm == pytest.approx(float(norm), rel=1e-3)
    optimizer.step()
    for (name, mine), its in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert parts.torch.allclose(mine.grad, its.grad, atol=1e-6), name


OBJECTIVES: dict[str, dict[str, Any]] = {
    "dual clip": {"dual_clip": 1.1},
    "recomputed": {"old": "recomputed"},
    "truncated importance sampling": {"old": "recomputed", "truncate_ratios": 1.05},
    "temperature": {"temperature": 1.3},
}


@pytest.mark.parametrize("said", list(OBJECTIVES.values()), ids=list(OBJECTIVES))
@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_step_maximizes_what_its_options_say(
    parts: SimpleNamespace, said: dict[str, Any], num_updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update is over its part of the rows, with the log-probabilities from before the first."""
    monkeypatch.setattr(parts.policy, "BATCH_TOKENS", 100)
    advantages = [1.0, -1.0, 0.0, 0.5, -2.0, 0.3]
    rows = rows_of(parts, np.random.default_rng(7), advantages)
    ours, plain, before = (tiny(parts) for _ in range(3))
    objective = parts.policy.Objective(num_updates=num_updates, **said)
    found = parts.policy.Policy(ours, lr=1e-2, objective=objective).step(rows, advantages)
    optimizer = parts.torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for part in range(num_updates):
        optimizer.zero_grad()
        plain_loss(parts, plain, rows[part::num_updates], advantages[part::num_updates], before, **said).backward()
        optimizer.step()
    for (name, mine), its in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert parts.torch.allclose(mine.grad, its.grad, atol=1e-6), name
    plainly = parts.policy.Policy(before, lr=1e-2, objective=objective).look(rows)
    assert found.max_distance == pytest.approx(plainly.max_distance, rel=1e-4)
    assert found.distance_counts == plainly.distance_counts
    assert sum(found.distance_counts) == found.num_tokens


def test_a_gradient_is_clipped_to_its_norm(parts: SimpleNamespace) -> None:
    advantages = [1.0, -1.0, 0.5]
    rows = rows_of(parts, np.random.default_rng(7), advantages)
    free, bound = tiny(parts), tiny(parts)
    found = parts.policy.Policy(free, lr=1e-2).step(rows, advantages)
    most = found.gradient_norm / 4
    objective = parts.policy.Objective(max_grad_norm=most)
    assert parts.policy.Policy(bound, lr=1e-2, objective=objective).step(rows, advantages) == found
    for mine, its in zip(bound.parameters(), free.parameters(), strict=True):
        assert parts.torch.allclose(mine.grad, its.grad / 4, atol=1e-6)


def test_the_engine_s_copy_is_rounded_and_the_trainer_s_is_not(parts: SimpleNamespace, tmp_path: Path) -> None:
    model = tiny(parts)
    whole = {name: one.detach().clone() for name, one in model.named_parameters()}
    parts.policy.Policy(model, lr=1e-2).save(tmp_path / "half", parts.torch.bfloat16)
    load = parts.transformers.LlamaForCausalLM.from_pretrained
    read = dict(load(tmp_path / "half", dtype=parts.torch.float32).named_parameters())
    assert set(read) == set(whole)
    for name, one in model.named_parameters():
        assert parts.torch.equal(one, whole[name])
        assert parts.torch.equal(read[name], whole[name].to(parts.torch.bfloat16).float())


def test_the_share_outside_is_told_of_changed_rows_alone(parts: SimpleNamespace) -> None:
    rows = rows_of(parts, np.random.default_rng(7), [0.5] * 4)
    policy = parts.policy.Policy(tiny(parts), lr=1e-2)
    assert policy.look(rows).share_outside_changed is None
    nats = np.where(rows[2].mask, -20.0, 0.0)
    rows[2] = parts.drift.TrainedRow(rows[2].tokens, rows[2].mask, nats, is_changed=True)
    found = policy.look(rows)
    assert found.share_outside_changed == 1.0
    assert 0 < found.share_outside < 1


def test_a_step_of_groups_that_are_all_alike_computes_no_gradient(parts: SimpleNamespace) -> None:
    rows = rows_of(parts, np.random.default_rng(7), [0.0] * 3)
    model = tiny(parts)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    found = parts.policy.Policy(model, lr=1e-2).step(rows, [0.0] * 3)
    assert found.gradient_norm == 0.0
    assert found.max_distance > 0.1
    assert all(parts.torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_a_policy_goes_on_from_its_state(parts: SimpleNamespace, tmp_path: Path) -> None:
    """With its optimizer: the next step is the same as without an interruption."""
    chance = np.random.default_rng(7)
    advantages = [1.0, -1.0, 0.5]
    first, second = (rows_of(parts, chance, advantages) for _ in range(2))
    whole = parts.policy.Policy(tiny(parts), lr=1e-2)
    whole.step(first, advantages)
    parts.torch.save(whole.state(), tmp_path / "state")
    other = parts.policy.Policy(tiny(parts), lr=1e-2)
    other.restore(parts.torch.load(tmp_path / "state", weights_only=True))
    assert whole.step(second, advantages) == other.step(second, advantages)
    for mine, its in zip(whole.model.parameters(), other.model.parameters(), strict=True):
        assert parts.torch.equal(mine, its)
