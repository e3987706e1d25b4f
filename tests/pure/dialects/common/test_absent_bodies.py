"""A body that may be left out is left out, or JSON: white space is neither."""

from collections.abc import Callable

import pytest

from stenograph.core.errors import InvalidJson
from stenograph.dialects.sessions import (
    decode_abort,
    decode_bulk_samples,
    decode_create,
    decode_nothing,
    decode_outcome,
    decode_samples,
)
from stenograph.weights.commands import decode_pause

SESSIONS = (decode_create, decode_outcome, decode_samples, decode_bulk_samples, decode_abort, decode_nothing)


@pytest.mark.parametrize("decode", [*SESSIONS, decode_pause])
def test_white_space_is_no_absent_body(decode: Callable[[bytes], object]) -> None:
    with pytest.raises(InvalidJson):
        decode(b"\r\n ")
