"""Sessions with images through a real engine: exact on both sides, and recomputed by transformers.

A small Qwen2.5-VL with random weights (`vision.py`). Each of ten parts has a hundred turns, from its own seeds.
"""

import base64
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scripts.real_engine import ask

IMAGE_PAD, VISION_START, VISION_END, IM_END = 151655, 151652, 151653, 151645
MOST_IMAGES = 8
NUM_PARTS, SESSIONS_A_PART, TURNS_A_SESSION = 10, 10, 10
PLACEHOLDER = "<|image_pad|>"
WORDS = ("look", "what is this", "\U0001f642", PLACEHOLDER, "compare the two, then", "  \n", "é\u0301", "and now?")
BIAS = {str(IM_END): 9, **dict.fromkeys(map(str, (IMAGE_PAD, VISION_START, VISION_END)), -100)}
"""Some replies end by themselves; none spells an image, after which a line takes no more of them."""
FORM = {"type": "json_schema", "json_schema": {"name": "seen", "schema": {"enum": ["a cat", "a dog"]}}}
TOLERANCE_NATS = 1e-3
"""Of float32 on a CPU, where the same tokens are computed in batches of other shapes."""
PARTS = pytest.mark.parametrize("part", range(NUM_PARTS), ids=[f"part{number}" for number in range(NUM_PARTS)])
say = sys.stdout.write


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A file of a picture, and the number of tokens that transformers' image processor gives it."""

    name: str
    num_tokens: int
    sha256: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """A Python with transformers that computes what `model` gives. `is_raw`: what the engine reports is before bias,
    temperature and grammar; else it is after the first two, and turns under a grammar are left out."""

    model: Path
    python: str
    packages: str
    is_raw: bool


@dataclass(slots=True)
class SentTurn:
    """A turn as its client has it: text and usage of the answer, logical ids of prompt and reply; its messages, and the
    pictures in them."""

    text: str
    prompt_ids: list[int]
    ids: list[int]
    usage: dict[str, Any]
    messages: Sequence[Any] = ()
    pictures: Sequence[Picture] = ()

    @property
    def line(self) -> list[Any]:
        """Its messages, and the reply."""
        return [*self.messages, {"role": "assistant", "content": self.text}]


@dataclass(slots=True)
class Played:
    """A session: its turns, and its samples."""

    turns: list[SentTurn] = field(default_factory=list[SentTurn])
    samples: list[Any] = field(default_factory=list[Any])


def read_pictures(model: Path) -> list[Picture]:
    """The pictures that were made with the model."""
    told: dict[str, int] = json.loads((model / "images.json").read_text())
    return [_picture(model / "images" / name, num_tokens) for name, num_tokens in told.items()]


def _picture(path: Path, num_tokens: int) -> Picture:
    data = path.read_bytes()
    url = f"data:image/{path.suffix[1:]};base64,{base64.b64encode(data).decode()}"
    return Picture(name=path.name, num_tokens=num_tokens, sha256=hashlib.sha256(data).hexdigest(), url=url)


def check_part(part: int, url: str, oracle: Oracle, words: Sequence[str] = WORDS) -> None:
    """Play a part's sessions of these words side by side: forks and retries, whole and streamed, with a grammar and
    without."""
    pictures = read_pictures(oracle.model)
    seeds = range(part * SESSIONS_A_PART, (part + 1) * SESSIONS_A_PART)
    with ThreadPoolExecutor(SESSIONS_A_PART) as several:
        sessions = list(several.map(partial(_play, url, pictures, words), map(random.Random, seeds)))
    for one in sessions:
        _check_turns(one)
        _check_samples(one)
    apart = [distance for one in sessions for distance in _recomputed(oracle, pictures, one.samples)]
    turns = [turn for one in sessions for turn in one.turns]
    num_images = sum(len(turn.pictures) for turn in turns)
    say(
        f"\nimages, part {part}: {len(turns)} turns, {num_images} images shown, {len(apart)} tokens recomputed: apart"
        f" by at most {max(apart):.1e}, by {sum(apart) / len(apart):.1e} nats in the mean\n"
    )
    assert len(turns) == SESSIONS_A_PART * TURNS_A_SESSION
    assert max(apart) < TOLERANCE_NATS


def _play(url: str, pictures: Sequence[Picture], words: Sequence[str], chosen: random.Random) -> Played:
    """A tree of turns: most go on, some from an earlier turn, and some are asked a second time."""
    session = ask(url, "/sessions", {"history": "tree"})
    played, before = Played(), [list[Any]()]
    last: list[Any] = []
    for _ in range(TURNS_A_SESSION):
        fate = chosen.random()
        if not last or fate > 0.15:
            base = before[-1] if fate > 0.4 else chosen.choice(before)
            last = [*base, _message(base, pictures, words, chosen)]
        turn = _asked(session["base_url"], last, chosen)
        turn.messages = last
        before.append(turn.line)
        by_url = {one.url: one for one in pictures}
        turn.pictures = [by_url[part["image_url"]["url"]] for part in _images_of(last)]
        played.turns.append(turn)
    played.samples = ask(url, f"/sessions/{session['session_id']}/samples", {"format": "json"})["samples"]
    return played


def _images_of(messages: Sequence[Any]) -> list[Any]:
    parts = (part for message in messages if message["role"] == "user" for part in message["content"])
    return [part for part in parts if part["type"] == "image_url"]


def _message(
    before: Sequence[Any], pictures: Sequence[Picture], words: Sequence[str], chosen: random.Random
) -> dict[str, Any]:
    """A user's message with texts and images; a line has one image at least, and MOST_IMAGES at most."""
    num_left = MOST_IMAGES - len(_images_of(before))
    num_images = min(num_left, chosen.choice((0, 0, 1, 1, 2, 3, 8)) if before else chosen.randint(1, MOST_IMAGES))
    images = ({"type": "image_url", "image_url": {"url": one.url}} for one in chosen.choices(pictures, k=num_images))
    parts: list[dict[str, Any]] = [*images, {"type": "text", "text": chosen.choice(words)}]
    parts += [{"type": "text", "text": chosen.choice(words)} for _ in range(chosen.randint(0, 2))]
    chosen.shuffle(parts)
    return {"role": "user", "content": parts}


def _asked(url: str, messages: Sequence[Any], chosen: random.Random) -> SentTurn:
    body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": chosen.randint(1, 12), "logit_bias": BIAS}
    body |= {"temperature": chosen.choice((0, 0.7, 1, 1.5)), "return_token_ids": True}
    if chosen.random() < 0.1:
        body |= {"response_format": FORM, "max_tokens": 24}
    if chosen.random() < 0.4:
        streamed = ask(url, "/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        ids = [id_ for choice in choices for id_ in choice.get("token_ids") or ()]
        prompt_ids = next(event["prompt_token_ids"] for event in events if event.get("prompt_token_ids"))
        return SentTurn(text=text, prompt_ids=prompt_ids, ids=ids, usage=events[-1]["usage"])
    reply = ask(url, "/chat/completions", body)
    (choice,) = reply["choices"]
    text = choice["message"]["content"] or ""
    return SentTurn(text=text, prompt_ids=reply["prompt_token_ids"], ids=choice["token_ids"], usage=reply["usage"])


def _check_turns(one: Played) -> None:
    """vLLM ran as many tokens as transformers' image processor says."""
    for turn in one.turns:
        assert turn.prompt_ids.count(IMAGE_PAD) == len(turn.pictures)
        effective = len(turn.prompt_ids) + sum(picture.num_tokens - 1 for picture in turn.pictures)
        assert (turn.usage["prompt_tokens"], turn.usage["completion_tokens"]) == (effective, len(turn.ids))


def _check_samples(one: Played) -> None:
    """Samples expand lines of turns at the images and nowhere else, and each sampled token is trained once."""
    by_sha256 = {picture.sha256: picture for turn in one.turns for picture in turn.pictures}
    lines = [[*turn.prompt_ids, *turn.ids] for turn in one.turns]
    for sample in one.samples:
        ids, end = sample["tokens"], 0
        collapsed: list[int] = []
        for row in sample["media"]:
            expansion = ids[row["start"] : row["start"] + row["length"]]
            assert expansion == [IMAGE_PAD] * by_sha256[row["sha256"]].num_tokens
            collapsed += [*ids[end : row["start"]], IMAGE_PAD]
            end = row["start"] + row["length"]
        assert [*collapsed, *ids[end:]] in lines
    assert sum(sum(sample["loss_mask"]) for sample in one.samples) == _num_kept(one.turns)


def _num_kept(turns: Sequence[SentTurn]) -> int:
    """The sampled tokens of all lines but those that end with a turn superseded by a later sibling.

    A turn comes after the deepest one, of equals the latest, whose messages and reply its own messages begin with.
    """
    parents: list[int] = []
    for number, turn in enumerate(turns):
        before = [at for at in range(number) if turn.messages[: len(turns[at].line)] == turns[at].line]
        parents.append(max(before, key=lambda at: (len(turns[at].line), at), default=-1))
    openings = [(*turn.prompt_ids, *(picture.name for picture in turn.pictures)) for turn in turns]
    places = [(parent, () if parent >= 0 else openings[at]) for at, parent in enumerate(parents)]
    latest = {place: at for at, place in enumerate(places)}
    kept = set[int]()
    for at, place in enumerate(places):
        one = at if at not in parents and latest[place] == at else -1
        while one >= 0:
            kept.add(one)
            one = parents[one]
    return sum(len(turns[at].ids) for at in kept)


def _recomputed(oracle: Oracle, pictures: Sequence[Picture], samples: Sequence[Any]) -> list[float]:
    """The distance, in nats, of each trained token's log-probability from the one by transformers."""
    names = {one.sha256: one.name for one in pictures}
    lines, recorded = list[Any](), list[float]()
    for sample in samples:
        first = len(sample["tokens"]) - sample["response_length"]
        scored = [(at, _asked_of(turn, oracle)) for turn in sample["turns"] for at in _trained(sample, turn, oracle)]
        recorded += [sample["rollout_log_probs"][at - first] for at, _ in scored]
        media = [names[row["sha256"]] for row in sample["media"]]
        rows = [{"at": at, **how} for at, how in scored]
        lines.append({"tokens": sample["tokens"], "media": media, "rows": rows})
    answer = subprocess.run(
        [oracle.python, str(Path(__file__).with_name("vision.py")), "score", str(oracle.model)],
        input=json.dumps([line for line in lines if line["rows"]]).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": oracle.packages},
        check=True,
    )
    told = [logprob for line in json.loads(answer.stdout) for logprob in line["logprobs"]]
    return [abs(one - other) for one, other in zip(told, recorded, strict=True)]


def _trained(sample: Mapping[str, Any], turn: Mapping[str, Any], oracle: Oracle) -> list[int]:
    """The places of a turn's trained tokens, as far as the oracle can compute their distribution."""
    if not oracle.is_raw and "grammar" in turn:
        return []
    first = len(sample["tokens"]) - sample["response_length"]
    return [at for at in range(turn["start"], turn["end"]) if sample["loss_mask"][at - first]]


def _asked_of(turn: Mapping[str, Any], oracle: Oracle) -> dict[str, Any]:
    """A turn's parameters, as far as its log-probabilities are after them."""
    if oracle.is_raw:
        return {}
    return {"temperature": turn["temperature"] or 1.0, "bias": turn.get("logit_bias", [])}
