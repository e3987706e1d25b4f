"""Types of values in JSON. Those in replies have their ranges as `Meta` for /openapi.json; writing does not check them.

A reply is a typed dictionary in the module that writes it; http/openapi/schemas.py makes schemas of these.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, Meta(ge=0)]
TokenIds = Sequence[Count]
Logprob = float
"""In nats."""

KINDS_OF: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
"""The JSON Schema types of a decoded value, by its Python type."""
