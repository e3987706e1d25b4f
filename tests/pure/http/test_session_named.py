"""The session that a request names: its path, a header, or a credential, read in one place."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.http.auth import credentials_of, session_named

ID, OTHER = "0123456789abcdef" * 2, "f" * 32
TOKEN = f"stg-{ID}-{'0' * 32}"


def scope(path: str, *headers: tuple[str, str], query: str = "") -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"path": path, "headers": raw, "query_string": query.encode()}


def named(path: str, *headers: tuple[str, str], query: str = "", by_id: bool = True) -> str | None:
    return session_named(scope(path, *headers, query=query), by_id=by_id)


def test_the_path_names_a_session_before_all_else() -> None:
    for path in ("", "/", "/v1/chat/completions", "/samples", "/console"):
        assert named(f"/sessions/{ID}{path}", ("x-session-id", OTHER)) == ID
    for path in ("", "/tokens", "/turns"):
        assert named(f"/console/api/sessions/{ID}{path}", ("x-session-id", OTHER)) == ID
    for path in (
        "/console",
        "/console/api/now",
        f"/console/sessions/{ID}",
        f"/console/api/vocabulary/{ID}",
        "/sessions",
    ):
        assert named(path, ("x-session-id", OTHER), ("x-api-key", OTHER)) is None
    assert named("/sessions/of nobody/v1/models", ("x-session-id", OTHER)) == "of nobody"


def test_a_header_names_one_else_the_first_credential_that_looks_like_one() -> None:
    line = "/v1/chat/completions"
    assert named(line, ("x-session-id", OTHER), ("authorization", f"Bearer {ID}")) == OTHER
    assert named(line, ("x-session-id", "nobody"), ("authorization", f"Bearer {ID}")) == "nobody"
    assert named(line, ("x-session-id", OTHER), ("x-session-id", ID)) == ID, "of several the last, as everywhere"
    for header in (("authorization", f"bearer  {ID}"), ("x-api-key", ID), ("x-goog-api-key", ID)):
        assert named(line, header) == ID
        assert named(line, header, by_id=False) is None
        assert named("/metrics", header) is None
    assert named(line, ("x-api-key", "dummy"), ("authorization", f"Bearer {ID}"), query=f"key={OTHER}") == ID


@pytest.mark.parametrize("by_id", [True, False])
def test_a_token_names_its_session_wherever_it_stands(by_id: bool) -> None:
    line = "/v1beta/models/m:generateContent"
    for header in (("authorization", f"Bearer {TOKEN}"), ("x-api-key", TOKEN), ("x-goog-api-key", TOKEN)):
        assert named(line, header, by_id=by_id) == ID
    assert named(line, query=f"alt=sse&key={TOKEN}", by_id=by_id) == ID
    assert named(line, query=f"k%65y=%73{TOKEN[1:]}", by_id=by_id) == ID
    assert named(line, ("x-api-key", TOKEN[:-1]), by_id=by_id) is None
    assert named(line, ("authorization", f"Basic {TOKEN}"), by_id=by_id) is None


def test_every_place_of_a_key_is_read_and_no_other() -> None:
    given = credentials_of(
        scope(
            "/x",
            *(("authorization", "Bearer a"), ("authorization", "Basic b"), ("x-api-key", "c"), ("x-goog-api-key", "d")),
            *(("cookie", "key=e"), ("authorization", "Bearer "), ("x-api-key", "")),
            query="key=f%20g&key=h+i&KEY=j&key=&x=key",
        )
    )
    assert given == [b"a", b"c", b"d", b"f g", b"h i"]


@given(st.text(), st.text(), st.binary(max_size=100), st.booleans())
def test_no_text_is_too_odd(path: str, query: str, value: bytes, by_id: bool) -> None:
    for at in (path, f"/v1{path}", f"/sessions{path}"):
        for name in (b"x-session-id", b"authorization", b"x-api-key"):
            odd = {"path": at, "headers": [(name, value)], "query_string": query.encode()}
            found = session_named(odd, by_id=by_id)
            assert found is None or isinstance(found, str)


def test_a_part_that_another_process_asks_for_is_of_the_session_in_its_header() -> None:
    for path, expected in (("/samples", ID), ("/accounts", None), (f"/sessions/{OTHER}", OTHER)):
        assert named(path, ("x-stenograph-passed-on", ID), ("x-session-id", OTHER)) == expected
    assert named("/samples", ("x-session-id", ID)) is None, "a client's header does not move its request"
