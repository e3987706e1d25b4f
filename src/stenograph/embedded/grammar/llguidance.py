"""Guided decoding with llguidance: translates a `Grammar`, and bounds the cost of a client's grammar.

A compiled grammar is never used itself, only copied, because a matcher serves one request; a finished one is never
advanced. `compute` and the construction of a matcher release the GIL, `consume_token` (10 µs) and `deep_copy` hold it.

llguidance cannot do without an end, and takes id 0 for it where it is given none. A vocabulary without one is given an
end of its own, behind its last id: the matcher may take it, and no mask given out has it.
"""

import json
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.base import BadGrammar, choices_of, one_line
from stenograph.embedded.grammar.llguidance_limits import check_limits
from stenograph.embedded.sampler import Allowed
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.grammar.lark import JSON_STYLE

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_max_items=10_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)
"""Limits of a matcher, so that one request's grammar cannot delay its batch: a step takes some 20 ms at most, 0.2 s
where it is refused, and a request 100 MB. With llguidance's own limits an ambiguous grammar took 0.9 s a step and
`(a{1000}){1000}` 0.8 s and 200 MB until it was refused. Schemas of 500 patterns, 5000 values of an enum or 100 formats
come nowhere near these."""

_JSON_STYLE = cast("JsonCompileOptions", {**JSON_STYLE, "lenient": False})
"""Never lenient, whatever the schema says of it: an unknown constraint is refused."""


class LlguidanceState:
    """One request's position in its grammar."""

    def __init__(self, matcher: LLMatcher, *, only_eos: Allowed) -> None:
        self._matcher = matcher
        self._only_eos = only_eos
        self._vocab_size = len(only_eos)
        self._has_eos = bool(only_eos.any())
        num_ids = self._vocab_size + (not self._has_eos)
        self._bits = np.zeros((num_ids + 31) // 32 * 4, np.uint8)
        self._address = self._bits.ctypes.data

    @property
    def is_finished(self) -> bool:
        """Whether only the end can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self) -> Allowed:
        """The ids [V] allowed next. Raises BadGrammar when the matcher has failed."""
        if self.is_finished:
            return self._only_eos
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._check()
        mask = np.unpackbits(self._bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not (self._has_eos or mask.any()):
            self._matcher.consume_token(self._vocab_size)  # nothing but the end, which cannot be sampled
        return mask

    def accept(self, token_id: int) -> None:
        """Step over a sampled token; a finished grammar stays where it is. Raises BadGrammar."""
        if not self.is_finished:
            self._matcher.consume_token(token_id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadGrammar(_error_of(self._matcher))


class _CompiledLlguidance:
    """A matcher at its beginning, with its first mask computed; copies take it with them."""

    def __init__(self, matcher: LLMatcher, *, only_eos: Allowed) -> None:
        self._matcher = matcher
        self._only_eos = only_eos

    def start(self) -> LlguidanceState:
        """A copy; they share only constant data."""
        return LlguidanceState(self._matcher.deep_copy(), only_eos=self._only_eos)


class _PlainTokenizer:
    """Our tokenizer as llguidance wants one. Text forced by a grammar is plain: it never becomes an added token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else vocab_size
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.added_tokens.values())
        self.tokens = [tokenizer.bytes_of(id_) for id_ in range(vocab_size)]
        if not eos_ids:
            self.tokens.append(b"")

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode_plain(decoded).tolist()


class LlguidanceBackend:
    """llguidance over one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        plain = _PlainTokenizer(tokenizer, vocab_size, eos_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(plain), n_vocab=len(plain.tokens), eos_token=list(eos_ids) or None
        )
        self._only_eos = np.zeros(vocab_size, np.bool_)
        self._only_eos[list(eos_ids)] = True
        self._only_eos.flags.writeable = False

    def compile(self, grammar: Grammar) -> _CompiledLlguidance:
        """Compile, and compute the first mask. Raises BadGrammar."""
        check_limits(grammar)
        try:
            matcher = LLMatcher(self._tokenizer, _source_for(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise BadGrammar(one_line(str(error))) from error
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise BadGrammar(_error_of(matcher))
        compiled = _CompiledLlguidance(matcher, only_eos=self._only_eos)
        if not (self._only_eos.any() or compiled.start().allowed().any()):
            raise BadGrammar("no token satisfies it")
        return compiled


def _error_of(matcher: LLMatcher) -> str:
    """The matcher's error, without llguidance's traces."""
    return one_line(matcher.get_error().split("\n<")[0])


def _source_for(grammar: Grammar) -> str:
    """The grammar in llguidance's own words. Raises BadGrammar, and ValueError for invalid JSON."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_STYLE)
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=_JSON_STYLE)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICE:
            alternatives = " | ".join(json.dumps(text) for text in choices_of(grammar.source))  # ASCII: no raw U+007F
            # One lexeme: as alternatives of a rule they would be held to llguidance's limit of 2000.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_lark_of(grammar.source))


def _lark_of(ebnf: str) -> str:
    try:
        return gbnf_to_lark(ebnf)
    except Exception as error:  # it raises nothing narrower for some of a client's mistakes
        raise BadGrammar(f"it is not valid EBNF: {one_line(str(error))}") from error
