"""The policy in torch: weights out of the model that is served, the cold start, a step, weights back to a folder."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agent import Episode, Task
from drift import TrainedRow, rendered, replies
from items import DEMONSTRATED
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from stenograph.model.files import load_model_files
from stenograph.text.renderer import Renderer

DEMONSTRATIONS = 8
"""Conversations of one step of the cold start."""

BATCH_TOKENS = 1024
"""Tokens that a step's forward takes at once, padding included, and what all rows begin with left out."""

CLIP = 0.2

DECADES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""In nats: the edges of a histogram of distances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an update maximizes: the clipped policy gradient of PPO, with what practice adds to it.

    `old`: whose log-probabilities the ratio is to: the engine's, `recorded`, or the trainer's before the step,
    `recomputed`. `truncate_ratios`, with the latter: truncated importance sampling, each token's gain times the
    trainer's probability before the step over the recorded one, at most this (Yao et al., 2025: Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training). `dual_clip`: the gain of a negative advantage is at least
    this often it (Ye et al., arXiv 1912.09729, eq. 5). `max_grad_norm`: the gradient is scaled down to it.
    `num_updates`: a step's rows are dealt out to so many updates, all with the log-probabilities from before the first.
    `temperature`: of the sampling, by which logits are divided.
    """

    old: str = "recorded"
    truncate_ratios: float | None = None
    dual_clip: float | None = None
    max_grad_norm: float | None = None
    num_updates: int = 1
    temperature: float = 1.0

    def gain(
        self, nats: torch.Tensor, own: torch.Tensor, recorded: torch.Tensor, advantage: torch.Tensor
    ) -> torch.Tensor:
        """Of each token [N], from log-probabilities now, the trainer's before the step, and the recorded ones, NaN
        where there are none [N each]."""
        known = torch.where(recorded.isnan(), own, recorded)
        ratio = (nats - (known if self.old == "recorded" else own)).clamp(-20, 20).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        if self.dual_clip is not None:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.dual_clip * advantage), gain)
        if self.truncate_ratios is not None:
            gain = gain * (own - known).clamp(-20, 20).exp().clamp(max=self.truncate_ratios)
        return gain


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """A step: recorded against recomputed log-probabilities before the update, over the trained tokens, in nats.

    `share_outside_changed` is over the rows whose ids a fault changed; None if there are none. `distance_counts`: how
    many tokens are as far apart as DECADES, nearer than the first, between two, beyond the last.
    """

    max_distance: float
    kl: float
    share_outside: float
    share_outside_changed: float | None
    gradient_norm: float
    num_tokens: int
    distance_counts: list[int]


def written_folder(source: Path, folder: Path) -> Any:
    """A model as a folder that both torch and the server read; returns it as torch's. A GGUF file is dequantized."""
    files = load_model_files(source)
    is_file = source.suffix == ".gguf"
    where = {"gguf_file": source.name} if is_file else {}
    model = AutoModelForCausalLM.from_pretrained(source.parent if is_file else source, dtype=torch.float32, **where)
    if is_file:  # what it came out of is not what it is written as
        weights, config = model.state_dict(), model.config
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(weights)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(files.tokenizer_json)
    tokens = {"chat_template": files.chat_template, "bos_token": files.bos_token, "eos_token": files.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return model


class Policy:
    """A model and its optimizer; single thread, float32, all weights."""

    def __init__(self, model: Any, *, lr: float, objective: Objective | None = None) -> None:
        self.model = model
        self.objective = objective or Objective()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the weights, for the engine to read, rounded to `dtype`."""
        rounded = {name: one.detach().to(dtype) for name, one in self.model.named_parameters()}  # a tied one once
        self.model.save_pretrained(folder, state_dict=None if dtype is torch.float32 else rounded)

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {"weights": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])

    def log_probs(self, beginning: "Beginning", rows: Sequence[TrainedRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each trained token the log-probability at the sampling's temperature [N], row by row; and where they are
        [B, T - 1].

        Logits are computed where a token is trained, and nowhere else: there are 49,152 a token.
        """
        longest, start = max(len(row.tokens) for row in rows), beginning.num_tokens
        ids, there, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
        for index, row in enumerate(rows):
            ids[index, : len(row.tokens)] = torch.from_numpy(np.array(row.tokens))
            there[index, : len(row.tokens)] = 1
            mask[index, : len(row.tokens)] = torch.from_numpy(row.mask.astype(np.int64))
        trained = mask[:, 1:] == 1
        rest = self.model.base_model(
            input_ids=ids[:, start:], attention_mask=there, past_key_values=beginning.repeated(len(rows))
        )
        hidden = rest.last_hidden_state[:, :-1][trained[:, start:]]
        nats = (self.model.lm_head(hidden).float() / self.objective.temperature).log_softmax(-1)
        return nats.gather(-1, ids[:, 1:][trained][:, None])[:, 0], trained

    def demonstrate(
        self, renderer: Renderer, task: Task, *, steps: int, lr: float, chance: random.Random
    ) -> Iterator[float]:
        """The cold start: a few steps on conversations as they should be, rendered by the server's own template;
        the loss of each."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        for _ in range(steps):
            episodes = [task.drawn(chance.choice(DEMONSTRATED), chance) for _ in range(DEMONSTRATIONS)]
            rows = [demonstration(renderer, task, episode) for episode in episodes]
            total, loss = sum(int(row.mask[1:].sum()) for row in rows), 0.0
            optimizer.zero_grad()
            beginning = Beginning(self.model, rows)
            for chosen in batches(rows, range(len(rows)), beginning.num_tokens):
                nats, _ = self.log_probs(beginning, [rows[index] for index in chosen])
                part = -nats.sum() / total
                part.backward()
                loss += part.item()
            beginning.backward()
            optimizer.step()
            yield loss

    def step(self, rows: Sequence[TrainedRow], advantages: Sequence[float | NDArray[np.float64]]) -> StepFigures:
        """One clipped policy-gradient step over all rows, in batches; no KL term. An advantage is a row's, or each of
        its tokens' [T].

        Rows of a group whose rewards are all alike have no gradient, and none is computed. The figures are from before
        the step; the norm is the first update's, before it is clipped.
        """
        number = self.objective.num_updates
        if number == 1:
            return figures(*self.update(rows, advantages))
        with torch.no_grad():
            beginning = Beginning(self.model, rows)
        own = self.own_log_probs(beginning, rows)
        parts = [range(part, len(rows), number) for part in range(min(number, len(rows)))]
        norms = []
        for part in parts:
            chosen, their = [rows[index] for index in part], [own[index] for index in part]
            norms.append(self.update(chosen, [advantages[index] for index in part], their)[1])
        return figures([_Distances.by_arrays(rows, own)], norms[0])

    def update(
        self,
        rows: Sequence[TrainedRow],
        advantages: Sequence[float | NDArray[np.float64]],
        own: Sequence[NDArray[np.float64]] | None = None,
    ) -> tuple[list["_Distances"], float]:
        """One update of the weights: the distances before it and the gradient's norm. `own`: the trainer's
        log-probabilities before the step; None where these are those of now, before the update."""
        total = sum(int(row.mask[1:].sum()) for row in rows)
        self.optimizer.zero_grad(set_to_none=False)  # a step without any gradient has the optimizer's momentum
        still, moving = ([n for n, a in enumerate(advantages) if bool(np.any(a)) is moves] for moves in (False, True))
        beginning = Beginning(self.model, rows)
        distances = self.distances(beginning, rows, still) if own is None else []
        for chosen in batches(rows, moving, beginning.num_tokens):
            batch = [rows[index] for index in chosen]
            nats, trained = self.log_probs(beginning, batch)
            recorded = placed([row.nats for row in batch], trained)
            before = nats.detach() if own is None else placed([own[index] for index in chosen], trained)
            spread = [np.zeros(len(rows[index].tokens)) + advantages[index] for index in chosen]
            advantage = placed(spread, trained)
            (-self.objective.gain(nats, before, recorded, advantage).sum() / total).backward()
            distances.append(_Distances.of(nats.detach(), recorded, batch, trained))
        beginning.backward()
        norm = self.gradient_norm(self.objective.max_grad_norm)
        self.optimizer.step()
        return distances, norm

    def look(self, rows: Sequence[TrainedRow]) -> StepFigures:
        """The figures of a step that another trainer takes."""
        with torch.no_grad():
            beginning = Beginning(self.model, rows)
        return figures(self.distances(beginning, rows, range(len(rows))), 0.0)

    def distances(self, beginning: "Beginning", rows: Sequence[TrainedRow], which: Sequence[int]) -> list["_Distances"]:
        """Those of some of the rows, without a gradient."""
        found = []
        for chosen in batches(rows, which, beginning.num_tokens):
            batch = [rows[index] for index in chosen]
            with torch.no_grad():
                nats, trained = self.log_probs(beginning, batch)
            found.append(_Distances.of(nats, placed([row.nats for row in batch], trained), batch, trained))
        return found

    def own_log_probs(self, beginning: "Beginning", rows: Sequence[TrainedRow]) -> list[NDArray[np.float64]]:
        """The log-probability of each row's trained tokens by these weights [T each], 0.0 elsewhere."""
        found = [np.zeros(len(row.tokens)) for row in rows]
        for chosen in batches(rows, range(len(rows)), beginning.num_tokens):
            with torch.no_grad():
                nats, trained = self.log_probs(beginning, [rows[index] for index in chosen])
            parts = nats.double().split(trained.sum(-1).tolist())
            for index, part in zip(chosen, parts, strict=True):
                found[index][1:][rows[index].mask[1:]] = part.numpy()
        return found

    def gradient_norm(self, most: float | None = None) -> float:
        """The norm of the gradient that is there; it is clipped to `most` afterwards."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if most is None else most))


def placed(arrays: Sequence[NDArray[np.float64]], trained: torch.Tensor) -> torch.Tensor:
    """Own-aligned arrays [T each] at the places that are `trained` [B, T - 1]: [N]."""
    found = torch.zeros(trained.shape)
    for index, array in enumerate(arrays):
        found[index, : len(array) - 1] = torch.from_numpy(array[1:]).float()
    return found[trained]


@dataclass(frozen=True, slots=True, eq=False)
class _Distances:
    """Recomputed less recorded log-probabilities of a batch [N], 0 where nothing is recorded, and which of them are of
    a changed row [N]."""

    nats: torch.Tensor
    is_changed: torch.Tensor

    @classmethod
    def of(
        cls, nats: torch.Tensor, recorded: torch.Tensor, rows: Sequence[TrainedRow], trained: torch.Tensor
    ) -> "_Distances":
        """Of the tokens that are `trained` [B, T - 1], from both [N]."""
        is_changed = torch.tensor([row.is_changed for row in rows])[:, None].expand_as(trained)[trained]
        return cls(torch.where(recorded.isnan(), 0.0, nats - recorded), is_changed)

    @classmethod
    def by_arrays(cls, rows: Sequence[TrainedRow], own: Sequence[NDArray[np.float64]]) -> "_Distances":
        """Of all rows, from the trainer's own log-probabilities [T each]."""
        pairs = [(own_nats - row.nats)[1:][row.mask[1:]] for row, own_nats in zip(rows, own, strict=True)]
        is_changed = [np.full(len(pair), row.is_changed) for row, pair in zip(rows, pairs, strict=True)]
        return cls(torch.from_numpy(np.nan_to_num(np.concatenate(pairs))), torch.from_numpy(np.concatenate(is_changed)))


class Beginning:
    """What all rows of an update begin with, computed once: the tools take two thirds of a row.

    Each batch goes on from keys and values that stand for it; the gradient which these gather goes back at the end.
    """

    def __init__(self, model: Any, rows: Sequence[TrainedRow]) -> None:
        self.num_tokens = shared_tokens(rows)
        self.computed: list[torch.Tensor] = []
        if self.num_tokens:
            ids = torch.from_numpy(np.array(rows[0].tokens[: self.num_tokens]))[None]
            layers = model.base_model(input_ids=ids, use_cache=True).past_key_values.layers
            self.computed = [one for layer in layers for one in (layer.keys, layer.values)]
        self.standing = [one.detach().requires_grad_(one.requires_grad) for one in self.computed]

    def repeated(self, num_rows: int) -> DynamicCache:
        """Keys and values for so many rows."""
        cache = DynamicCache()
        wide = [one.expand(num_rows, -1, -1, -1) for one in self.standing]
        for index, (keys, values) in enumerate(zip(wide[::2], wide[1::2], strict=True)):
            cache.update(keys, values, index)
        return cache

    def backward(self) -> None:
        """The gradient of the batches that went on from here; nothing if none of them had one."""
        pairs = [(own, stood.grad) for own, stood in zip(self.computed, self.standing, strict=True)]
        told = [(own, gradient) for own, gradient in pairs if gradient is not None]
        if told:
            torch.autograd.backward([own for own, _ in told], [gradient for _, gradient in told])


def shared_tokens(rows: Sequence[TrainedRow]) -> int:
    """How many tokens all rows begin with, short of the one before the first that is trained."""
    shortest = min(int(row.mask.argmax()) if row.mask.any() else len(row.tokens) for row in rows) - 1
    if shortest <= 0:
        return 0
    begins = np.stack([row.tokens[:shortest] for row in rows])
    is_same = (begins == begins[0]).all(axis=0)
    return shortest if is_same.all() else int(is_same.argmin())


def batches(rows: Sequence[TrainedRow], which: Sequence[int], start: int) -> list[list[int]]:
    """Some rows' indices, the shortest first, in batches of at most BATCH_TOKENS from `start` on; a longer row is
    alone."""
    found: list[list[int]] = []
    for index in sorted(which, key=lambda index: len(rows[index].tokens)):
        if not found or (len(found[-1]) + 1) * (len(rows[index].tokens) - start) > BATCH_TOKENS:
            found.append([])
        found[-1].append(index)
    return found


def figures(distances: Sequence[_Distances], gradient_norm: float) -> StepFigures:
    """The figures of recomputed less recorded log-probabilities."""
    distance = torch.cat([one.nats for one in distances]).double()
    is_changed = torch.cat([one.is_changed for one in distances])
    is_outside = (distance.abs() > np.log(2)).double()
    return StepFigures(
        max_distance=float(distance.abs().max()),
        kl=float((distance.clamp(-20, 20).exp() - 1 - distance).mean()),
        share_outside=float(is_outside.mean()),
        share_outside_changed=float(is_outside[is_changed].mean()) if is_changed.any() else None,
        gradient_norm=gradient_norm,
        num_tokens=len(distance),
        distance_counts=np.histogram(distance.abs().numpy(), [0.0, *DECADES, np.inf])[0].tolist(),
    )


def demonstration(renderer: Renderer, task: Task, episode: Episode) -> TrainedRow:
    """A conversation as it should go."""
    ids = rendered(renderer, episode.demonstration(), task.tools)
    return TrainedRow(ids, replies(renderer, ids), np.zeros(len(ids)))
