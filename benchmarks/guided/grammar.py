"""The grammars of `bench guided`, and their checks: never by the grammar library that the engine itself uses.

Owns the built-in schema, and for each kind of grammar a check by a parser of its own. Knows nothing of the engine.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stenograph.core.types import Grammar, GrammarKind

PROFILE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "city": {"type": "string", "minLength": 1, "maxLength": 24},
        "is_remote": {"type": "boolean"},
        "level": {"enum": ["junior", "senior", "lead"]},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "city", "is_remote", "level", "skills"],
    "additionalProperties": False,
}
"""The schema where none is given: a record of the person whom a built-in prompt asks for. All of it is bounded, so that
a small model comes to its end."""

JSON_ALONE = "json.loads alone: jsonschema is not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGrammar:
    """A grammar, and whether a text satisfies it. `checked_by` says how; nothing checks where `is_kept` is None."""

    grammar: Grammar
    checked_by: str
    is_kept: Callable[[str], bool] | None

    @property
    def shown(self) -> str:
        """In a line, shortened: for people."""
        source = self.grammar.source
        return f"{self.grammar.kind} {source[:60]}{'…' if len(source) > 60 else ''}".rstrip()


def of_schema(text: str) -> CheckedGrammar:
    """A JSON Schema as text. Raises ValueError where it is none."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the JSON Schema is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON Schema is an object")
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    is_valid = _validator(schema)
    if is_valid is None:
        return CheckedGrammar(grammar=grammar, checked_by=JSON_ALONE, is_kept=partial(_is_json, lambda _: True))
    return CheckedGrammar(grammar=grammar, checked_by="json.loads and jsonschema", is_kept=partial(_is_json, is_valid))


def of_json_object() -> CheckedGrammar:
    """Any JSON object."""
    return CheckedGrammar(
        grammar=Grammar(kind=GrammarKind.JSON_OBJECT),
        checked_by="json.loads",
        is_kept=partial(_is_json, lambda value: isinstance(value, dict)),
    )


def of_regex(source: str) -> CheckedGrammar:
    """A regular expression; one that Python's `re` does not take may be the engine's, but is not checked."""
    grammar = Grammar(kind=GrammarKind.REGEX, source=source)
    try:
        pattern = re.compile(source)
    except re.error as error:
        return CheckedGrammar(grammar=grammar, checked_by=f"nothing: re does not take it: {error}", is_kept=None)
    return CheckedGrammar(
        grammar=grammar, checked_by="re.fullmatch", is_kept=lambda reply: pattern.fullmatch(reply) is not None
    )


def of_choices(choices: Sequence[str]) -> CheckedGrammar:
    """One of several texts. Raises ValueError where there are none, or one is empty."""
    if not choices or not all(choices):
        raise ValueError("choices are at least one, and none is empty")
    grammar = Grammar(kind=GrammarKind.CHOICE, source=json.dumps(list(choices)))
    return CheckedGrammar(grammar=grammar, checked_by="equality", is_kept=lambda reply: reply in choices)


def of_ebnf(source: str) -> CheckedGrammar:
    """A grammar in EBNF."""
    grammar = Grammar(kind=GrammarKind.EBNF, source=source)
    return CheckedGrammar(grammar=grammar, checked_by="nothing: there is no second parser of EBNF", is_kept=None)


def _is_json(is_right: Callable[[Any], bool], text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return is_right(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _validator(schema: Any) -> Callable[[Any], bool] | None:
    """Whether a value is valid; None where jsonschema is not installed. Raises ValueError for what is no schema."""
    if importlib.util.find_spec("jsonschema") is None:
        return None
    jsonschema: Any = importlib.import_module("jsonschema")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"it is no JSON Schema: {error.message}") from error
    is_valid: Callable[[Any], bool] = kind(schema).is_valid
    return is_valid
