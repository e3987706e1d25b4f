"""Random walks through a grammar's masks, for its tests."""

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
from hypothesis import strategies as st

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.base import GrammarState
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.model.tokenizer import Tokenizer

EOS_ID = 2
CLOSING = frozenset('"]}')
"""What a walk likes to take, so that it comes to an end."""

_VALUES = st.one_of(st.integers(), st.text(max_size=5), st.booleans(), st.none(), st.sampled_from(["string", "#"]))
_KEYWORDS = st.one_of(
    st.sampled_from(["type", "properties", "items", "prefixItems", "anyOf", "allOf", "oneOf", "not", "$ref", "$defs"]),
    st.sampled_from(["pattern", "format", "minLength", "maximum", "required", "patternProperties", "enum", "const"]),
    st.sampled_from(["additionalProperties", "x"]),
)
LIKE_SCHEMAS = st.recursive(
    _VALUES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYWORDS, inner, max_size=4))
)
"""JSON with a schema's keywords wherever it pleases."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer_json())


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=tokenizer().vocab_size, eos_ids=(EOS_ID,), num_threads=1)


def start(kind: GrammarKind, source: str = "") -> GrammarState:
    """Raises BadGrammar."""
    return compiler().compile(Grammar(kind=kind, source=source), lambda: None).result().start()


def steps(state: GrammarState, rng: random.Random, max_tokens: int) -> Iterator[int]:
    """The ids of a walk, each admitted by its mask, with the end if it comes to it; every mask admits something."""
    for _ in range(max_tokens):
        allowed = state.allowed()
        assert allowed.dtype == np.bool_
        assert allowed.shape == (tokenizer().vocab_size,)
        ids = np.flatnonzero(allowed).tolist()
        assert ids, "a mask admits nothing"
        assert not set(ids) & set(tokenizer().added_tokens.values()) - {EOS_ID}
        closing = [id_ for id_ in ids if id_ == EOS_ID or set(tokenizer().token_text(id_)) <= CLOSING]
        token_id = rng.choice(closing if closing and rng.random() < 0.4 else ids)
        yield token_id
        if token_id == EOS_ID:
            return
        state.accept(token_id)


def walk(state: GrammarState, seed: int, max_tokens: int = 200) -> str | None:
    """The text of a walk that came to the end of its grammar, else None."""
    *ids, last = steps(state, random.Random(seed), max_tokens)
    if last != EOS_ID:
        return None
    return b"".join(map(tokenizer().bytes_of, ids)).decode()
