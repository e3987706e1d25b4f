"""Faults that token exactness prevents, injected into exact samples, from mild to severe; none chosen for its effect.

| kind | ids | log-probabilities |
|---|---|---|
| none | sampled | recorded |
| retokenize | of the reply's text, tokenized again | recomputed by the trainer |
| re-render | of the messages, through the chat template | recomputed by the trainer |
| mask | sampled; tool results are trained too | recorded; recomputed where none are |
| retokenize-recorded | of the reply's text, tokenized again | recorded, by position |
| compact-json | of the text with each call's JSON written compactly | recorded, by position |
| shift | sampled | recorded, off by one |
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stenograph.client import DecodedSample
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.text.renderer import Renderer
from stenograph.trainers.rows import runs, whole

KINDS = ("none", "retokenize", "re-render", "mask", "retokenize-recorded", "compact-json", "shift")

_CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """What the trainer sees of a sample, own-aligned; `nats` is NaN where it has to recompute. `is_changed` if its ids
    are not those that were sampled."""

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    nats: NDArray[np.float64]
    is_changed: bool = False

    @classmethod
    def exact(cls, sample: DecodedSample) -> "TrainedRow":
        """The sample as it is."""
        made = whole(sample)
        return cls(made.tokens, made.mask, made.log_probs)

    def has_ids_of(self, other: "TrainedRow") -> bool:
        """Whether both have the same ids."""
        return np.array_equal(self.tokens, other.tokens)

    def as_sample(self, sample: DecodedSample) -> DecodedSample:
        """The sample with this row in the place of its own, for a trainer that recomputes log-probabilities."""
        start = int(self.mask.argmax())
        return dataclasses.replace(
            sample,
            tokens=self.tokens,
            loss_mask=self.mask[start:].astype(np.uint8),
            log_probs=np.nan_to_num(self.nats[start:]),
            raw_log_probs=None,
            sampling_log_probs=None,
        )


def with_drift(kind: str, sample: DecodedSample, renderer: Renderer, view: Any, tools: Sequence[Any]) -> TrainedRow:
    """The sample with a fault; `view` is its session's, which `re-render` alone needs."""
    row = exact = TrainedRow.exact(sample)
    match kind:
        case "retokenize" | "retokenize-recorded":
            row = _respelled(row, renderer, str, recorded=kind == "retokenize-recorded")
        case "compact-json":
            row = _respelled(row, renderer, _compact, recorded=True)
        case "re-render":
            row = _rendered(view, renderer, tools)
        case "shift":
            row = TrainedRow(row.tokens, row.mask, np.where(row.mask, np.roll(row.nats, 1), 0.0))
        case "mask":
            after = np.arange(len(row.tokens)) >= sample.prompt_length
            row = TrainedRow(row.tokens, after, np.where(after & ~row.mask, np.nan, row.nats))
        case _:
            pass
    return dataclasses.replace(row, is_changed=not row.has_ids_of(exact))


def _respelled(row: TrainedRow, renderer: Renderer, respell: Callable[[str], str], *, recorded: bool) -> TrainedRow:
    """Each reply's text tokenized again; its log-probabilities by position, or to be recomputed."""
    tokenizer = renderer.tokenizer
    ids: list[int] = []
    mask: list[bool] = []
    nats: list[float] = []
    at = 0
    for start, end in runs(row.mask):
        ids += row.tokens[at:start].tolist()
        mask += [False] * (start - at)
        nats += [0.0] * (start - at)
        text = respell(tokenizer.decode(row.tokens[start:end].tolist()))
        again = list(tokenizer.encode(text))
        beside = [*row.nats[start:end], *[0.0] * len(again)][: len(again)]
        ids += again
        mask += [True] * len(again)
        nats += beside if recorded else [float("nan")] * len(again)
        at = end
    tail = len(row.tokens) - at
    return TrainedRow(
        np.array(ids + row.tokens[at:].tolist(), np.int64),
        np.array(mask + [False] * tail, np.bool_),
        np.array(nats + [0.0] * tail),
    )


def _compact(text: str) -> str:
    """The text with the JSON of its calls as a harness in another language writes it."""

    def written(found: re.Match[str]) -> str:
        try:
            compact = json.dumps(json.loads(found[1]), separators=(",", ":"))
        except ValueError:
            return found[0]
        return found[0].replace(found[1], compact)

    return _CALL.sub(written, text)


def changed_turns(row: TrainedRow, renderer: Renderer) -> tuple[int, int]:
    """How many of the replies have a text that tokenizes to other ids, and how many replies there are."""
    tokenizer = renderer.tokenizer
    replied = [row.tokens[start:end].tolist() for start, end in runs(row.mask)]
    return sum(list(tokenizer.encode(tokenizer.decode(ids))) != ids for ids in replied), len(replied)


def is_rendered_alike(row: TrainedRow, view: Any, renderer: Renderer, tools: Sequence[Any]) -> bool:
    """Whether the session's messages through the chat template are the ids that were sampled."""
    try:
        return _rendered(view, renderer, tools).has_ids_of(row)
    except UnrenderableMessage:
        return False


def _rendered(view: Any, renderer: Renderer, tools: Sequence[Any]) -> TrainedRow:
    """The session's messages through the chat template."""
    last = view["records"][-1]
    messages = [*last["request"]["messages"], last["response"]["choices"][0]["message"]]
    ids = rendered(renderer, messages, tools)
    mask = replies(renderer, ids)
    return TrainedRow(ids, mask, np.where(mask, np.nan, 0.0))


def rendered(renderer: Renderer, messages: Sequence[Any], tools: Sequence[Any]) -> NDArray[np.int64]:
    """A whole conversation that ends with a reply, as ids: to the token that ends it, without what a template writes
    before another message."""
    shown = [
        Tool(
            name=tool["function"]["name"],
            json=json.dumps(tool),
            parameters_json=json.dumps(tool["function"]["parameters"]),
        )
        for tool in tools
    ]
    ids = list(renderer.render(list(map(_message, messages)), shown if renderer.family.shows_tools else [], {}))
    end = _end(renderer)
    after = ids[::-1].index(end) if end in ids else 0
    return np.array(ids[: len(ids) - after], np.int64)


def replies(renderer: Renderer, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where replies stand, each with the token that ends it."""
    opener, end = _opener(renderer), _end(renderer)
    plain: list[int] = ids.tolist()
    mask = np.zeros(len(plain), np.bool_)
    for at in range(len(plain) - len(opener) + 1):
        if plain[at : at + len(opener)] == opener:
            start = at + len(opener)
            stop = plain.index(end, start) + 1 if end in plain[start:] else len(plain)
            mask[start:stop] = True
    return mask


def _opener(renderer: Renderer) -> list[int]:
    return list(renderer.tokenizer.encode("<|im_start|>assistant\n"))


def _end(renderer: Renderer) -> int:
    return next(iter(renderer.tokenizer.encode("<|im_end|>")))


def _message(plain: Any) -> Message:
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in plain.get("tool_calls") or ()
    )
    role = Role(plain["role"])
    return Message(
        role=role,
        content=plain.get("content"),
        tool_calls=calls if role is Role.ASSISTANT else (),
        tool_call_id=plain.get("tool_call_id") if role is Role.TOOL else None,
    )
