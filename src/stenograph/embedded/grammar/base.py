"""The interface of a grammar engine: it compiles a grammar once, and each request starts at its beginning.

Owns the seam and its errors. Knows no grammar engine, no thread and no cache.
"""

import contextlib
from collections.abc import Generator
from typing import Protocol

import msgspec

from stenograph.core.types import Grammar
from stenograph.embedded.sampler import Allowed

_SHOWN_CHARS = 500


class BadGrammar(Exception):
    """A grammar does not compile, or fails on a sampled token; the message, one line, is its engine's."""


class GrammarEngineFailed(BadGrammar):
    """A failure of the grammar engine; it says nothing of the grammar."""


@contextlib.contextmanager
def no_other_error() -> Generator[None]:
    """Turn any other exception into GrammarEngineFailed, including a library's panic (no Exception)."""
    try:
        yield
    except (BadGrammar, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise GrammarEngineFailed(one_line(f"{type(error).__name__}: {error}")) from error


class GrammarState(Protocol):
    """One request's position in its grammar. It belongs to one thread at a time."""

    @property
    def is_finished(self) -> bool:
        """Whether only the end can follow."""
        ...

    def allowed(self) -> Allowed:
        """The ids [V] allowed next, in a read-only array. Raises BadGrammar."""
        ...

    def accept(self, token_id: int) -> None:
        """Step over a sampled token; a finished grammar stays where it is. Raises BadGrammar."""
        ...


class CompiledGrammar(Protocol):
    """A grammar for any number of requests, at the same time and from any thread."""

    def start(self) -> GrammarState:
        """The beginning of the grammar, for one more request."""
        ...


class GrammarBackend(Protocol):
    """A grammar engine for one vocabulary. It may be used from several threads at once."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, perhaps for long, and check that a first token is possible. Raises BadGrammar."""
        ...


def one_line(text: str) -> str:
    """The beginning of a message of whatever layout."""
    return " ".join(text.split())[:_SHOWN_CHARS]


def choices_of(source: str) -> list[str]:
    """The texts of a grammar of choices. Raises BadGrammar."""
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise BadGrammar(f"choices must be a list of strings: {one_line(str(error))}") from error
    if not choices or not all(choices):
        raise BadGrammar("there must be at least one choice, and none may be empty")
    return choices
