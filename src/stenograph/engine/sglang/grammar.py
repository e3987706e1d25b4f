"""A grammar in the words of SGLang's routes, but for JSON Schemas, since each route takes them in its own way. Pure."""

import re

import msgspec

from stenograph.core.errors import InvalidRequest
from stenograph.core.types import Grammar, GrammarKind

GRAMMARS = frozenset(GrammarKind) - {GrammarKind.LARK}
"""Grammars taken by SGLang. Its `ebnf` is GBNF's dialect, not llguidance's Lark."""
_CHOICES = msgspec.json.Decoder(list[str])
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')


def pattern_field(grammar: Grammar) -> tuple[str, str]:
    """The field, and its value, of a grammar other than a JSON Schema. Raises InvalidRequest for one it cannot take."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return "regex", grammar.source
        case GrammarKind.EBNF:
            return "ebnf", grammar.source
        case GrammarKind.CHOICE:
            return "ebnf", choice_as_ebnf(grammar.source)
        case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA | GrammarKind.LARK:
            raise InvalidRequest(f"SGLang takes no grammar of the kind {grammar.kind.value!r}.")


def choice_as_ebnf(source: str) -> str:
    """A JSON list of strings as the grammar of just those strings. Raises InvalidRequest if it is no such list."""
    try:
        choices = _CHOICES.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest("The choices are not a JSON list of strings.") from error
    if not choices:
        raise InvalidRequest("There must be at least one choice.")
    return "root ::= " + " | ".join(f'"{_ESCAPED.sub(_escape, choice)}"' for choice in choices)


def _escape(found: "re.Match[str]") -> str:
    """GBNF's spelling, in a string, of a character to be escaped."""
    char = found[0]
    return f"\\{char}" if char in '"\\' else f"\\x{ord(char):02x}"
