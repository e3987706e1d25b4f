"""The file of engines' keys: read by address, or refused with its line and without a key in it."""

from pathlib import Path

import pytest

from stenograph.core.errors import StartupError
from stenograph.http.rule_files import engine_keys_of
from stenograph.http.settings import Settings


def read(folder: Path, text: str | bytes) -> dict[str, str]:
    file = folder / "keys.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return dict(engine_keys_of(Settings(engine_keys=file)))


def test_each_address_has_its_key(tmp_path: Path) -> None:
    assert read(tmp_path, '"http://10.0.0.1:30000/" = "a"\n"https://b" = "k-2"\n') == {
        "http://10.0.0.1:30000": "a",
        "https://b": "k-2",
    }
    assert engine_keys_of(Settings()) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"http://a" = "secret', "is not TOML"),
        (b"\xff", "is not TOML"),
        ('a = "secret"', "'a' in the file .* is no address"),
        ('"http://a" = 7', "the key of http://a in .* is not printable ASCII"),
        ('"http://a" = "secret key"', "the key of http://a in .* is not printable ASCII"),
        ('["http://a"]\nkey = "secret"', "the key of http://a in .* is not printable ASCII"),
    ],
)
def test_a_bad_file_is_refused_without_a_word_of_its_keys(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(StartupError, match=said) as refused:
        read(tmp_path, text)
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read the file"):
        engine_keys_of(Settings(engine_keys=tmp_path / "none.toml"))
