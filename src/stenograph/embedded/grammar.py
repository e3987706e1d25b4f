"""Guided decoding with llguidance: grammars compiled on threads, cached by content, stepped one token at a time.

Owns what a `Grammar` means to llguidance. A compiled grammar is never used itself, only copied; a finished one is never
advanced. A grammar's error is its request's, and nobody else's.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.sampler import Allowed
from stenograph.render.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 256
"""Compiled grammars that are kept, the most recently used."""

_JSON_STYLE: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""No free white space: a small model would fill its budget with it. The separators are Python's, as in most text."""


class BadGrammar(Exception):
    """A grammar that does not compile; the message is llguidance's."""


class GrammarState:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._only_eos = np.zeros(vocab_size, np.bool_)
        self._only_eos[list(eos_ids)] = True

    @property
    def is_finished(self) -> bool:
        """Whether only the end can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Allowed:
        """Which ids [V] may come next. Raises BadGrammar when the matcher has failed."""
        if self._matcher.is_error():
            raise BadGrammar(_one_line(self._matcher.get_error()))
        if self.is_finished:
            return self._only_eos
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise BadGrammar(_one_line(self._matcher.get_error()))
        allowed = np.zeros(self._vocab_size, np.bool_)
        unpacked = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: len(unpacked)] = unpacked
        return allowed

    def accept(self, token_id: int) -> None:
        """Step over a token that was drawn; a finished grammar stays where it is. Raises BadGrammar."""
        if not self.is_finished and not self._matcher.consume_token(token_id):
            raise BadGrammar(_one_line(self._matcher.get_error()))


class _PlainTokenizer:
    """Our tokenizer as llguidance wants one. Text that a grammar forces is plain: it never becomes an added token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.added_tokens.values())
        self.tokens = [tokenizer.bytes_of(id_) for id_ in range(vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode_plain(decoded).tolist()


class GrammarCompiler:
    """Compiles grammars off the caller's thread. Close it with `close`."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: tuple[int, ...], num_threads: int = 1
    ) -> None:
        wrapped = TokenizerWrapper(_PlainTokenizer(tokenizer, vocab_size, eos_ids))
        self._tokenizer = LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<GrammarCompiler {len(self._compiled)} cached>"

    def compile(self, grammar: Grammar, when_done: Callable[[], None]) -> "Future[LLMatcher]":
        """Begin to compile; `when_done` is called on some thread when `state` can be asked for."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        future.add_done_callback(lambda _: when_done())
        return future

    def state(self, compiled: "Future[LLMatcher]") -> GrammarState:
        """A fresh copy of a compiled grammar. Raises BadGrammar if it did not compile."""
        matcher = compiled.result().deep_copy()
        return GrammarState(matcher, vocab_size=self._vocab_size, eos_ids=self._eos_ids)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _llguidance_grammar(grammar), log_level=0)
        except ValueError as error:
            raise BadGrammar(_one_line(str(error))) from error
        if matcher.is_error():
            raise BadGrammar(_one_line(matcher.get_error()))
        return matcher


def _llguidance_grammar(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_STYLE)
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=_JSON_STYLE)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICE:
            try:
                choices = msgspec.json.decode(grammar.source, type=list[str])
            except msgspec.DecodeError as error:
                raise BadGrammar(f"choices are a list of strings: {error}") from error
            if not choices or not all(choices):
                raise BadGrammar("choices are at least one, and none is empty")
            alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_lark_of(grammar.source))


def _lark_of(ebnf: str) -> str:
    try:
        return gbnf_to_lark(ebnf)
    except Exception as error:  # it raises nothing narrower for some of a client's mistakes
        raise BadGrammar(f"it is no EBNF: {_one_line(str(error))}") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
