"""A text is encoded in a process of its own with the ids that a thread of the server gives it."""

import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.errors import TokenizationFailed, UnrenderableMessage
from stenograph.model.encode_apart import encode_apart
from stenograph.model.fast_encoder import CHECK_TEXTS
from stenograph.model.settings import EncoderKind
from stenograph.model.text_cuts import ENCODED_HERE
from stenograph.model.tokenizer import Tokenizer

TINY = tiny_tokenizer_json()
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", EncoderKind)
def test_the_ids_are_those_of_the_same_library(kind: EncoderKind) -> None:
    text = "".join(CHECK_TEXTS) * 100  # several pieces of the pipe
    assert len(text) > 1 << 18
    assert encode_apart(TINY, kind, text) == Tokenizer(TINY, prefer=kind).encode_plain(text)
    assert len(encode_apart(TINY, kind, "")) == 0


def test_a_text_without_a_place_for_a_cut_has_the_ids_of_the_whole() -> None:
    text = "a" + " " * (ENCODED_HERE + 1) + "\nb"
    plain = tokenizers.Tokenizer.from_str(TINY)
    expected = plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert list(Tokenizer(TINY).encode_plain(text)) == expected


def test_a_lone_surrogate_in_a_long_text_is_refused_in_words() -> None:
    with pytest.raises(UnrenderableMessage, match="surrogate"):
        Tokenizer(TINY).encode_plain(" " * (ENCODED_HERE + 1) + "\udcff")


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(TokenizationFailed, match=r"a text of 3 characters ended with exit code 1: .*StartupError"):
        encode_apart("{}" + " " * (1 << 20), EncoderKind.REFERENCE, "abc")


SIGNALLED = """
import os, signal, sys
from stenograph.model.encode_apart import encode_apart
from stenograph.model.settings import EncoderKind
from standins.tiny.tokenizer import tiny_tokenizer_json

class Text(str):
    def __getitem__(self, place):
        os.killpg(0, signal.SIGINT)  # the process is there, and waits for this piece
        return super().__getitem__(place)

signal.signal(signal.SIGINT, lambda *_: None)  # as a server that drains
print(len(encode_apart(tiny_tokenizer_json(), EncoderKind.REFERENCE, Text("abc"))))
"""


def test_ctrl_c_in_the_server_s_terminal_ends_no_encoding() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=False, cwd=ROOT, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
