"""Which library encodes: the fast one exactly where it agrees with the reference."""

import json
import subprocess
import sys
from array import array
from functools import cache
from itertools import pairwise
from pathlib import Path

import fastokens
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from stenograph.core.errors import UnrenderableMessage
from stenograph.http.loaded_model import make_renderer
from stenograph.model.fast_encoder import (
    FastEncoder,
    ReferenceEncoder,
    check_texts,
    first_difference,
)
from stenograph.model.files import ModelFiles
from stenograph.model.settings import EncoderKind
from stenograph.model.text_cuts import ENCODED_AT_ONCE, Encode, TextCuts
from stenograph.model.tokenizer import Tokenizer
from stenograph.model.tokenizer_json import spelled_out

DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = {
    "type": "Split",
    "pattern": {"Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"},
    "behavior": "Isolated",
    "invert": False,
}
O200K = {
    **WORDS,
    "pattern": {
        "Regex": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    },
}
HAN = {**WORDS, "pattern": {"Regex": "[一-龥\u3040-ゟ゠-ヿ]+"}}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BARE = {**LEVEL, "use_regex": False}


def sequence(*parts: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


@pytest.fixture(scope="module")
def low_specials() -> str:
    """Added tokens that have the first ids of the model's own vocabulary: cut out, they leave gaps."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))], trainer)
    return tokenizer.to_str()


def changed(tokenizer_json: str, **members: object) -> str:
    return json.dumps({**json.loads(tokenizer_json), **members})


PRE_TOKENIZERS = [LEVEL, sequence(DIGITS, LEVEL), sequence(WORDS, BARE), {**LEVEL, "add_prefix_space": True}]


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("a 1\n.'sé\u0301<|im_end>"))
def test_the_fast_encoder_gives_the_references_ids(
    low_specials: str, pre_tokenizer: object, normalizer: object, text: str
) -> None:
    fast, reference = both(changed(low_specials, pre_tokenizer=pre_tokenizer, normalizer=normalizer))
    assert fast.encode(text) == reference.encode(text)
    assert fast.encode_plain(text) == reference.encode_plain(text)


CUT_ANYWHERE = [
    LEVEL,
    sequence(DIGITS, LEVEL),
    sequence(WORDS, BARE),
    sequence(O200K, BARE),
    sequence(HAN, WORDS, BARE),
    BARE,
    sequence({"type": "CharDelimiterSplit", "delimiter": "a"}, BARE),
]
CUT_BETWEEN_WORDS = sequence(O200K, BARE)
"""Letters without a case may end a word or not, for what is before them."""
CUT_BEFORE_SPACES = [{**LEVEL, "add_prefix_space": True}]
NOT_CUT: list[object] = [None]
NORMALIZERS = [None, {"type": "NFC"}, {"type": "Strip", "strip_left": True, "strip_right": True}]
PART_CHARS = 100
RUNS = st.tuples(
    st.text("aZé01½漢かカ𠮷ᄀ\u1161\u0301 \n\u3000，。、.'s/_<!", min_size=1, max_size=3), st.sampled_from([1, 2, 80])
)


@cache
def plain_of(tokenizer_json: str) -> tuple[tokenizers.Tokenizer, TextCuts]:
    """A tokenizer, and where it may cut texts."""
    plain = tokenizers.Tokenizer.from_str(tokenizer_json)
    return plain, TextCuts(plain, at_once=PART_CHARS)


def encode_by(plain: tokenizers.Tokenizer) -> Encode:
    return lambda text: array("i", plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def starts(plain: tokenizers.Tokenizer, cuts: TextCuts, text: str) -> list[int]:
    """Where the parts of a text begin."""
    return [start for start, _ in cuts.parts(encode_by(plain), text)]


def splits(plain: tokenizers.Tokenizer, text: str) -> list[str]:
    """The pieces in which BPE gets a text, whatever the merges are."""
    text = plain.normalizer.normalize_str(text) if plain.normalizer else text
    return [split for split, _ in plain.pre_tokenizer.pre_tokenize_str(text)] if plain.pre_tokenizer else [text]


@pytest.mark.parametrize("pre_tokenizer", [LEVEL, sequence(DIGITS, sequence(LEVEL)), *CUT_BEFORE_SPACES, None])
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("aZé01½漢\u0301 \n\u3000\x85.'strevmld"))
def test_a_byte_levels_words_are_split_alike_once_they_are_spelled_out(
    low_specials: str, pre_tokenizer: object, text: str
) -> None:
    spelled = spelled_out(pre_tokenizer)
    assert ('"use_regex": true' in json.dumps(spelled)) == (pre_tokenizer in CUT_BEFORE_SPACES)
    plain, again = (plain_of(changed(low_specials, pre_tokenizer=one))[0] for one in (pre_tokenizer, spelled))
    assert splits(again, text) == splits(plain, text)


@pytest.mark.parametrize("pre_tokenizer", [*CUT_ANYWHERE, *CUT_BEFORE_SPACES, *NOT_CUT])
@given(normalizer=st.sampled_from(NORMALIZERS), runs=st.lists(RUNS, min_size=3, max_size=6))
def test_the_parts_of_a_cut_text_have_the_ids_of_the_whole(
    low_specials: str, pre_tokenizer: object, normalizer: object, runs: list[tuple[str, int]]
) -> None:
    plain, cuts = plain_of(changed(low_specials, pre_tokenizer=pre_tokenizer, normalizer=normalizer))
    text = "".join(unit * num for unit, num in runs)
    ids = [token_id for _, part in cuts.parts(encode_by(plain), text) for token_id in part]
    assert ids == list(encode_by(plain)(text))


@pytest.mark.parametrize(
    ("pre_tokenizer", "unit"),
    [
        (pre_tokenizer, unit)
        for pre_tokenizer in CUT_ANYWHERE
        for unit in ("春", "🙂", "é?", "½漢", "ꙮ𠮷", "<春> ")
        if not (unit.isalpha() and pre_tokenizer == CUT_BETWEEN_WORDS)
    ],
)
def test_a_text_of_many_ids_is_cut_with_words_or_without(low_specials: str, pre_tokenizer: object, unit: str) -> None:
    plain, cuts = plain_of(changed(low_specials, pre_tokenizer=pre_tokenizer))
    found = starts(plain, cuts, unit * 1000)
    assert max(end - start for start, end in pairwise(found)) < PART_CHARS + 64
    assert len(unit * 1000) - found[-1] < 4 * PART_CHARS


@pytest.mark.parametrize("pre_tokenizer", [*CUT_BEFORE_SPACES, CUT_BETWEEN_WORDS, *NOT_CUT])
def test_a_text_is_not_cut_where_its_parts_would_have_other_ids(low_specials: str, pre_tokenizer: object) -> None:
    """A space is added before each part; without a pre-tokenizer the characters are no tokens."""
    plain, cuts = plain_of(changed(low_specials, pre_tokenizer=pre_tokenizer))
    text = "春" * PART_CHARS
    found = starts(plain, cuts, f"{text} {text * 5}")
    assert found == ([0] if pre_tokenizer in NOT_CUT else [0, PART_CHARS])


@pytest.mark.parametrize(
    ("first", "unit", "last"),
    [("!", "\n", " \n"), ("!!!!", "\n", " \n"), ("!\n", "/", "!!"), ("a", "º", "Ca"), ("a", "漢", "Zb")],
)
def test_a_run_is_not_cut_where_its_ends_decide_together_where_a_piece_ends(first: str, unit: str, last: str) -> None:
    """o200k's pattern ends a piece before `last`, for what is before the run; the last part alone has no such end."""
    at_border = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(unit + last[0])[0][0]
    spelled = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(at_border[:end], at_border[end]) for end in range(1, len(at_border))]
    vocab = {token: number for number, token in enumerate([*spelled, *map("".join, merges)])}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    plain, cuts = plain_of(json.dumps({"version": "1.0", "pre_tokenizer": sequence(O200K, BARE), "model": model}))
    for num in range(300, 304):
        text = first + unit * num + last
        ids = [token_id for _, part in cuts.parts(encode_by(plain), text) for token_id in part]
        assert ids == list(encode_by(plain)(text))


def test_a_pair_that_is_a_token_is_not_cut(low_specials: str) -> None:
    plain, cuts = plain_of(changed(low_specials, pre_tokenizer=LEVEL))
    assert len(encode_by(plain)("in" * 500)) == 500
    found = starts(plain, cuts, "in" * 500)
    assert len(found) > 5
    assert not any(start % 2 for start in found)


def test_a_part_that_cannot_go_on_with_the_one_before_is_encoded_with_it(low_specials: str) -> None:
    """An encoder that has no ids for a text that does not begin as the whole: all of it is encoded at last."""
    plain, cuts = plain_of(changed(low_specials, pre_tokenizer=LEVEL))
    text = "X" + "no" * 500
    right = encode_by(plain)

    def encode(part: str) -> "array[int]":
        return right(part) if part[0] == "X" else array("i")

    assert [(start, list(ids)) for start, ids in cuts.parts(encode, text)] == [(0, list(right(text)))]


@pytest.mark.parametrize("kind", list(EncoderKind))
def test_a_long_text_has_the_ids_of_its_parts(low_specials: str, kind: EncoderKind) -> None:
    tokenizer = Tokenizer(low_specials, prefer=kind)
    text = "春眠不觉晓，处处闻啼鸟。\n" * 21_000
    whole = tokenizers.Tokenizer.from_str(low_specials)
    ids = whole.encode(text, add_special_tokens=False).ids
    assert list(tokenizer.encode_plain(text)) == list(tokenizer.encode(text)) == ids
    assert len(starts(whole, TextCuts(whole, at_once=ENCODED_AT_ONCE), text)) == 2


_BOTH: dict[str, tuple[Tokenizer, Tokenizer]] = {}


def both(tokenizer_json: str) -> tuple[Tokenizer, Tokenizer]:
    if tokenizer_json not in _BOTH:
        fast, reference = (Tokenizer(tokenizer_json, prefer=kind) for kind in EncoderKind)
        assert (fast.encoder, fast.why_not_preferred) == (EncoderKind.FASTOKENS, "")
        assert (reference.encoder, reference.why_not_preferred) == (EncoderKind.REFERENCE, "")
        _BOTH[tokenizer_json] = fast, reference
    return _BOTH[tokenizer_json]


def test_a_vocabulary_with_gaps_where_control_tokens_were_never_gives_their_ids(low_specials: str) -> None:
    fast, _ = both(low_specials)
    assert sorted(fast.added_tokens.values()) == [0, 1, 2]
    for text in [*check_texts(), *fast.added_tokens, "\x00\x01\x02", "".join(fast.added_tokens)]:
        ids = fast.encode_plain(text)
        assert {0, 1, 2}.isdisjoint(ids)
        assert fast.decode(ids) == text


def test_a_tokenizer_that_the_fast_library_refuses_is_served_by_the_reference(low_specials: str) -> None:
    scripts = changed(low_specials, pre_tokenizer=sequence({"type": "UnicodeScripts"}, BARE))
    tokenizer = Tokenizer(scripts)
    assert tokenizer.encoder is EncoderKind.REFERENCE
    assert "fastokens cannot load this tokenizer" in tokenizer.why_not_preferred
    assert "\n" not in tokenizer.why_not_preferred
    assert tokenizer.encode("<|im_end|>a1") == Tokenizer(scripts, prefer=EncoderKind.REFERENCE).encode("<|im_end|>a1")


def test_a_server_says_in_one_line_why_it_uses_the_reference(
    low_specials: str, caplog: pytest.LogCaptureFixture
) -> None:
    scripts = changed(low_specials, pre_tokenizer=sequence({"type": "UnicodeScripts"}, BARE))
    for tokenizer_json in (low_specials, scripts):
        make_renderer(files_of(tokenizer_json), "chatml")
    assert [record.getMessage() for record in caplog.records] == [
        f"text is encoded by the slower reference tokenizer: {Tokenizer(scripts).why_not_preferred}"
    ]


def files_of(tokenizer_json: str) -> ModelFiles:
    return ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tokenizer_json,
        chat_template=None,
        bos_token=None,
        eos_token="<|im_end|>",
        eos_token_ids=(),
        vocab_size=420,
        max_context_tokens=64,
        architecture="llama",
    )


def test_a_tokenizer_that_the_fast_library_encodes_otherwise_is_served_by_the_reference(low_specials: str) -> None:
    model = {**json.loads(low_specials)["model"], "dropout": 0.9}  # merges are left out at random
    tokenizer = Tokenizer(changed(low_specials, model=model))
    assert tokenizer.encoder is EncoderKind.REFERENCE
    assert "differently" in tokenizer.why_not_preferred


def test_the_check_names_the_first_text_that_differs(reference: tokenizers.Tokenizer, low_specials: str) -> None:
    one, other = ReferenceEncoder(reference.to_str()), ReferenceEncoder(low_specials)
    assert first_difference(one, other, ["", "a"]) == "a"
    assert first_difference(one, one, check_texts()) is None


def test_a_text_that_the_fast_library_gives_up_on_is_encoded_by_the_reference(low_specials: str) -> None:
    plain = changed(low_specials, pre_tokenizer=sequence(WORDS, BARE), added_tokens=[])
    reference = ReferenceEncoder(plain)
    limited = FastEncoder(plain, reference, lambda text: fastokens.Tokenizer.from_json_str(text, pcre2_match_limit=1))
    text = "several words, " * 40 + "   \n"
    with pytest.raises(ValueError, match="limit"):
        fastokens.Tokenizer.from_json_str(plain, pcre2_match_limit=1).encode(text)
    assert limited.encode(text) == reference.encode(text)


@pytest.mark.parametrize("kind", list(EncoderKind))
def test_a_lone_surrogate_is_the_callers_error_whatever_encodes(low_specials: str, kind: EncoderKind) -> None:
    with pytest.raises(UnrenderableMessage, match="U\\+DFFF"):
        Tokenizer(low_specials, prefer=kind).encode_plain("a\udfff")


def test_without_the_fast_library_the_reference_serves(low_specials: str, tmp_path: Path) -> None:
    (tmp_path / "fastokens.py").write_text("raise ImportError('no wheel for this machine')")
    (tmp_path / "tokenizer.json").write_text(low_specials)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from stenograph.model.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer(Path(sys.argv[1], 'tokenizer.json').read_text())\n"
        "print(tokenizer.encoder, tokenizer.why_not_preferred, tokenizer.encode('<|im_end|>').tolist(), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "tokenizers|fastokens cannot be imported: no wheel for this machine|[2]\n"
