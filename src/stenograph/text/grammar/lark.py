"""Pieces of a grammar in llguidance's Lark dialect: literals, markers, and JSON in the one admitted style.

Knows no family, no tool and no reply. Pure.
"""

import json
import re
from collections.abc import Mapping

JSON_STYLE: Mapping[str, object] = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""Style of all JSON in our grammars, in llguidance's words. With free white space a small model fills its budget with
blanks (measured); the separators are Python's, as in most text."""

STYLE_KEYWORD = "x-guidance"
"""The keyword for a schema's style."""

_NAMED_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
"""Texts taken by the dialect for the name of a token."""


def quoted(text: str) -> str:
    """A text as a grammar's literal."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, object]) -> str:
    """A rule's body: JSON by `schema`, in our style whatever style the schema names."""
    return f"%json {json.dumps({**schema, STYLE_KEYWORD: JSON_STYLE}, ensure_ascii=False)}"


def marker(text: str, added_tokens: Mapping[str, int]) -> str:
    """A marker of a family's syntax: by its name, or by its id, where it is a token of its own, else plain text.

    Not for a client's text: it never stands for a token.
    """
    if text not in added_tokens:
        return quoted(text)
    return text if _NAMED_TOKEN.fullmatch(text) else f"<[{added_tokens[text]}]>"
