"""Guided decoding with xgrammar, where it is installed and configured: translates a `Grammar`.

Needs xgrammar and with it torch, which are an extra (`pip install -e '.[xgrammar]'`) and are imported when the
first XgrammarBackend is made. All of its calls release the GIL. It has no Lark grammars here, and so no forced tool
calls: its Lark reads the schemas within as it reads schemas, skipping what it does not know (xgrammar_schema.py).
"""

import importlib
import json
from typing import Any, TypeAlias

import numpy as np

from stenograph.core.errors import StartupError
from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.base import BadGrammar, choices_of, one_line
from stenograph.embedded.grammar.xgrammar_schema import check_regex, check_schema
from stenograph.embedded.sampler import Allowed
from stenograph.model.tokenizer import Tokenizer

Xgrammar: TypeAlias = Any
"""The module and its objects; types are checked where there is no xgrammar."""

MAX_SOURCE_CHARS = 32 * 1024
"""Longest source: compiling takes long, 3 s for a schema of 12 properties, 4 of them patterns."""

_ALL = np.int32(-1)


class XgrammarState:
    """One request's position in its grammar."""

    def __init__(self, matcher: Xgrammar, *, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._words = np.full((1, (vocab_size + 31) // 32), _ALL, np.int32)

    @property
    def is_finished(self) -> bool:
        """Whether only the end can follow."""
        if not self._matcher.is_completed():
            return False
        allowed = self.allowed()
        allowed[self._eos_ids] = False
        return not allowed.any()

    def allowed(self) -> Allowed:
        """The ids [V] that may come next. Raises BadGrammar."""
        self._words.fill(_ALL)  # what is left as it is when everything is allowed
        try:
            self._matcher.fill_next_token_bitmask(self._words)
        except RuntimeError as error:
            raise BadGrammar(one_line(str(error))) from error
        unpacked = np.unpackbits(self._words.view(np.uint8)[0], count=self._vocab_size, bitorder="little")
        return unpacked.view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Step over a sampled token; a finished grammar stays where it is. Raises BadGrammar."""
        if not self._matcher.accept_token(token_id) and not self.is_finished:
            raise BadGrammar(f"token {token_id} does not satisfy the grammar")


class _CompiledXgrammar:
    """A compiled grammar, which is never changed."""

    def __init__(self, module: Xgrammar, compiled: Xgrammar, *, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._module = module
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    def start(self) -> XgrammarState:
        """A matcher of its own."""
        matcher = self._module.GrammarMatcher(self._compiled)
        return XgrammarState(matcher, vocab_size=self._vocab_size, eos_ids=self._eos_ids)


class XgrammarBackend:
    """xgrammar over one vocabulary. Raises StartupError where it is not installed."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._module = import_xgrammar()
        added = set(tokenizer.added_tokens.values())
        # A token without bytes is never allowed: text that a grammar forces never becomes an added token.
        vocabulary = [b"" if id_ in added else tokenizer.bytes_of(id_) for id_ in range(vocab_size)]
        info = self._module.TokenizerInfo(
            vocabulary, self._module.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_ids)
        )
        self._compiler = self._module.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    def compile(self, grammar: Grammar) -> _CompiledXgrammar:
        """Compile, and compute the first mask. Raises BadGrammar."""
        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise BadGrammar(f"it has {len(grammar.source)} characters; xgrammar accepts at most {MAX_SOURCE_CHARS}")
        try:
            compiled = self._compile(grammar)
        except (RuntimeError, ValueError, TypeError) as error:  # what its C++ throws
            raise BadGrammar(one_line(str(error))) from error
        begun = _CompiledXgrammar(self._module, compiled, vocab_size=self._vocab_size, eos_ids=self._eos_ids)
        if not begun.start().allowed().any():
            raise BadGrammar("no token satisfies it")
        return begun

    def _compile(self, grammar: Grammar) -> Xgrammar:
        match grammar.kind:
            case GrammarKind.JSON_OBJECT:
                return self._compile_schema('{"type": "object"}')
            case GrammarKind.JSON_SCHEMA:
                check_schema(grammar.source)
                return self._compile_schema(grammar.source)
            case GrammarKind.REGEX:
                check_regex(grammar.source)
                return self._compiler.compile_regex(grammar.source)
            case GrammarKind.CHOICE:
                alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices_of(grammar.source))
                return self._compiler.compile_grammar(f"root ::= {alternatives}")
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(grammar.source)
            case GrammarKind.LARK:
                raise BadGrammar("xgrammar does not support Lark grammars")

    def _compile_schema(self, source: str) -> Xgrammar:
        """No free white space, and Python's separators, as with llguidance; what is not named is allowed."""
        return self._compiler.compile_json_schema(
            source, any_whitespace=False, separators=(", ", ": "), strict_mode=False
        )


def import_xgrammar() -> Xgrammar:
    """The module `xgrammar`. Raises StartupError, one line, where there is none that can be imported."""
    try:
        return importlib.import_module("xgrammar")
    except ModuleNotFoundError as error:
        what = f"--grammar-backend is xgrammar, but {error.name} is not installed"
        raise StartupError(f"{what}: pip install xgrammar") from error
    except (ImportError, OSError) as error:  # a library that it needs is missing
        raise StartupError(
            f"--grammar-backend is xgrammar, but it cannot be imported: {one_line(str(error))}"
        ) from error
