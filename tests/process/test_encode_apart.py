"""A text is encoded in a process of its own with the ids that a thread of the server gives it."""

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
