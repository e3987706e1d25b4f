"""Reads the text side of a model's files: tokenizer, chat template, stop tokens, context.

Owns reading a GGUF file or a folder as Hugging Face lays it out. Knows nothing of weights, and builds no tokenizer:
`tokenizer.json` is the truth (rebuilding one from a tokenizer class loses pre-tokenizer rules), and a GGUF file's
vocabulary, or a tekken.json, is written out as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from stenograph.core.errors import StartupError
from stenograph.model.gguf_header import BadGguf, read_gguf_header
from stenograph.model.tekken import BOS, EOS, BadTekken, tekken_version, tokenizer_json_of_tekken
from stenograph.model.tokenizer_json import added_token, byte_level_bpe_json

CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4
"""Token types of `tokenizer.ggml.token_type` found in text before the model's own rules apply."""

_BYTE_LEVEL: dict[str, object] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_PRE_TOKENIZERS: Mapping[str, object] = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]},
    "gpt-2": _BYTE_LEVEL,
    "default": _BYTE_LEVEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's text side, as its files state it.

    `vocab_size` is the number of logits, where config.json states it (`states_vocab_size`), else the number of the
    tokenizer's ids (at most as many). `max_context_tokens` is the trained context; None: no file says. `eos_token_ids`
    end a turn. `tokenizer_json` is the text of a Hugging Face tokenizer.json; `architecture` as the files name it
    ("llama"). `moe_shape` is (layers, experts per token) of a mixture of experts; None for a dense model.
    `encoder_source` is the source of some models' encoder, in Python, in place of a template: to be read, never run.
    `tekken_version` is the one named in a tekken.json.
    """

    name: str
    path: Path
    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context_tokens: int | None
    architecture: str
    states_vocab_size: bool = True
    moe_shape: tuple[int, int] | None = None
    encoder_source: str | None = None
    tekken_version: str | None = None


class _MalformedFile(Exception):
    """A file has unusable content; `str()` names it, without the file's name."""


def load_model_files(path: Path) -> ModelFiles:
    """Read a `.gguf` file, or a folder with tokenizer.json, or else tekken.json; config.json where there is one.

    Raises StartupError, one line with the file and its fault, and nothing else.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise StartupError(f"{str(path)!r}: cannot be read: {_one_line(error)}") from error
    if is_folder:
        return _load_folder(path)
    if not is_file:
        raise StartupError(f"{path}: there is no such file or folder")
    if path.suffix.lower() != ".gguf":
        raise StartupError(f"{path}: a model is a .gguf file or a folder with a tokenizer.json")
    try:
        return _from_gguf(path, read_gguf_header(path).metadata)
    except (BadGguf, _MalformedFile, OSError) as error:
        raise StartupError(f"{path}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# -- values out of untyped metadata


def _int(source: Mapping[str, object], key: str) -> int:
    value = source.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise _MalformedFile(f"{key} must be an integer in [0, 2^31), got {str(value)[:60]!r}")
    return value


def _optional_int(source: Mapping[str, object], key: str) -> int | None:
    return None if source.get(key) is None else _int(source, key)


def _strings(source: Mapping[str, object], key: str) -> list[str]:
    value = source.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
        raise _MalformedFile(f"{key} must be a list of strings")
    return cast("list[str]", value)


def _optional_str(source: Mapping[str, object], key: str) -> str | None:
    value = source.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _MalformedFile(f"{key} must be a string, got {str(value)[:60]!r}")


# -- GGUF


def _from_gguf(path: Path, metadata: Mapping[str, object]) -> ModelFiles:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    architecture = _optional_str(metadata, "general.architecture")
    if architecture is None:
        raise _MalformedFile("general.architecture is missing")
    eos_id = _int(metadata, "tokenizer.ggml.eos_token_id")
    bos_id = _int(metadata, "tokenizer.ggml.bos_token_id") if "tokenizer.ggml.bos_token_id" in metadata else None
    for key, token_id in (("eos", eos_id), ("bos", bos_id)):
        if token_id is not None and token_id >= len(tokens):
            raise _MalformedFile(f"tokenizer.ggml.{key}_token_id is {token_id}, but there are {len(tokens)} tokens")
    return ModelFiles(
        name=path.stem,
        path=path,
        tokenizer_json=_tokenizer_json_of_gguf(metadata, tokens),
        chat_template=_optional_str(metadata, "tokenizer.chat_template"),
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=tokens[eos_id],
        eos_token_ids=(eos_id,),
        vocab_size=len(tokens),
        max_context_tokens=_int(metadata, f"{architecture}.context_length"),
        architecture=architecture,
        moe_shape=_gguf_moe_shape(metadata, architecture),
    )


def _gguf_moe_shape(metadata: Mapping[str, object], architecture: str) -> tuple[int, int] | None:
    top_k = _optional_int(metadata, f"{architecture}.expert_used_count")
    return (_int(metadata, f"{architecture}.block_count"), top_k) if top_k else None


def _tokenizer_json_of_gguf(metadata: Mapping[str, object], tokens: list[str]) -> str:
    """A byte-level BPE vocabulary of GGUF as a tokenizer.json."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise _MalformedFile(f"its tokenizer model is {str(model)[:60]!r}; only gpt2 (byte-level BPE) is supported")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise _MalformedFile(
            f"its pre-tokenizer is {str(pre)[:60]!r}, known are {known}; use a folder with tokenizer.json"
        )
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(cast("list[object]", types)) != len(tokens):
        raise _MalformedFile(f"tokenizer.ggml.token_type must be a list of {len(tokens)} integers, one per token")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _MalformedFile("tokenizer.ggml.tokens lists a token twice")
    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    if not all(len(merge) == 2 and merge[0] in vocab and merge[1] in vocab for merge in merges):
        raise _MalformedFile("tokenizer.ggml.merges has an entry that is not two tokens of the vocabulary")
    added = [
        added_token(index, token, special=kind == CONTROL_TOKEN)
        for index, (token, kind) in enumerate(zip(tokens, cast("list[object]", types), strict=True))
        if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
    ]
    return byte_level_bpe_json(
        vocab=vocab,
        merges=merges,
        added=added,
        pre_tokenizer=_PRE_TOKENIZERS[pre],
        decoder=_BYTE_LEVEL,
        ignore_merges=False,
    )


# -- a folder


def _load_folder(folder: Path) -> ModelFiles:
    tokenizer_json, tekken = _folder_tokenizer(folder)
    tokenizer = _json_object(folder / "tokenizer.json", tokenizer_json)
    config = _optional_json_object(folder / "config.json")
    tokenizer_config = _optional_json_object(folder / "tokenizer_config.json")
    generation = _optional_json_object(folder / "generation_config.json")
    text = config.get("text_config")
    text_config = cast("dict[str, object]", text) if isinstance(text, dict) else config
    states_vocab_size = text_config.get("vocab_size") is not None
    try:
        if not isinstance(tokenizer.get("model"), dict):
            raise _MalformedFile("tokenizer.json has no object under the key 'model'")
        eos_token = _token_content(tokenizer_config, "eos_token") or (EOS if tekken else None)
        return ModelFiles(
            name=_name_of(folder),
            path=folder,
            tokenizer_json=tokenizer_json,
            chat_template=_folder_template(folder, tokenizer_config),
            bos_token=_token_content(tokenizer_config, "bos_token") or (BOS if tekken else None),
            eos_token=eos_token,
            eos_token_ids=_eos_token_ids(generation, text_config, tokenizer, eos_token),
            vocab_size=_int(text_config, "vocab_size") if states_vocab_size else _num_ids(tokenizer),
            max_context_tokens=_optional_int(text_config, "max_position_embeddings"),
            states_vocab_size=states_vocab_size,
            architecture=_optional_str(text_config, "model_type") or "",
            moe_shape=_moe_shape(text_config),
            encoder_source=_folder_encoder(folder),
            tekken_version=tekken,
        )
    except _MalformedFile as error:
        raise StartupError(f"{folder}: {_one_line(error)}") from error


def _name_of(folder: Path) -> str:
    """The folder's name; of a snapshot in a Hugging Face cache (models--ORG--NAME/snapshots/COMMIT) ORG/NAME."""
    place = folder.resolve()
    repository = place.parent.parent.name
    if place.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return place.name


def _num_ids(tokenizer: Mapping[str, object]) -> int:
    """One more than the highest id of a tokenizer.json, added tokens included."""
    vocab = cast("dict[str, object]", tokenizer["model"]).get("vocab")
    if not isinstance(vocab, dict):
        raise _MalformedFile("tokenizer.json has no object under 'model.vocab', and no config.json says vocab_size")
    ids = [*cast("dict[str, object]", vocab).values(), *(token.get("id") for token in _added_tokens(tokenizer))]
    return max((_int({"id": id_}, "id") for id_ in ids), default=-1) + 1


def _added_tokens(tokenizer: Mapping[str, object]) -> list[dict[str, object]]:
    """The entries under `added_tokens` of a tokenizer.json; an entry other than an object is empty here."""
    added = tokenizer.get("added_tokens")
    entries = cast("list[object]", added) if isinstance(added, list) else []
    return [cast("dict[str, object]", entry) if isinstance(entry, dict) else {} for entry in entries]


_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k")
"""Names of the number of experts per token, in configurations of mixtures of experts."""


def _moe_shape(config: Mapping[str, object]) -> tuple[int, int] | None:
    key = next((key for key in _EXPERTS_PER_TOKEN if config.get(key) is not None), None)
    return None if key is None else (_int(config, "num_hidden_layers"), _int(config, key))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        raise StartupError(f"{path}: the model's folder has no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: cannot be read: {_one_line(error)}") from error


def _json_object(path: Path, text: str) -> dict[str, object]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise StartupError(f"{path}: is not JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: must be a JSON object")
    return cast("dict[str, object]", value)


def _optional_json_object(path: Path) -> dict[str, object]:
    return _json_object(path, _read(path)) if path.exists() else {}


def _folder_tokenizer(folder: Path) -> tuple[str, str | None]:
    """tokenizer.json, made of tekken.json where there is no other; and the version named in a tekken.json."""
    path = folder / "tekken.json"
    if not path.exists():
        return _read(folder / "tokenizer.json"), None
    text = _read(path)
    has_both = (folder / "tokenizer.json").exists()
    try:
        made = _read(folder / "tokenizer.json") if has_both else tokenizer_json_of_tekken(text)
        return made, tekken_version(text)
    except BadTekken as error:
        raise StartupError(f"{path}: it {_one_line(error)}") from error


def _folder_template(folder: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """chat_template.jinja, else the template of tokenizer_config.json (its `default` where it names several)."""
    if (folder / "chat_template.jinja").exists():
        return _read(folder / "chat_template.jinja")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        for entry in cast("list[object]", template):
            if isinstance(entry, dict) and cast("dict[str, object]", entry).get("name") == "default":
                return _optional_str(cast("dict[str, object]", entry), "template")
        raise _MalformedFile("tokenizer_config.json names several chat templates, but none 'default'")
    return _optional_str(tokenizer_config, "chat_template")


def _folder_encoder(folder: Path) -> str | None:
    """`encoding_….py`, in the folder or in its `encoding`, as DeepSeek V3.2 and V4 have it."""
    found = sorted(path for place in (folder, folder / "encoding") for path in place.glob("encoding_*.py"))
    return _read(found[0]) if found else None


def _token_content(tokenizer_config: Mapping[str, object], key: str) -> str | None:
    """A token written as a string, or as an object with its content."""
    value = tokenizer_config.get(key)
    return (
        _optional_str(cast("dict[str, object]", value), "content")
        if isinstance(value, dict)
        else _optional_str(tokenizer_config, key)
    )


def _eos_token_ids(
    generation: Mapping[str, object],
    config: Mapping[str, object],
    tokenizer: Mapping[str, object],
    eos_token: str | None,
) -> tuple[int, ...]:
    """The ids for the end of a turn: those of generation_config.json, else of config.json, and the tokenizer's eos."""
    stated = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = cast("list[object]", stated) if isinstance(stated, list) else [] if stated is None else [stated]
    ids = [_int({"eos_token_id": item}, "eos_token_id") for item in listed]
    if eos_token is not None:
        ids += [_int(token, "id") for token in _added_tokens(tokenizer) if token.get("content") == eos_token]
    return tuple(dict.fromkeys(ids))
