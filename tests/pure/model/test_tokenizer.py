"""Text to ids and back."""

import json
import time
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer import Span, Tokenizer

PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "<x>",
    "<x>y",
    "<mask>",
    "<é>",
    " ",
    "\n",
    "\x1c",
    "\u3000",
    "hello",
    "<",
    "é",
    "𝄞",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)).map("".join)


@given(text=TEXTS)
def test_trusted_text_encodes_as_the_reference_does(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    assert list(tokenizer.encode(text)) == reference.encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
def test_plain_text_never_has_an_added_token_and_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    assert set(tokenizer.added_tokens.values()).isdisjoint(ids)
    assert tokenizer.decode(ids) == text


@given(texts=st.lists(TEXTS, max_size=4))
def test_untrusted_spans_have_no_added_token_and_do_not_break_the_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    spans = [Span(text=text, trusted=False) for text in texts]
    assert tokenizer.encode_spans(spans) == tokenizer.encode_plain("".join(texts))


def test_an_added_token_half_in_untrusted_text_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_spans([Span(text="<|im_", trusted=True), Span(text="end|>", trusted=False)])
    assert ids == tokenizer.encode_plain("<|im_end|>")


@given(data=st.data(), skip=st.booleans())
def test_a_stream_joined_is_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size)))
    stream = tokenizer.text_stream(skip_special=skip)
    joined = "".join(stream.push(i) for i in ids) + stream.flush()
    assert joined == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", list(EncoderKind))
def test_four_threads_that_share_a_tokenizer_get_what_one_alone_gets(
    reference: tokenizers.Tokenizer, kind: EncoderKind
) -> None:
    texts = [f"{PIECES[n % len(PIECES)] * (n % 7)}hello {n} {'user é𝄞' * (n % 50)}<|im_end|>" for n in range(400)]
    alone, shared = Tokenizer(reference.to_str(), prefer=kind), Tokenizer(reference.to_str(), prefer=kind)
    expected = [(alone.encode(text), alone.encode_plain(text)) for text in texts]

    def encode_all(_thread: int) -> list[tuple["array[int]", "array[int]"]]:
        return [(shared.encode(text), shared.encode_plain(text)) for text in texts]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode_all, range(4))) == [expected] * 4


@pytest.mark.timed
def test_white_space_before_a_token_that_swallows_it_is_looked_for_in_linear_time(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    """CPU time of this thread, not wall time: 2 ms here; a search from each space on takes seconds."""
    text = " " * 50_000 + "x \u3000<mask>"
    began = time.thread_time()
    ids = tokenizer.encode(text)
    assert time.thread_time() - began < 0.5
    assert list(ids) == reference.encode(text, add_special_tokens=False).ids


def test_a_lone_surrogate_is_the_callers_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnrenderableMessage, match="U\\+D800"):
        tokenizer.encode("a\ud800<x>")


@pytest.mark.parametrize("flag", ["single_word", "normalized"])
def test_an_added_token_that_is_no_literal_stops_the_start(reference: tokenizers.Tokenizer, flag: str) -> None:
    document = json.loads(reference.to_str())
    document["added_tokens"][0][flag] = True
    document["normalizer"] = {"type": "NFC"}
    with pytest.raises(StartupError, match="unsupported"):
        Tokenizer(json.dumps(document))


@pytest.mark.parametrize("text", ["", "nope", "[]", "{}", '{"model": {"type": "WordPiece"}}', "[" * 100_000])
def test_an_invalid_tokenizer_stops_the_start(text: str) -> None:
    with pytest.raises(StartupError):
        Tokenizer(text)


@pytest.mark.parametrize(
    ("merges", "why"),
    [
        (["a b c"], "a merge is two tokens, got 'a b c'"),
        ([["h", "e"], ["a"]], "a merge is two tokens, got \"['a']\""),
        ([["h", "e"], ["a", 1]], "a merge is two tokens"),
        (["h e", 7], "a merge is two tokens, got '7'"),
        ([["h", "e"], {"a": "b", "c": "d"}], "a merge is two tokens"),
        ([["h", "e"], ["<|im_", "end|>"]], "the merge '<|im_' + 'end|>' makes or uses an added token"),
        (["h e", "<|im_end|> x"], "the merge '<|im_end|>' + 'x' makes or uses an added token"),
        (["h e", "x <|im_end|>"], "the merge 'x' + '<|im_end|>' makes or uses an added token"),
    ],
)
def test_a_merge_that_is_none_or_makes_an_added_token_stops_the_start(
    reference: tokenizers.Tokenizer, merges: list[object], why: str
) -> None:
    document = json.loads(reference.to_str())
    document["model"]["merges"] = merges
    with pytest.raises(StartupError) as caught:
        Tokenizer(json.dumps(document))
    assert why in str(caught.value)


def test_the_ids_of_a_long_text_are_added_in_pieces(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "some text \u4e2d " * 20
    whole = tokenizer.encode(f"<|im_start|>{text}<|im_end|>{text}")
    monkeypatch.setattr("stenograph.model.tokenizer.IDS_AT_ONCE", 7)
    assert tokenizer.encode(f"<|im_start|>{text}<|im_end|>{text}") == whole
