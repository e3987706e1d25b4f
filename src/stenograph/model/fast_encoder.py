"""Plain text to token ids, by the fastest library in agreement with the reference: fastokens, else `tokenizers`.

Owns the choice. Both libraries load one plain tokenizer, without added tokens, and encode the same varied strings; on
any difference, or where fastokens is not there or cannot load it, the reference encodes everything. Both release the
GIL. Knows nothing of added tokens, spans or messages.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import tokenizers

from stenograph.core.errors import StartupError
from stenograph.core.types import ID_TYPECODE, token_ids
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer_json import spelled_out

IDS_AT_ONCE = 1 << 18
"""Numbers made ids in one call, with the GIL held: a millisecond."""


class _FlatTokenizer(Protocol):
    def encode_batch_flat(self, inputs: list[str]) -> tuple[bytes, bytes]: ...


_load_fast: Callable[[str], _FlatTokenizer] | None
_why_absent = ""
try:
    import fastokens
except ImportError as error:  # there is no wheel for every machine
    _load_fast = None
    _why_absent = f"fastokens cannot be imported: {error}"
else:
    _load_fast = fastokens.Tokenizer.from_json_str


class Encoder(Protocol):
    """Encodes plain text. May be called from any thread, and is never reconfigured."""

    kind: EncoderKind
    plain: tokenizers.Tokenizer
    """The reference's."""

    def encode(self, text: str) -> "array[int]":
        """Ids [T]. Raises TypeError or UnicodeEncodeError: the text has a lone surrogate."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEncoder:
    """An encoder, and why it is not the preferred one; empty if it is."""

    encoder: Encoder
    why_not_preferred: str = ""


def choose_encoder(
    plain_json: str, sample_texts: Iterable[str] = (), *, prefer: EncoderKind = EncoderKind.FASTOKENS
) -> ChosenEncoder:
    """The preferred encoder if it agrees with the reference on CHECK_TEXTS and `sample_texts`; else the reference.

    `plain_json` is a tokenizer.json without added tokens. Raises StartupError: the reference refuses it.
    """
    reference = ReferenceEncoder(plain_json)
    if prefer is EncoderKind.REFERENCE:
        return ChosenEncoder(encoder=reference)
    if _load_fast is None:
        return ChosenEncoder(encoder=reference, why_not_preferred=_why_absent)
    try:
        fast = FastEncoder(plain_json, reference, _load_fast)
        different = first_difference(fast, reference, (*check_texts(), *sample_texts))
    except ValueError as error:  # the library's only one
        why = f"fastokens cannot load this tokenizer: {' '.join(str(error).split())}"
        return ChosenEncoder(encoder=reference, why_not_preferred=why)
    if different is not None:
        why = f"fastokens and tokenizers encode {different[:40]!r} differently"
        return ChosenEncoder(encoder=reference, why_not_preferred=why)
    return ChosenEncoder(encoder=fast)


class ReferenceEncoder:
    """Hugging Face's `tokenizers`, the reference for every other encoder."""

    kind = EncoderKind.REFERENCE

    def __init__(self, plain_json: str) -> None:
        try:
            self.plain = tokenizers.Tokenizer.from_str(plain_json)
        except Exception as error:  # the library raises Exception itself
            raise StartupError(f"tokenizer.json: the tokenizer library refuses it: {error}") from error

    def encode(self, text: str) -> "array[int]":
        """Ids [T]. Of the library's calls the batch one releases the GIL; `encode` holds it throughout."""
        return token_ids(self.plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class FastEncoder:
    """fastokens. If it cannot encode a text, the reference does.

    It takes no vocabulary with gaps, and cutting added tokens out of one leaves gaps. So its vocabulary is numbered
    anew without them, in the same order, and `_ids` turns its numbers into ids: it has none for an added token.
    """

    kind = EncoderKind.FASTOKENS

    def __init__(self, plain_json: str, reference: ReferenceEncoder, load: "Callable[[str], _FlatTokenizer]") -> None:
        document = msgspec.json.decode(plain_json, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(document["model"], type=dict[str, msgspec.Raw])  # its merges go as they come
        vocab = sorted(msgspec.json.decode(model["vocab"], type=dict[str, int]).items(), key=lambda item: item[1])
        self._ids = np.array([token_id for _, token_id in vocab], dtype=np.dtype(ID_TYPECODE))
        dense = {**model, "vocab": {text: number for number, (text, _) in enumerate(vocab)}}
        cuts = spelled_out(msgspec.json.decode(document.get("pre_tokenizer", b"null")))
        self._tokenizer = load(msgspec.json.encode({**document, "model": dense, "pre_tokenizer": cuts}).decode())
        self._reference = reference
        self.plain = reference.plain

    def encode(self, text: str) -> "array[int]":
        """Ids [T], without a Python object for each."""
        try:
            numbers, _ = self._tokenizer.encode_batch_flat([text])
        except ValueError:  # a surrogate, or a limit of its regular expressions
            return self._reference.encode(text)
        found = np.frombuffer(numbers, dtype="<u4")
        ids = token_ids()
        for start in range(0, len(found), IDS_AT_ONCE):
            ids.frombytes(self._ids[found[start : start + IDS_AT_ONCE]].tobytes())
        return ids


def first_difference(encoder: Encoder, reference: Encoder, texts: Iterable[str]) -> str | None:
    """The first of `texts` with a difference between two encoders."""
    return next((text for text in texts if encoder.encode(text) != reference.encode(text)), None)


CHECK_TEXTS = (
    "",
    " ",
    "a",
    "Hello, world! It's 12:34, isn't it? I'LL SAY: they've gone; we'd WE'D 'S 's'",
    " leading, trailing \n",
    "a  b   c    d\te\t\tf\r\ng\n\nh\n \n  \n\t\n i \r j",
    " " * 70 + "x" + "\n" * 70 + "\t" * 33 + "y" + " \n" * 20,
    "1 12 123 1234 1234567890 3.14159 -2e-10 0x1F 1,000,000 ½ ² ٣٤ १२३ Ⅻ ①",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # done\n\nif __name__ == \"__main__\":\n\tf(1)\n",
    '{"a": [1, 2.5, null, true], "b": "\\u00e9\\n", "c": {"d": "<tag attr=\'v\'/>"}}',
    "for (int i = 0; i < n; ++i) { a[i] <<= 2; } // => {}[]()<>|&^%$#@!~`",
    "https://example.org/a_b-c/%7Ed?e=f&g=h#i user.name+tag@host.example C:\\dir\\file.txt ../../x",
    "<|im_start|>user\n<|im_end|> <|endoftext|> [INST] <<SYS>> </s> <s> <think>\n</think> <tool_call> <｜User｜>",
    "<unk> <pad> [UNK] ▁ Ġ Ċ Ä âĢ ĉ Ġthe ġ",
    "naïve café Ünïcödé ÅÄÖ åäö ß ſ ı İ Ǆ ﬁ ﬀ Ω Ω K Å ñ ñ é é",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก ሰላም გამარჯობა",
    "漢字かな交じり文、カタカナｶﾀｶﾅ。你好，世界！中文和English混排123个字 한국어 문장입니다. 𠮷野家",
    "🙂👍🏽👩‍👩‍👧‍👦🇯🇵🏳️‍🌈❤️ ☺ ☺️ 1️⃣ emoji🙂in🙂words",
    "\x00\x01\x1b[31m\x7f\x80\x85\x9f\xa0\xad\u1680\u180e\u2000\u200b\u200d\u2028\u2029\u202f\u2060\u3000\ufeff",
    "\ufdd0\ufdef\ufffd\ufffe\uffff\U0001ffff\U0010ffff \ue000\uf8ff\U000f0000 �Ã©â€™",
    "Z̸͎̈a̵̰͝l̶̺̈́g̷̱̐o̴̪͒ \u0301x e\u0301\u0327 \u202eright-to-left\u202c",
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 7,
    "QUFBQkJCQ0NDREREMDEyMzQ1Njc4OSsvPT0" * 12 + "==",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + "ab" * 90 + "abc" * 90,
    "______ ------ ====== ...... !!!!!! ?!?! ((((( ))))) \"\"\"'''``` **bold** ~~~ ++ -- && || == != <= >= => ->",
    "camelCaseWordsAndSnake_case_words_AND_CONST_NAMES x1y2z3 a1b2 v1.2.3-rc.4+build.5",
)
"""Texts for every encoder to encode as the reference does, beside `_code_points`."""


def check_texts() -> Iterator[str]:
    """The strings of the start-up check: CHECK_TEXTS, and code points of every plane in words, numbers and spaces."""
    yield from CHECK_TEXTS
    for points in (range(0x700), range(0x700, 0xD800, 61), range(0xE000, 0x32000, 211), range(0xE0000, 0x110000, 4001)):
        yield "".join(f"a{chr(point)}1{chr(point)} {chr(point)}\n" for point in points)
