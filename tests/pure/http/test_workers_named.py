"""The session that a request names, seen in its head: what the parser and the doorman would say, whatever the bytes."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stenograph.http.workers.merging import engines, exposition, readiness, sums
from stenograph.http.workers.named import Named, body_bytes_of, named_by
from stenograph.http.workers.owners import FileOwners

ID = "0123456789abcdef" * 2


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: here", *headers, "", ""]).encode("latin-1")


def id_of(line: str, *headers: str, by_credential: bool = True) -> str | None:
    named = named_by(head(line, *headers), by_credential=by_credential)
    return None if named is None else named.session_id


def test_the_path_names_a_session_before_all_else() -> None:
    other = "f" * 32
    for path in ("", "/", "/v1/chat/completions", "/samples?x=1", "?records=delta"):
        assert id_of(f"GET /sessions/{ID}{path}", f"X-Session-Id: {other}") == ID
    assert id_of(f"GET /sessions/%30{ID[1:]}/v1/models") == ID
    assert id_of(f"GET http://here:1/sessions/{ID}") == ID
    for path in ("", "/tokens?start=5", "/turns"):
        assert id_of(f"GET /console/api/sessions/{ID}{path}") == ID
    for path in ("/console", "/console/api/now", f"/console/sessions/{ID}", f"/console/api/vocabulary/{ID}"):
        assert id_of(f"GET {path}") is None
    for path in (f"/sessions/{ID}0", f"/sessions/{ID[1:]}", f"/sessions/{ID.upper()}", "/sessions", "/sessionsx"):
        assert id_of(f"GET {path}", f"X-Session-Id: {other}") is None


def test_a_header_names_one_and_where_there_are_no_keys_a_credential() -> None:
    line = "POST /v1/chat/completions"
    assert id_of(line, f"x-session-id:\t{ID} ") == ID
    assert id_of(line, "X-Session-ID: nobody", f"Authorization: Bearer {ID}") is None
    assert id_of(line, f"X-Session-Id: {'a' * 32}", f"X-SESSION-ID: {ID}") == ID
    for name in ("Authorization: Bearer ", "authorization: bearer  ", "X-API-Key:", "x-goog-api-key: "):
        assert id_of(line, f"{name}{ID}") == ID
        assert id_of(line, f"{name}{ID}", by_credential=False) is None
        assert id_of("GET /metrics", f"{name}{ID}") is None
    assert id_of(f"POST /v1beta/models/m:generateContent?alt=sse&key={ID}") == ID
    assert id_of(line, f"X-Note: authorization: bearer {ID}") is None


def test_a_key_is_that_of_an_opening_alone() -> None:
    named = named_by(head("POST /sessions", "Idempotency-Key: a b "), by_credential=True)
    assert named == Named(b"POST", b"/sessions", None, b"a b")
    for line in ("GET /sessions", f"POST /sessions/{ID}/samples", "POST /v1/responses"):
        other = named_by(head(line, "Idempotency-Key: a b"), by_credential=True)
        assert other is not None
        assert other.key is None


def test_what_one_process_does_for_all_is_named_by_its_path_alone() -> None:
    for path in (
        "/pause_generation",
        "/update_weights_from_disk?x=1",
        "/model_info#x",
        "/engines",
        "/engines/http://a",
    ):
        for headers in ((), (f"X-Session-Id: {ID}", f"Authorization: Bearer {ID}")):
            named = named_by(head(f"POST {path}", *headers), by_credential=True)
            assert named is not None
            assert (named.is_of_server, named.session_id, named.key) == (True, None, None)
    for path in (
        f"/sessions/{ID}/pause_generation",
        "/v1/pause_generation",
        "/pause_generations",
        "/enginesx",
        "/ready",
    ):
        named = named_by(head(f"POST {path}"), by_credential=True)
        assert named is not None
        assert not named.is_of_server


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_are_too_odd(data: bytes, by_credential: bool) -> None:
    for given_head in (data, b"GET " + data, head("GET /v1/x") + data):
        named = named_by(given_head, by_credential=by_credential)
        assert named is None or named.session_id is None or re.fullmatch("[0-9a-f]{32}", named.session_id)
        length = body_bytes_of(given_head)
        assert length is None or length >= 0


def test_the_length_of_a_body_is_its_header_s() -> None:
    assert body_bytes_of(head("GET /")) == 0
    assert body_bytes_of(head("POST /", "Content-Length: 17")) == 17
    assert body_bytes_of(head("POST /", "Transfer-Encoding: chunked")) is None


@given(st.integers(1, 64), st.integers(0, 255))
def test_each_file_has_one_owner_and_each_worker_knows_itself(num: int, file: int) -> None:
    sockets = [Path(f"/{number}") for number in range(num)]
    seen = [FileOwners(sockets, own=own).owner_of(f"{file:02x}" + "0" * 30) for own in range(num)]
    assert seen[file % num] is None
    assert {owner.socket for owner in seen if owner is not None} <= {sockets[file % num]}
    assert sum(owner is None for owner in seen) == 1
    keyed = [FileOwners(sockets, own=own).opener_of(bytes([file])) for own in range(num)]
    assert sum(owner is None for owner in keyed) == 1


def test_answers_of_all_become_one() -> None:
    assert sums([b'{"aborted":2,"what":"x","ok":true}', b'{"aborted":3,"what":"y","ok":true}']) == (
        b'{"aborted":5,"what":"x","ok":true}'
    )
    engine = b'{"engine":"e","name":"n","state":"%b","detail":"%b","num_running":1}'
    up, down = engine % (b"ready", b""), engine % (b"down", b"gone")
    is_ready, body = readiness([b'{"ready":true,"paused":false,"engines":[%b]}' % one for one in (up, up)], num_away=0)
    assert (is_ready, body) == (True, b'{"ready":true,"paused":false,"engines":[%b]}' % up.replace(b":1}", b":2}"))
    one = b'{"ready":true,"paused":false,"engines":[%b]}' % up
    other = b'{"ready":false,"paused":true,"engines":[%b]}' % down
    is_ready, body = readiness([one, other], num_away=0)
    assert (is_ready, b'"state":"down","detail":"gone"' in body, b'"paused":true' in body) == (False, True, True)
    assert not readiness([b'{"ready":true,"paused":false,"engines":[]}'], num_away=1)[0]
    assert engines([b'{"engines":[%b]}' % one for one in (up, down)]) == b'{"engines":[%b]}' % down.replace(
        b":1}", b":2}"
    )
    text = b'# HELP a b\n# TYPE a counter\na{x="1"} 2.0\na{x="2"} 1e+06\n# HELP g h\n# TYPE g gauge\ng 3.0\n'
    assert exposition({0: text, 2: text}) == (
        b'# HELP a b\n# TYPE a counter\na{worker="0",x="1"} 2.0\na{worker="0",x="2"} 1e+06\n'
        b'a{worker="2",x="1"} 2.0\na{worker="2",x="2"} 1e+06\n'
        b'# HELP g h\n# TYPE g gauge\ng{worker="0"} 3.0\ng{worker="2"} 3.0\n'
    )
