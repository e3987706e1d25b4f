"""Text of others has no control characters on a terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.cli.terminal_text import safe_line, safe_text

BIDI = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}

TEXTS = st.text(st.characters(categories=["Cc", "Cf", "Cs", "Ll", "Zl", "Zp", "So"]))


@given(TEXTS)
def test_no_control_character_is_left_and_all_else_is(text: str) -> None:
    for shown, kept in ((safe_text(text), "\n\t"), (safe_line(text), "")):
        assert len(shown) == len(text)
        for before, after in zip(text, shown, strict=True):
            assert unicodedata.category(after) not in {"Cc", "Cs", "Zl", "Zp"} or after in kept
            assert unicodedata.bidirectional(after) not in BIDI
            if unicodedata.category(before) in {"Ll", "So"} or before in kept:
                assert after == before
        shown.encode()


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]0;title\x07\x1b[2Jred", "␛]0;title␇␛[2Jred"),
        ("a\rb\x7f\x9b31m", "a␍b␡\N{REPLACEMENT CHARACTER}31m"),
        ("a\tb\nc", "a\tb\nc"),
        ("\u202eabc", "\N{REPLACEMENT CHARACTER}abc"),
    ],
)
def test_escape_sequences_are_shown_and_not_obeyed(hostile: str, shown: str) -> None:
    assert safe_text(hostile) == shown


def test_a_line_stays_one_line() -> None:
    assert safe_line("a\nb\tc") == "a␊b␉c"
