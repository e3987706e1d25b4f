"""Types of values in JSON replies. Their ranges are `Meta` for /openapi.json; writing a reply does not check them.

A reply is a typed dictionary in the module that writes it; http/openapi/schemas.py makes schemas of these.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, Meta(ge=0)]
TokenIds = Sequence[Count]
Logprob = float
"""In nats."""
