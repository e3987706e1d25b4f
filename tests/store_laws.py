"""`check_store`: does a store keep the contract of `store.base`? For whoever writes one, in one call of a test.

    async def test_my_store_keeps_the_laws(tmp_path: Path) -> None:
        await check_store(lambda: my_store(tmp_path))

`open_store` opens the same store each time: what one has kept the next one finds, unless it `survives` nothing.
"""

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from stenograph.core.errors import SessionDamaged, StenographError
from stenograph.core.messages import MediaItem, MediaKind, MediaRef
from stenograph.core.types import SessionId
from stenograph.store.base import SessionStore, StoredSession, Tail, checked_payloads
from stenograph.store.codec.rows import COMMIT, OUTCOME, Totals, row_kind, row_payload

OpenStore = Callable[[], Awaitable[SessionStore]]

ONE_TURN = Totals(num_turns=1, num_tokens=7)


def session_id(number: int) -> SessionId:
    """An id like those that a server gives."""
    return SessionId(f"00{number:030x}")


async def appended(store: SessionStore, tail: Tail, payload: bytes, *, at: float = 2.0, kind: int = COMMIT) -> None:
    """Append a row, and wait until it is durable. Raises what the store tells."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: StenographError | None) -> None:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    adds = ONE_TURN if kind == COMMIT else Totals()
    store.append(tail, payload, adds=adds, at=at, done=done, kind=kind)
    await future


def payloads(stored: StoredSession | None) -> list[bytes]:
    """The payloads of a session's rows, each held to its digest."""
    assert stored is not None
    return list(map(bytes, checked_payloads(stored)))


async def check_store(open_store: OpenStore, *, survives: bool = True) -> None:
    """Test every law. Raises AssertionError."""
    for law in (
        _keeps_rows_in_order,
        _forgets,
        _finds_by_key,
        _lists,
        _knows_outcomes,
        _knows_what_is_idle,
        _keeps_media,
        _finds_damage,
    ):
        store = await open_store()
        async with aclosing(store):
            await law(store)
    if survives:
        await _survives(open_store)


async def _keeps_rows_in_order(store: SessionStore) -> None:
    one, other = session_id(1), session_id(2)
    tails = [await store.create(id_, b"opening of " + id_.encode(), at=1.0, ttl_s=None) for id_ in (one, other)]
    told: list[tuple[str, int]] = []

    def noted(tail: Tail, number: int) -> Callable[[StenographError | None], None]:
        def done(error: StenographError | None) -> None:
            assert error is None, error
            told.append((tail.session_id, number))

        return done

    for number in range(1000):
        tail = tails[number % 2]
        store.append(tail, b"%d" % number, adds=ONE_TURN, at=2.0, done=noted(tail, number))
    assert told == [], "done is never called by append itself"
    await appended(store, tails[0], b"x" * 1_400_000)
    assert told == [(tails[number % 2].session_id, number) for number in range(1000)], "done is called in order"
    found = payloads(await store.load(one))
    assert found == [b"opening of " + one.encode(), *(b"%d" % n for n in range(0, 1000, 2)), b"x" * 1_400_000]
    stored = await store.take(other)
    assert stored is not None
    tail = stored.tail()
    assert (tail.seq, tail.totals) == (500, Totals(num_turns=500, num_tokens=3500))
    await appended(store, tail, b"after being taken")
    assert payloads(await store.load(other))[-2:] == [b"999", b"after being taken"]
    assert await store.load(session_id(404)) is None


async def _forgets(store: SessionStore) -> None:
    gone, stays = session_id(3), session_id(4)
    tails = [await store.create(id_, b"", at=1.0, ttl_s=None) for id_ in (gone, stays)]
    for tail in tails:
        await appended(store, tail, b"a row")
    assert await store.delete(gone, {"a": 1, "$$ 'b\\u0000": 2**40})
    assert not await store.delete(gone, {"a": 1})
    sums, there = await store.ended()
    assert sums == {"a": 1, "$$ 'b\\u0000": 2**40}
    assert gone not in there
    assert stays in there
    assert await store.load(gone) is None
    assert payloads(await store.load(stays)) == [b"", b"a row"]
    assert await store.delete(stays)


def medium(content: bytes, media_type: str = "image/png") -> MediaItem:
    """A medium, as a client has sent it."""
    text = base64.b64encode(content)
    sha256 = hashlib.sha256(content).hexdigest()
    ref = MediaRef(sha256=sha256, kind=MediaKind.IMAGE, media_type=media_type, num_bytes=len(content))
    return MediaItem(ref=ref, base64=text)


async def _keeps_media(store: SessionStore) -> None:
    one, other, nobody = session_id(30), session_id(31), session_id(32)
    for id_ in (one, other):
        await store.create(id_, b"", at=1.0, ttl_s=None)
    first, second = medium(b"first"), medium(b"\xff" * 3_000_001, "image/jpeg")
    await store.media.put(one, [first, second, first])
    await store.media.put(one, [first])
    await store.media.put(other, [first])
    await store.media.put(nobody, [first])
    for session, item, found in (
        (one, first, first),
        (one, second, second),
        (other, first, first),
        (other, second, None),
        (nobody, first, None),
    ):
        assert await store.media.get(session, item.ref.sha256) == found
    assert await store.delete(one)
    assert await store.media.get(one, first.ref.sha256) is None
    assert await store.media.get(other, first.ref.sha256) == first
    assert await store.delete(other)
    await store.create(other, b"", at=1.0, ttl_s=None)
    assert await store.media.get(other, first.ref.sha256) is None, "media go with their session"
    assert await store.delete(other)


async def _finds_by_key(store: SessionStore) -> None:
    first, other, second = session_id(6), session_id(7), session_id(8)
    assert await store.find("k") is None
    for id_, key in ((first, "k"), (other, None), (second, "k")):
        await store.create(id_, b"opening of " + id_.encode(), at=1.0, ttl_s=None, key=key)
    found = await store.find("k")
    assert found is not None
    assert (found.session_id, payloads(found)) == (second, [b"opening of " + second.encode()])
    assert await store.delete(second)
    again = await store.find("k")
    assert again is not None
    assert again.session_id == first
    for id_ in (first, other):
        await store.delete(id_)
    assert await store.find("k") is None


async def _lists(store: SessionStore) -> None:
    before = [one.session_id for one in await store.page(limit=1000, after=None)]
    ids = [session_id(10 + number) for number in range(5)]
    for id_ in ids:
        tail = await store.create(id_, b"opening", at=1.0, ttl_s=None)
        await appended(store, tail, b"row", at=3.0)
    found = await _paged(store)
    assert found == before + ids, "sessions are listed in the order of their creation, each once"
    (last,) = [one for one in await store.page(limit=1000, after=ids[-2]) if one.session_id == ids[-1]]
    assert (Totals.of(last.last_head), last.last_seq) == (ONE_TURN, 1)
    assert last.at == 3.0 or store.is_shared, "a shared store has a clock of its own"
    assert await store.page(limit=10, after=session_id(404)) == []
    for id_ in ids:
        await store.delete(id_)


async def _knows_outcomes(store: SessionStore) -> None:
    with_one, without = session_id(15), session_id(16)
    tails = [await store.create(id_, b"opening", at=1.0, ttl_s=None) for id_ in (with_one, without)]
    for kind, payload in ((COMMIT, b"a turn"), (OUTCOME, b"bad"), (COMMIT, b"another"), (OUTCOME, b"good")):
        await appended(store, tails[0], payload, kind=kind)
    await appended(store, tails[1], b"a turn")
    stored = await store.take(with_one)
    assert payloads(stored) == [b"opening", b"a turn", b"bad", b"another", b"good"]
    assert stored is not None
    assert [row_kind(row.body) for row in stored.rows[1:]] == [COMMIT, OUTCOME, COMMIT, OUTCOME]
    tail = stored.tail()
    await appended(store, tail, b"a turn after it")
    assert tail.totals == Totals(num_turns=3, num_tokens=21, outcome_seq=4), "the last outcome holds"
    listed = {one.session_id: one.outcome for one in await store.page(limit=1000, after=None)}
    last = listed[with_one]
    assert last is not None
    assert (last.seq, bytes(row_payload(last.body, OUTCOME)), listed[without]) == (4, b"good", None)
    for id_ in (with_one, without):
        await store.delete(id_)


async def _paged(store: SessionStore) -> Sequence[SessionId]:
    found: list[SessionId] = []
    after: SessionId | None = None
    while page := await store.page(limit=2, after=after):
        found += [one.session_id for one in page]
        after = found[-1]
    return found


async def _knows_what_is_idle(store: SessionStore) -> None:
    if store.is_shared:
        await _knows_what_is_idle_by_its_own_clock(store)
        return
    young, old, forever = session_id(20), session_id(21), session_id(22)
    for id_, ttl_s in ((young, 10.0), (old, 10.0), (forever, None)):
        tail = await store.create(id_, b"", at=100.0, ttl_s=ttl_s)
        if id_ is young:
            await appended(store, tail, b"", at=105.0)
    assert list(await store.expired(now=109.0, limit=10)) == []
    assert list(await store.expired(now=110.0, limit=10)) == [old]
    assert set(await store.expired(now=115.0, limit=10)) == {young, old}
    assert len(await store.expired(now=115.0, limit=1)) == 1
    for id_ in (young, old, forever):
        await store.delete(id_)


async def _knows_what_is_idle_by_its_own_clock(store: SessionStore) -> None:
    """Whatever the clocks of those who wrote the rows, and who asks, say."""
    young, old, forever = session_id(20), session_id(21), session_id(22)
    for id_, ttl_s in ((young, 3600.0), (old, 1e-9), (forever, None)):
        await appended(store, await store.create(id_, b"", at=1.0, ttl_s=ttl_s), b"", at=1.0)
    for now in (0.0, 1e12):
        assert list(await store.expired(now=now, limit=10)) == [old]
    taken = await store.take(young)
    assert taken is not None
    assert taken.idle_s is not None
    assert 0 <= taken.idle_s < 3600
    for id_ in (young, old, forever):
        await store.delete(id_)


async def _finds_damage(store: SessionStore) -> None:
    id_ = session_id(30)
    tail = await store.create(id_, b"opening", at=1.0, ttl_s=None)
    for number in range(3):
        await appended(store, tail, b"%d" % number)
    stored = await store.load(id_)
    assert stored is not None
    whole = list(stored.rows)
    for rows in (whole[:1] + whole[2:], whole[1:], whole[:1] + whole[:2]):
        broken = StoredSession(session_id=id_, number=stored.number, at=stored.at, rows=rows)
        try:
            checked_payloads(broken)
        except SessionDamaged:
            continue
        raise AssertionError("rows that are missing or doubled were taken for whole")
    await store.delete(id_)


async def _survives(open_store: OpenStore) -> None:
    id_, gone = session_id(40), session_id(41)
    store = await open_store()
    async with aclosing(store):
        tail = await store.create(id_, b"opening", at=1.0, ttl_s=None)
        await appended(store, tail, b"one")
        await store.create(gone, b"", at=1.0, ttl_s=None)
        await store.delete(gone, {"b": 2})
    store = await open_store()
    async with aclosing(store):
        stored = await store.take(id_)
        assert payloads(stored) == [b"opening", b"one"]
        assert await store.load(gone) is None
        assert (await store.ended()).sums["b"] == 2
        assert stored is not None
        await appended(store, stored.tail(), b"two")
    store = await open_store()
    async with aclosing(store):
        assert payloads(await store.load(id_)) == [b"opening", b"one", b"two"]
        await store.delete(id_)
