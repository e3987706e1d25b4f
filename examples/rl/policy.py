"""The policy in torch: weights out of the model that is served, the cold start, a step, weights back to a folder."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agent import DEMONSTRATED, TOOL, Episode
from drift import TrainedRow, rendered, replies
from transformers import AutoModelForCausalLM

from stenograph.core.messages import Message, Role, ToolCall
from stenograph.model.files import load_model_files
from stenograph.render.renderer import Renderer

BATCH = 8
BATCH_TOKENS = 1024
"""Tokens that a step's forward takes at once, padding included: activations are over a megabyte a token."""
CLIP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """A step: recorded against recomputed log-probabilities before the update, over the trained tokens, in nats."""

    max_distance: float
    kl: float
    share_outside: float
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

    def log_probs(self, rows: Sequence[TrainedRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each trained token the log-probability at temperature 1 [N], row by row; and where they are [B, T - 1].

        Logits are computed where a token is trained, and nowhere else: 49,152 a token would be most of the memory.
        """
        longest = max(len(row.tokens) for row in rows)
        ids, there, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
        for index, row in enumerate(rows):
            ids[index, : len(row.tokens)] = torch.from_numpy(np.array(row.tokens))
            there[index, : len(row.tokens)] = 1
            mask[index, : len(row.tokens)] = torch.from_numpy(row.mask.astype(np.int64))
        trained = mask[:, 1:] == 1
        hidden = self.model.base_model(input_ids=ids, attention_mask=there).last_hidden_state[:, :-1][trained]
        nats = self.model.lm_head(hidden).float().log_softmax(-1)
        return nats.gather(-1, ids[:, 1:][trained][:, None])[:, 0], trained

    def demonstrate(self, renderer: Renderer, *, steps: int, lr: float, chance: random.Random) -> list[float]:
        """The cold start: a few steps on conversations as they should be, rendered by the server's own template."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        losses: list[float] = []
        for _ in range(steps):
            episodes = [Episode.drawn(chance.choice(DEMONSTRATED), chance) for _ in range(BATCH)]
            nats, _ = self.log_probs([demonstration(renderer, episode) for episode in episodes])
            loss = -nats.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def step(self, rows: Sequence[TrainedRow], advantages: Sequence[float]) -> StepFigures:
        """One clipped policy-gradient step over all rows, in batches; no KL term."""
        total = sum(int(row.mask[1:].sum()) for row in rows)
        distances: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        for chosen in _batches([len(row.tokens) for row in rows]):
            batch = [rows[index] for index in chosen]
            nats, trained = self.log_probs(batch)
            recorded = torch.zeros(trained.shape)
            for index, row in enumerate(batch):
                recorded[index, : len(row.nats) - 1] = torch.from_numpy(row.nats[1:]).float()
            recorded = torch.where(recorded[trained].isnan(), nats.detach(), recorded[trained])
            advantage = torch.tensor([advantages[index] for index in chosen])[:, None].expand_as(trained)[trained]
            distance = nats - recorded
            ratio = distance.clamp(-20, 20).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (-gain.sum() / total).backward()
            distances.append(distance.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.optimizer.step()
        distance = torch.cat(distances).double()
        return StepFigures(
            max_distance=float(distance.abs().max()),
            kl=float((distance.clamp(-20, 20).exp() - 1 - distance).mean()),
            share_outside=float((distance.abs() > np.log(2)).double().mean()),
            gradient_norm=float(norm),
            num_tokens=len(distance),
        )


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of rows, the shortest first, in batches of at most BATCH rows and BATCH_TOKENS; a longer row is alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        num_rows = len(batches[-1]) + 1 if batches else BATCH + 1
        if num_rows > BATCH or num_rows * lengths[index] > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches


def demonstration(renderer: Renderer, episode: Episode) -> TrainedRow:
    """A conversation as it should go."""
    call = ToolCall(id="call_1", name="price", arguments=json.dumps({"item": episode.item}))
    messages = [
        Message(role=Role.USER, content=episode.question),
        Message(role=Role.ASSISTANT, tool_calls=(call,)),
        Message(role=Role.TOOL, tool_call_id=call.id, content=episode.run_tool(call.arguments)),
        Message(role=Role.ASSISTANT, content=f"The {episode.item} costs {episode.price}."),
    ]
    ids = rendered(renderer, messages, TOOL)
    return TrainedRow(ids, replies(renderer, ids), np.zeros(len(ids)))
