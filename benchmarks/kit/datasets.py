"""Conversations of a file in ShareGPT's form, for the benches that are given one. Owns how such a file is read.

Source: huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered: a JSON list (or, in a `.jsonl`, a line each)
of `{"conversations": [{"from": "human" | "gpt" | …, "value": text}]}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

JSON_LINES = ".jsonl"
_ASKERS, _ANSWERERS = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAndAnswered:
    """A person's words and the answer to them, which is empty where there was none."""

    asked: str
    answered: str


class _Utterance(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Talk(msgspec.Struct):
    conversations: list[_Utterance]


def read_sharegpt(path: Path) -> list[tuple[AskedAndAnswered, ...]]:
    """Every conversation in which a person asks something. Raises OSError, and ValueError, which names the file."""
    try:
        if path.suffix == JSON_LINES:
            talks = [msgspec.json.decode(line, type=_Talk) for line in path.read_bytes().splitlines() if line.strip()]
        else:
            talks = msgspec.json.decode(path.read_bytes(), type=list[_Talk])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not ShareGPT's form: {error}") from error
    conversations = [found for talk in talks if (found := tuple(_exchanges(talk)))]
    if not conversations:
        raise ValueError(f"{path} has no conversation in which a person asks something")
    return conversations


def _exchanges(talk: _Talk) -> Iterator[AskedAndAnswered]:
    asked = ""
    for said in talk.conversations:
        if said.speaker in _ASKERS:
            if asked:
                yield AskedAndAnswered(asked=asked, answered="")
            asked = said.value.strip()
        elif said.speaker in _ANSWERERS and asked:
            yield AskedAndAnswered(asked=asked, answered=said.value)
            asked = ""
    if asked:
        yield AskedAndAnswered(asked=asked, answered="")
