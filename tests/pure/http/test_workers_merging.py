"""Which worker has a session, and how the answers of all workers become one."""

import asyncio
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stenograph.cluster.owners import FileOwners, Owner
from stenograph.http.merging import engines, exposition, moment, readiness, sums


@given(st.integers(1, 64), st.integers(0, 255))
def test_each_file_has_one_owner_and_each_worker_knows_itself(num: int, file: int) -> None:
    sockets = [Path(f"/{number}") for number in range(num)]

    async def owners() -> list[Owner | None]:
        return [await FileOwners(sockets, own=own).owner_of(f"{file:02x}" + "0" * 30) for own in range(num)]

    seen = asyncio.run(owners())
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
    counts = {
        **dict.fromkeys(("num_sessions", "num_held_tokens", "num_in_flight", "turns", "errors"), 1),
        **dict.fromkeys(("sampled_tokens", "prompt_tokens", "wasted_tokens"), 1),
        **dict.fromkeys(("turns_per_s", "sampled_per_s", "prompt_per_s"), 0.5),
        **{name: {"num": 0, "p50": None} for name in ("loop_lag", "ttft")},
    }
    seen = [json.dumps({**counts, "workers": 1, "running": [], "engines": [json.loads(one)]}) for one in (up, down)]
    merged = json.loads(moment([one.encode() for one in seen], num_away=0))
    assert merged["engines"] == [{**json.loads(down), "num_running": 2}], "the console shows what /engines shows"
    assert (merged["workers"], merged["turns_per_s"]) == (2, 1.0)
    text = b'# HELP a b\n# TYPE a counter\na{x="1"} 2.0\na{x="2"} 1e+06\n# HELP g h\n# TYPE g gauge\ng 3.0\n'
    assert exposition({0: text, 2: text}) == (
        b'# HELP a b\n# TYPE a counter\na{worker="0",x="1"} 2.0\na{worker="0",x="2"} 1e+06\n'
        b'a{worker="2",x="1"} 2.0\na{worker="2",x="2"} 1e+06\n'
        b'# HELP g h\n# TYPE g gauge\ng{worker="0"} 3.0\ng{worker="2"} 3.0\n'
    )


def test_a_field_of_readiness_that_is_not_merged_is_the_first_workers() -> None:
    bodies = [b'{"ready":%b,"paused":false,"engines":[],"model":"tiny"}' % ready for ready in (b"true", b"false")]
    assert readiness(bodies, num_away=0) == (False, b'{"ready":false,"paused":false,"engines":[],"model":"tiny"}')
