"""Damaged model files stop the start with one line, and with nothing else."""

import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenograph.core.errors import StartupError
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer


def write_gguf(path: Path, reference: tokenizers.Tokenizer) -> bytes:
    model = json.loads(reference.to_str())["model"]
    vocab = reference.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path.read_bytes()


def test_a_gguf_file_encodes_as_the_tokenizer_it_was_made_of(tmp_path: Path, reference: tokenizers.Tokenizer) -> None:
    write_gguf(tmp_path / "m.gguf", reference)
    files = load_model_files(tmp_path / "m.gguf")
    text = "<|im_start|>user\nhello 12<|im_end|>"
    assert list(Tokenizer(files.tokenizer_json).encode(text)) == reference.encode(text).ids
    assert (files.max_context_tokens, files.eos_token) == (64, "<|im_end|>")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_gguf_file_raises_startup_error_alone(
    tmp_path: Path, reference: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    whole = write_gguf(tmp_path / "m.gguf", reference)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole) - 1))])
    for at in data.draw(st.lists(st.integers(0, len(whole)), max_size=3)):
        if at < len(damaged):
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "d.gguf").write_bytes(damaged)
    with pytest.raises(StartupError) as caught:
        load_model_files(tmp_path / "d.gguf")
    assert "\n" not in str(caught.value)
    assert "d.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("at", "damage", "why"),
    [
        (0, b"\xff" * 8, "cut short: byte "),
        (0, b"\xff\xff\xff\x7f\0\0\0\0", "cut short: byte "),
        (8, b"\xff", "is not UTF-8"),
    ],
)
@pytest.mark.parametrize("which", [0, 1, 300])
def test_a_damaged_string_of_a_vocabulary_is_told_of(
    at: int, damage: bytes, why: str, which: int, tmp_path: Path, reference: tokenizers.Tokenizer
) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf", reference))
    offset = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4 + 4 + 8
    for _ in range(which):
        offset += 8 + int.from_bytes(whole[offset : offset + 8], "little")
    whole[offset + at : offset + at + len(damage)] = damage
    (tmp_path / "d.gguf").write_bytes(whole)
    with pytest.raises(StartupError, match=why):
        load_model_files(tmp_path / "d.gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"model": 1, "vocab_size": "x", "eos_token": 3}'])
def test_a_damaged_folder_raises_startup_error_alone(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "config.json").write_text('{"vocab_size": 3, "max_position_embeddings": 4, "eos_token_id": [1, 2]}')
    assert load_model_files(tmp_path).eos_token_ids == (1, 2)
    (tmp_path / name).write_bytes(text)
    with pytest.raises(StartupError):
        load_model_files(tmp_path)


def test_a_tokenizers_files_are_enough_and_what_they_do_not_say_is_not_known(
    tmp_path: Path, reference: tokenizers.Tokenizer
) -> None:
    (tmp_path / "tokenizer.json").write_text(reference.to_str())
    files = load_model_files(tmp_path)
    assert files.vocab_size == Tokenizer(files.tokenizer_json).vocab_size
    assert (files.states_vocab_size, files.max_context_tokens, files.name) == (False, None, tmp_path.name)
    (tmp_path / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 4}')
    stated = load_model_files(tmp_path)
    assert (stated.vocab_size, stated.states_vocab_size, stated.max_context_tokens) == (512, True, 4)


@pytest.mark.parametrize(
    "tokenizer",
    ['{"model": {"vocab": [["a", 0.5]]}}', '{"model": {"vocab": {"a": "0"}}}', '{"model": {}, "added_tokens": [1]}'],
)
def test_a_tokenizer_without_ids_is_one_line_where_no_config_says_the_vocabulary(
    tmp_path: Path, tokenizer: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(StartupError) as caught:
        load_model_files(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_snapshot_of_a_hub_cache_has_its_repositorys_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--some-org--a--b" / "snapshots" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    assert load_model_files(folder).name == "some-org/a--b"


def test_a_folder_without_files_and_no_path_at_all_raise_startup_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.gguf", Path("\0")):
        with pytest.raises(StartupError):
            load_model_files(path)


@pytest.mark.weights
def test_the_real_models_files_are_read(smollm2_path: Path, stock_template: str) -> None:
    files = load_model_files(smollm2_path)
    assert files.chat_template == stock_template
    assert list(Tokenizer(files.tokenizer_json).encode("  12")) == [256, 33, 34]
