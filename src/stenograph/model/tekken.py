"""Mistral's tekken.json, written out as the tokenizer.json of the same tokenizer.

Owns the format: the bytes and the rank of each token, a pattern to split text, special tokens before all others. A
merge makes the token of the lowest rank first; Hugging Face's form of the same names pairs instead, so a token is
listed with each of its possible pairs.

Source: the tekken.json files and the reader in the package mistral-common.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stenograph.model.tokenizer_json import BYTE_OF_CHAR, added_token, byte_level_bpe_json

BOS, EOS = "<s>", "</s>"

_SPECIAL_UP_TO_V7 = (
    *("<unk>", BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of a file of version 3 or 7 without any."""

_MAX_TOKENS = 1 << 20


class BadTekken(Exception):
    """An unusable tekken.json; `str()` says why."""


class _Config(msgspec.Struct, gc=False):
    version: str
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct, gc=False):
    rank: int
    token_bytes: str


class _SpecialToken(msgspec.Struct, gc=False):
    rank: int
    token_str: str


class _Versioned(msgspec.Struct, gc=False):
    config: _Config


class _Tekken(msgspec.Struct, gc=False):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_SpecialToken] | None = None


def tekken_version(text: str) -> str:
    """The version in a tekken.json, such as "v7". Raises BadTekken."""
    try:
        return msgspec.json.decode(text, type=_Versioned).config.version
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BadTekken(f"is not a tekken.json: {error}") from error


def tokenizer_json_of_tekken(text: str) -> str:
    """The tokenizer.json. Raises BadTekken."""
    try:
        tekken = msgspec.json.decode(text, type=_Tekken)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BadTekken(f"is not a tekken.json: {error}") from error
    config = tekken.config
    num_special, num_plain = (
        config.default_num_special_tokens,
        config.default_vocab_size - config.default_num_special_tokens,
    )
    if not 0 < num_special < _MAX_TOKENS or not 0 < num_plain <= min(len(tekken.vocab), _MAX_TOKENS):
        raise BadTekken(
            f"has {len(tekken.vocab)} tokens, which do not make up a vocabulary of {config.default_vocab_size}"
        )
    ranks = _ranks(tekken.vocab[:num_plain])
    spelled = {token: _spelled(token) for token in ranks}
    specials = _special_tokens(tekken.special_tokens, num_special)
    split: dict[str, object] = {
        "type": "Split",
        "pattern": {"Regex": config.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level: dict[str, object] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return byte_level_bpe_json(
        vocab={spelled[token]: rank + num_special for token, rank in ranks.items()},
        merges=[(spelled[left], spelled[right]) for left, right in _merges(ranks)],
        added=[added_token(index, content, special=True) for index, content in enumerate(specials)],
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
        decoder=byte_level,
        ignore_merges=True,
    )


def _ranks(vocab: Sequence[_Token]) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for rank, token in enumerate(vocab):
        if token.rank != rank:
            raise BadTekken(f"lists the token of rank {token.rank} where that of rank {rank} belongs")
        try:
            ranks[base64.b64decode(token.token_bytes, validate=True)] = rank
        except (binascii.Error, ValueError) as error:
            raise BadTekken(f"has a token, of rank {rank}, whose bytes are not base64") from error
    if len(ranks) != len(vocab) or b"" in ranks:
        raise BadTekken("lists a token twice, or one without bytes")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs for each token, in the order of the tokens; of one token, in the order of its parts."""
    for token in ranks:
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        made = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(made, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


_CHAR_OF_BYTE: Mapping[int, str] = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def _spelled(token: bytes) -> str:
    return "".join(map(_CHAR_OF_BYTE.__getitem__, token))


def _special_tokens(listed: Sequence[_SpecialToken] | None, number: int) -> Sequence[str]:
    """All of them by id; ids without a token in the file have a name made of the id."""
    named = dict(enumerate(_SPECIAL_UP_TO_V7)) if listed is None else {token.rank: token.token_str for token in listed}
    found = [named.get(index, f"<SPECIAL_{index}>") for index in range(number)]
    if len(set(found)) != number or not named.keys() <= set(range(number)) or "" in found:
        raise BadTekken(f"has special tokens that do not fit the {number} ids there are for them")
    return found
