"""The client's error for any answer: a server of ours, an engine, a proxy."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.client.errors import ServerFault, ServerRefused, TryLater, WrongRequest, refusal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["error", "code", "message", "x"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("code", [None, 400, "", [], {}])
def test_an_error_without_a_code_of_ours_has_its_status_and_words_alone(code: Any) -> None:
    for told in ({"error": {"message": "no", "code": code}}, {"message": "no", "code": code}, {"message": "no"}):
        error = refusal("open a session", 400, {}, json.dumps(told).encode())
        assert (error.code, type(error)) == ("", WrongRequest)
        assert str(error).startswith("open a session: 400: no")


@given(
    body=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()),
    status=st.sampled_from([301, 400, 401, 403, 404, 409, 413, 429, 500, 502, 503, 504]),
)
def test_any_answer_is_an_error_by_its_status_that_names_the_call(body: bytes, status: int) -> None:
    error = refusal("open a session", status, {"retry-after": "x"}, body)
    assert isinstance(error, ServerRefused)
    assert str(error).startswith(f"open a session: {status}")
    assert error.retry_after_s is None
    if not error.code:
        assert isinstance(error, TryLater if status in (429, 502, 503, 504) else ServerFault | WrongRequest)
