"""Checks whether a tokenizer.json can be served exactly, makes the plain tokenizer of it, and writes new files.

Owns the format, the checks, and an equal spelling that is faster: byte-level BPE, added tokens as plain literals, no
way for text to become an added token. Anything else is refused at start, with the reason, rather than served almost
right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import msgspec

from stenograph.core.errors import StartupError

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The words of a `ByteLevel` with `use_regex`. Source: tokenizers, `pre_tokenizers/byte_level.rs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token found in text as a literal. `lstrip`, `rstrip`: it swallows white space on that side."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDocument:
    """A checked tokenizer.json. `vocab` has the model's own tokens in their byte-level spelling."""

    root: Mapping[str, object]
    model: Mapping[str, object]
    vocab: Mapping[str, int]
    added: tuple[AddedToken, ...]


def byte_level_bpe_json(
    *,
    vocab: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    added: Sequence[Mapping[str, object]],
    pre_tokenizer: object,
    decoder: object,
    ignore_merges: bool,
) -> str:
    """The file of a byte-level BPE. `added` is made by `added_token`; `ignore_merges`: a token is not split."""
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return msgspec.json.encode(document).decode()


def added_token(index: int, content: str, *, special: bool) -> dict[str, object]:
    """One found in text as a literal, as a tokenizer.json lists it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, "special": special, **flags}


def read_tokenizer_json(text: str) -> TokenizerDocument:
    """Parse and check. Raises StartupError: not JSON, not byte-level BPE, or an added token other than a literal."""
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise StartupError(f"tokenizer.json: is not JSON: {error}") from error
    root = _object(document, "the document")
    model = _object(root.get("model"), "model")
    if model.get("type", "BPE") != "BPE":
        raise StartupError(f"tokenizer.json: the model is {model.get('type')!r}; only BPE is supported")
    if not _is_byte_level(root.get("decoder")):
        raise StartupError("tokenizer.json: only byte-level tokenizers are supported (decoder ByteLevel)")
    vocab = _object(model.get("vocab"), "model.vocab")
    ids = cast("list[int]", list(vocab.values()))
    if set(map(type, ids)) - {int} or not 0 <= min(ids, default=0) <= max(ids, default=0) < 2**24:
        raise StartupError("tokenizer.json: model.vocab has an id that is not an integer in [0, 2^24)")
    added: object = root.get("added_tokens") or []
    if not isinstance(added, list):
        raise StartupError("tokenizer.json: added_tokens must be a list")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise StartupError(
            "tokenizer.json: a byte-level BPE has no continuing_subword_prefix and no end_of_word_suffix"
        )
    has_normalizer = root.get("normalizer") not in (None, {"type": "Sequence", "normalizers": []})
    tokens = tuple(_added_token(entry, has_normalizer) for entry in cast("list[object]", added))
    return TokenizerDocument(root=root, model=model, vocab=cast("dict[str, int]", vocab), added=tokens)


def plain_tokenizer_json(document: TokenizerDocument) -> str:
    """The same tokenizer without added tokens, truncation, padding and post-processor.

    Added tokens also leave the model's vocabulary, so no text can ever become one. Raises StartupError where a merge
    makes an added token, or where one stands for unknown text.
    """
    contents = {token.content for token in document.added}
    ids = {token.id for token in document.added}
    pairs = _merge_pairs(document.model.get("merges"))
    if not contents.isdisjoint(chain.from_iterable(pairs)) or not contents.isdisjoint(map("".join, pairs)):
        left, right = next(pair for pair in pairs if not contents.isdisjoint((*pair, "".join(pair))))
        raise StartupError(f"tokenizer.json: the merge {left!r} + {right!r} makes or uses an added token")
    vocab = {text: i for text, i in document.vocab.items() if text not in contents}
    if not ids.isdisjoint(vocab.values()):
        reused = next(text for text, i in vocab.items() if i in ids)
        raise StartupError(f"tokenizer.json: the id of the token {reused!r} is also an added token's")
    unknown = document.model.get("unk_token")
    if unknown in contents and not all(char in vocab for char in BYTE_OF_CHAR):
        raise StartupError(f"tokenizer.json: text that has no token becomes the added token {unknown!r}")
    model = {**document.model, "vocab": vocab, "unk_token": None if unknown in contents else unknown}
    cut: dict[str, object] = {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    return msgspec.json.encode({**document.root, **cut, "model": model}).decode()


def spelled_out(cuts: Any) -> object:
    """A pre-tokenizer with the words of each `ByteLevel` as a `Split`, an equal one: fastokens cuts a text by it in
    half the time (2 KB, all of the encoding: 107 → 42 µs)."""
    match cuts:
        case {"type": "Sequence", "pretokenizers": [*parts]}:
            return {"type": "Sequence", "pretokenizers": [spelled_out(one) for one in parts]}
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            words = {"type": "Split", "pattern": {"Regex": GPT2_WORDS}, "behavior": "Isolated", "invert": False}
            bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            return {"type": "Sequence", "pretokenizers": [words, bytes_]}
        case _:
            return cuts


def token_bytes(document: TokenizerDocument) -> list[bytes]:
    """The bytes of each id [vocab_size]; an id without a token has none."""
    size = 1 + max([*document.vocab.values(), *(token.id for token in document.added)], default=-1)
    table = [b""] * size
    for text, token_id in document.vocab.items():
        table[token_id] = _bytes_of_spelling(text)
    for token in document.added:
        table[token.id] = token.content.encode("utf-8", "surrogatepass")
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others as U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_alphabet()


def _bytes_of_spelling(text: str) -> bytes:
    """The bytes spelled by a vocabulary entry; an entry not spelled in bytes is its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in text])
    except KeyError:
        return text.encode("utf-8", "surrogatepass")


def _added_token(entry: object, has_normalizer: bool) -> AddedToken:
    fields = _object(entry, "an added token")
    token_id, content = fields.get("id"), fields.get("content")
    if not isinstance(token_id, int) or not 0 <= token_id < 2**24 or not isinstance(content, str) or not content:
        raise StartupError(f"tokenizer.json: an added token needs an id and a content: {str(fields)[:120]}")
    if fields.get("single_word") is True:
        raise StartupError(f"tokenizer.json: the added token {content!r} is single_word, which is unsupported")
    normalized = fields.get("normalized") is True
    if normalized and has_normalizer:
        raise StartupError(f"tokenizer.json: the added token {content!r} is normalized, which is unsupported")
    return AddedToken(
        id=token_id,
        content=content,
        special=fields.get("special") is True,
        lstrip=fields.get("lstrip") is True,
        rstrip=fields.get("rstrip") is True,
        normalized=normalized,
    )


def _merge_pairs(merges: object) -> list[list[str]]:
    """The merges in both forms of the file: "a b", or ["a", "b"]. There are 300,000 in some files, so each check is one
    call over all of them."""
    listed = cast("list[object]", merges) if isinstance(merges, list) else []
    pairs = [merge.split(" ") if isinstance(merge, str) else cast("list[str]", merge) for merge in listed]
    is_list = set(map(type, pairs)) <= {list}
    if not is_list or set(map(len, pairs)) - {2} or set(map(type, chain.from_iterable(pairs))) - {str}:
        wrong = next(merge for merge, pair in zip(listed, pairs, strict=True) if not _is_pair(pair))
        raise StartupError(f"tokenizer.json: a merge is two tokens, got {str(wrong)[:60]!r}")
    return pairs


def _is_pair(value: object) -> bool:
    match value:
        case [str(), str()]:
            return True
        case _:
            return False


def _is_byte_level(decoder: object) -> bool:
    fields = cast("dict[str, object]", decoder) if isinstance(decoder, dict) else {}
    if fields.get("type") == "Sequence":
        parts = fields.get("decoders")
        inner = cast("list[object]", parts) if isinstance(parts, list) else []
        return len(inner) == 1 and _is_byte_level(inner[0])
    return fields.get("type") == "ByteLevel"


def _object(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise StartupError(f"tokenizer.json: {what} must be an object")
    return cast("dict[str, object]", value)
