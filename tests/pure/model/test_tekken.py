"""A tekken.json served as what it is: the same ids as a merger of the lowest ranks, and refused where it is broken."""

import base64
import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from stenograph.core.errors import StartupError
from stenograph.model.files import load_model_files
from stenograph.model.tekken import BadTekken, tokenizer_json_of_tekken
from stenograph.model.tokenizer import Tokenizer
from stenograph.model.tokenizer_json import BYTE_OF_CHAR

PATTERN = r"\s?[a-z]+|[^a-z\s]+|\s+"
WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White_Space of Unicode, which `\\s` is in a tokenizer; to Python's `re` U+001C to U+001F are white space, too."""
NUM_SPECIAL = 30
CONFIG = {"vocab_size": 600, "max_position_embeddings": 64, "model_type": "mistral"}


@pytest.fixture(scope="module")
def ranks(reference: tokenizers.Tokenizer) -> Mapping[bytes, int]:
    """The bytes, and what a trained tokenizer makes of them, in the order in which it learned it."""
    merges = json.loads(reference.to_str())["model"]["merges"]
    made = [bytes(BYTE_OF_CHAR[char] for char in left + right) for left, right in merges]
    return {token: rank for rank, token in enumerate(dict.fromkeys([*(bytes([i]) for i in range(256)), *made]))}


@pytest.fixture(scope="module")
def document(ranks: Mapping[bytes, int]) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab}


@pytest.fixture(scope="module")
def made(document: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_json_of_tekken(json.dumps(document)))


def merged(ranks: Mapping[bytes, int], text: str) -> list[int]:
    """What the format's own tokenizer does: of all neighbours, those first that make the token of the lowest rank."""
    found: list[int] = []
    for piece in re.findall(rf"[{WHITE}]?[a-z]+|[^a-z{WHITE}]+|[{WHITE}]+", text):
        whole = piece.encode()
        parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
        while len(parts) > 1:
            made = [(ranks.get(a + b, len(ranks)), at) for at, (a, b) in enumerate(pairwise(parts))]
            rank, at = min(made)
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [ranks[part] + NUM_SPECIAL for part in parts]
    return found


WORDS = st.sampled_from(
    ["user", "assistant", " system", "hello", "tool_call", "arguments", "é𝄞", "\n", "  ", "sst", "[INST]"]
)


@given(text=st.lists(WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=8).map("".join))
@example(text="\x1f system")
def test_text_has_the_ids_of_the_lowest_ranks(made: Tokenizer, ranks: Mapping[bytes, int], text: str) -> None:
    assert list(made.encode_plain(text)) == merged(ranks, text)
    assert made.decode(made.encode_plain(text)) == text


def test_special_tokens_come_first_and_those_without_a_name_are_named_by_their_ids(made: Tokenizer) -> None:
    assert list(made.encode("<s>[INST]u[/INST]</s>"))[:2] == [1, 3]
    assert made.added_tokens["[TOOL_CONTENT]"] == 19
    assert made.added_tokens["<SPECIAL_29>"] == 29
    assert made.special_ids == set(range(NUM_SPECIAL))


def test_special_tokens_that_the_file_lists_are_those_there_are(document: dict[str, Any]) -> None:
    listed = [
        {"rank": 0, "token_str": "<s>", "is_control": True},
        {"rank": 1, "token_str": "[ARGS]", "is_control": True},
    ]
    made = Tokenizer(tokenizer_json_of_tekken(json.dumps({**document, "special_tokens": listed})))
    assert [made.added_tokens[name] for name in ("<s>", "[ARGS]", "<SPECIAL_2>")] == [0, 1, 2]


def without(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**document, "config": {**document["config"], **changes}}


BROKEN: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda _: [], "is not a tekken.json"),
    (lambda document: {"vocab": document["vocab"]}, "is not a tekken.json"),
    (lambda document: without(document, default_vocab_size=9999), "do not make up a vocabulary"),
    (lambda document: without(document, default_num_special_tokens=0), "do not make up a vocabulary"),
    (lambda document: {**document, "vocab": document["vocab"][::-1]}, "lists the token of rank"),
    (lambda document: {**document, "vocab": [{"rank": 0, "token_bytes": "?"}, *document["vocab"][1:]]}, "not base64"),
    (lambda document: {**document, "vocab": [{"rank": 0, "token_bytes": ""}, *document["vocab"][1:]]}, "without bytes"),
    (
        lambda document: {**document, "special_tokens": [{"rank": 99, "token_str": "<s>"}]},
        "special tokens that do not fit",
    ),
    (
        lambda document: {**document, "special_tokens": [{"rank": i, "token_str": "<s>"} for i in range(2)]},
        "special tokens that do not fit",
    ),
]


@pytest.mark.parametrize(("change", "expected"), BROKEN)
def test_a_broken_file_is_refused_with_what_is_wrong(
    document: dict[str, Any], change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    with pytest.raises(BadTekken, match=expected):
        tokenizer_json_of_tekken(json.dumps(change(document)))


def test_a_folder_may_have_a_tekken_file_in_place_of_a_tokenizer(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tekken.json").write_text(json.dumps(document))
    files = load_model_files(tmp_path)
    assert (files.tekken_version, files.bos_token, files.eos_token, files.eos_token_ids) == ("v3", "<s>", "</s>", (2,))
    assert files.tokenizer_json == tokenizer_json_of_tekken(json.dumps(document))
    (tmp_path / "tokenizer.json").write_text(other := files.tokenizer_json.replace("[IMG]", "[PICTURE]"))
    files = load_model_files(tmp_path)
    assert (files.tekken_version, files.tokenizer_json) == ("v3", other)


def test_a_folder_s_broken_tekken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tekken\.json: it is not a tekken\.json"):
        load_model_files(tmp_path)
