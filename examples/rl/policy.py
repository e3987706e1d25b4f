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
from transformers import AutoModelForCausalLM, DynamicCache

from stenograph.model.files import load_model_files
from stenograph.text.renderer import Renderer

DEMONSTRATIONS = 8
"""Conversations of one step of the cold start."""

BATCH_TOKENS = 1024
"""Tokens that a step's forward takes at once, padding included, and what all rows begin with left out."""

CLIP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """A step: recorded against recomputed log-probabilities before the update, over the trained tokens, in nats.

    `share_outside_changed` is over the rows whose ids a fault changed; None if there are none.
    """

    max_distance: float
    kl: float
    share_outside: float
    share_outside_changed: float | None
    gradient_norm: float
    num_tokens: int


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

    def __init__(self, model: Any, *, lr: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def save(self, folder: Path) -> None:
        """Write the weights, for the engine to read."""
        self.model.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {"weights": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])

    def log_probs(self, beginning: "Beginning", rows: Sequence[TrainedRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each trained token the log-probability at temperature 1 [N], row by row; and where they are [B, T - 1].

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
        nats = self.model.lm_head(hidden).float().log_softmax(-1)
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

    def step(self, rows: Sequence[TrainedRow], advantages: Sequence[float]) -> StepFigures:
        """One clipped policy-gradient step over all rows, in batches; no KL term.

        Rows of a group whose rewards are all alike have no gradient, and none is computed.
        """
        total = sum(int(row.mask[1:].sum()) for row in rows)
        self.optimizer.zero_grad(set_to_none=False)  # a step without any gradient has the optimizer's momentum
        still, moving = ([n for n, a in enumerate(advantages) if (a != 0) is moves] for moves in (False, True))
        beginning = Beginning(self.model, rows)
        distances = self.distances(beginning, rows, still)
        for chosen in batches(rows, moving, beginning.num_tokens):
            batch = [rows[index] for index in chosen]
            nats, recorded, trained = self.compared(beginning, batch)
            advantage = torch.tensor([advantages[index] for index in chosen])[:, None].expand_as(trained)[trained]
            distance = nats - recorded
            ratio = distance.clamp(-20, 20).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (-gain.sum() / total).backward()
            distances.append(_Distances.of(distance.detach(), batch, trained))
        beginning.backward()
        norm = self.gradient_norm()
        self.optimizer.step()
        return figures(distances, norm)

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
                nats, recorded, trained = self.compared(beginning, batch)
            found.append(_Distances.of(nats - recorded, batch, trained))
        return found

    def compared(
        self, beginning: "Beginning", batch: Sequence[TrainedRow]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Recomputed and recorded log-probabilities, these the former where the trainer has to recompute them [N]; and
        where they are."""
        nats, trained = self.log_probs(beginning, batch)
        recorded = torch.zeros(trained.shape)
        for index, row in enumerate(batch):
            recorded[index, : len(row.nats) - 1] = torch.from_numpy(row.nats[1:]).float()
        return nats, torch.where(recorded[trained].isnan(), nats.detach(), recorded[trained]), trained

    def gradient_norm(self) -> float:
        """The norm of the gradient that is there, which is not clipped."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf")))


@dataclass(frozen=True, slots=True, eq=False)
class _Distances:
    """Recomputed less recorded log-probabilities of a batch [N], and which of them are of a changed row [N]."""

    nats: torch.Tensor
    is_changed: torch.Tensor

    @classmethod
    def of(cls, nats: torch.Tensor, rows: Sequence[TrainedRow], trained: torch.Tensor) -> "_Distances":
        """Of the tokens that are `trained` [B, T - 1]."""
        return cls(nats, torch.tensor([row.is_changed for row in rows])[:, None].expand_as(trained)[trained])


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
    )


def demonstration(renderer: Renderer, task: Task, episode: Episode) -> TrainedRow:
    """A conversation as it should go."""
    ids = rendered(renderer, episode.demonstration(), task.tools)
    return TrainedRow(ids, replies(renderer, ids), np.zeros(len(ids)))
