"""The questions of `shared_rows` as statements of PostgreSQL. Each is one statement, done whole or not at all.

At `read committed` a statement looks at a row again after waiting for it: a condition on an epoch, an end or a
lease holds when the row is changed, not only when the statement began.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stenograph.cluster.postgres.connection import Lane
from stenograph.cluster.postgres.shared_rows import Claimed, Deletion, EndMove, HeldBy
from stenograph.core.messages import MediaKind, MediaRef
from stenograph.core.types import SessionId
from stenograph.store.base import Ended, StoredRow, StoredSession, StoredSummary, Sums
from stenograph.store.codec.rows import HEAD_BYTES
from stenograph.store.groups import NewRow, NewSession

NUM_READERS = 3
"""Connections for everything but rows and leases."""

NUM_CONNECTIONS = NUM_READERS + 2
"""Connections of a process."""

CLAIMS = 4
"""Attempts at a session while others end leases or take sessions at the same moment."""

_NOW = "extract(epoch FROM clock_timestamp())::float8"
"""The database's clock: no node's is compared with it."""

_JOIN = """
WITH gone AS (DELETE FROM stenograph_owners WHERE number = $3)
INSERT INTO stenograph_owners (url, until) VALUES ($1, clock_timestamp() + make_interval(secs => $2)) RETURNING number
"""

_RENEW = """
UPDATE stenograph_owners SET until = clock_timestamp() + make_interval(secs => $2)
WHERE number = $1 AND until > clock_timestamp() RETURNING number
"""

_OWNERS = "SELECT url FROM stenograph_owners WHERE until > clock_timestamp()"

_LEAVE = "DELETE FROM stenograph_owners WHERE number = $1"

_CREATE = f"""
WITH made AS (
    INSERT INTO stenograph_sessions (id, ttl_s, at, body, digest, key)
    SELECT $1::text, $2::float8, $3::float8, $4::bytea, $5::bytea, $6::text
    WHERE EXISTS (SELECT FROM stenograph_owners WHERE number = $7)
    ON CONFLICT (id) DO NOTHING RETURNING number),
ended AS (
    INSERT INTO stenograph_ends (session, owner, epoch, seq, at, head, outcome)
    SELECT number, $7::bigint, 1, 0, {_NOW}, $8::bytea, 0 FROM made)
SELECT number FROM made UNION ALL
SELECT s.number FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number
WHERE s.id = $1 AND s.digest = $5 AND e.owner = $7 AND e.seq = 0
"""

_APPEND = f"""
WITH moved AS (
    UPDATE stenograph_ends e
    SET seq = m.seq, at = CASE WHEN m.has_turn THEN {_NOW} ELSE e.at END, head = m.head, outcome = m.outcome
    FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bigint[], $12::boolean[])
        AS m (session, epoch, before, seq, head, outcome, has_turn)
    WHERE e.session = m.session AND e.epoch = m.epoch AND e.seq = m.before
    RETURNING e.session),
kept AS (
    INSERT INTO stenograph_rows (session, seq, at, body, digest)
    SELECT r.session, r.seq, r.at, r.body, r.digest
    FROM unnest($7::bigint[], $8::bigint[], $9::float8[], $10::bytea[], $11::bytea[])
        AS r (session, seq, at, body, digest)
    JOIN moved ON moved.session = r.session)
SELECT session FROM moved
"""

_ALREADY = """
SELECT r.session FROM unnest($1::bigint[], $2::bigint[], $3::bytea[]) AS m (session, seq, digest)
JOIN stenograph_rows r ON r.session = m.session AND r.seq = m.seq AND r.digest = m.digest
"""

_CLAIM = """
WITH wanted AS (
    SELECT s.number, e.owner, e.epoch FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number
    WHERE s.id = $1),
ended AS (
    DELETE FROM stenograph_owners o USING wanted w
    WHERE o.number = w.owner AND o.number <> $2 AND o.until <= clock_timestamp() RETURNING o.number),
taken AS (
    UPDATE stenograph_ends e SET owner = $2, epoch = e.epoch + 1 FROM wanted w
    WHERE e.session = w.number AND e.owner = w.owner AND e.epoch = w.epoch AND w.owner <> $2
        AND (w.owner IN (SELECT number FROM ended)
            OR NOT EXISTS (SELECT FROM stenograph_owners o WHERE o.number = w.owner))
        AND EXISTS (SELECT FROM stenograph_owners o WHERE o.number = $2 AND o.until > clock_timestamp())
    RETURNING e.epoch)
SELECT w.number, w.owner, w.epoch, (SELECT epoch FROM taken), o.url,
    extract(epoch FROM o.until - clock_timestamp())::float8
FROM wanted w LEFT JOIN stenograph_owners o ON o.number = w.owner
"""

_HOLDER = """
SELECT o.number, o.url, extract(epoch FROM o.until - clock_timestamp())::float8
FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number
JOIN stenograph_owners o ON o.number = e.owner
WHERE s.id = $1 AND o.number <> $2 AND o.until > clock_timestamp()
"""

_READ = f"""
SELECT 0::bigint AS seq, s.body, s.digest, s.number, e.at, {_NOW} - e.at
FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number WHERE s.id = $1
UNION ALL
SELECT r.seq, r.body, r.digest, r.session, r.at, 0
FROM stenograph_sessions s JOIN stenograph_rows r ON r.session = s.number WHERE s.id = $1
ORDER BY seq
"""

_FIND = "SELECT id, number, at, body, digest FROM stenograph_sessions WHERE key = $1 ORDER BY number DESC LIMIT 1"

_NUMBER = """
SELECT s.number, e.owner = $2 FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number WHERE s.id = $1
"""

_DELETE = """
DO $$ BEGIN
    DELETE FROM stenograph_ends WHERE session = {number} AND owner = {owner};
    IF FOUND THEN
        DELETE FROM stenograph_rows WHERE session = {number};
        DELETE FROM stenograph_sessions WHERE number = {number};
        INSERT INTO stenograph_sums AS s SELECT key, value::bigint FROM json_each_text({adds}) ORDER BY key
            ON CONFLICT (key) DO UPDATE SET num = s.num + excluded.num;
    END IF;
END $$
"""

_PAGE = """
SELECT s.number, s.id, s.body, s.digest, e.seq, e.at, e.head, r.seq, r.body, r.digest
FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number
LEFT JOIN stenograph_rows r ON r.session = s.number AND r.seq = e.outcome AND e.outcome > 0
WHERE s.number > coalesce((SELECT number FROM stenograph_sessions WHERE id = $2), CASE WHEN $2::text IS NULL THEN 0 END)
ORDER BY s.number LIMIT $1
"""

_EXPIRED = f"""
SELECT s.id FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number
WHERE s.ttl_s IS NOT NULL AND e.at + s.ttl_s <= {_NOW}
    AND (e.owner = $2 OR NOT EXISTS (
        SELECT FROM stenograph_owners o WHERE o.number = e.owner AND o.until > clock_timestamp()))
ORDER BY s.number LIMIT $1
"""


_ENDED = "SELECT key, num FROM stenograph_sums UNION ALL SELECT id, NULL FROM stenograph_sessions"
"""One statement sees one moment."""

_MEDIA_OF = """
SELECT m.sha256 FROM stenograph_session_media m JOIN stenograph_sessions s ON s.number = m.session WHERE s.id = $1
"""

_PUT_MEDIA = "SELECT stenograph_put_media($1, $2, $3, $4, $5)"

_GET_MEDIA = """
SELECT m.kind, m.media_type, m.body FROM stenograph_media m
JOIN stenograph_session_media l ON l.sha256 = m.sha256 JOIN stenograph_sessions s ON s.number = l.session
WHERE s.id = $1 AND m.sha256 = $2
"""


class PostgresRows:
    """A PostgreSQL as `SharedRows`: one connection for writing rows, one for the lease, a few for all else."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._writer = Lane(url, name="rows", timeout_s=timeout_s)
        self._leaser = Lane(url, name="lease", timeout_s=timeout_s / 3)
        self._readers = [Lane(url, name="sessions", timeout_s=timeout_s) for _ in range(NUM_READERS)]
        self._idle = list(self._readers)
        self._num_idle = asyncio.Semaphore(NUM_READERS)

    def __repr__(self) -> str:
        return f"<PostgresRows over {self.num_connects} connections>"

    @property
    def num_connects(self) -> int:
        """Connections made so far."""
        return sum(lane.num_connects for lane in (self._writer, self._leaser, *self._readers))

    async def join(self, name: str, *, lease_s: float, instead_of: int | None) -> int:
        await self._open()
        return int((await self._leaser.fetch(_JOIN, name, lease_s, instead_of))[0][0])

    async def renew(self, owner: int, *, lease_s: float) -> bool:
        await self._open()
        return bool(await self._leaser.fetch(_RENEW, owner, lease_s))

    async def leave(self, owner: int) -> None:
        await self._leaser.fetch(_LEAVE, owner)

    async def owners(self) -> Sequence[str]:
        return [row[0] for row in await self._fetch(_OWNERS)]

    async def create(self, new: NewSession, owner: int) -> int | None:
        head = new.body[:HEAD_BYTES]
        values = (new.session_id, new.ttl_s, new.at, new.body, new.digest, new.key, owner, head)
        found = await self._fetch(_CREATE, *values)
        return int(found[0][0]) if found else None

    async def append(self, moves: Sequence[EndMove], rows: Sequence[NewRow]) -> set[int]:
        found = await self._writer.fetch(
            _APPEND,
            [move.session for move in moves],
            [move.epoch for move in moves],
            [move.before for move in moves],
            [move.seq for move in moves],
            [move.head for move in moves],
            [move.totals.outcome_seq for move in moves],
            [row.session for row in rows],
            [row.seq for row in rows],
            [row.at for row in rows],
            [row.body for row in rows],
            [row.digest for row in rows],
            [move.has_turn for move in moves],
        )
        kept = {int(row[0]) for row in found}
        if left := [move for move in moves if move.session not in kept]:
            values = ([move.session for move in left], [move.seq for move in left], [move.digest for move in left])
            kept |= {int(row[0]) for row in await self._writer.fetch(_ALREADY, *values)}
        return kept

    async def claim(self, session_id: SessionId, owner: int) -> Claimed | HeldBy | None:
        for _ in range(CLAIMS):
            found = await self._fetch(_CLAIM, session_id, owner)
            if not found:
                return None
            number, before, epoch, new_epoch, name, remaining_s = found[0]
            if new_epoch is not None:
                return Claimed(session=number, epoch=new_epoch, is_new=True)
            if before == owner:
                return Claimed(session=number, epoch=epoch, is_new=False)
            if name is not None and remaining_s > 0:
                return HeldBy(owner=before, name=name, remaining_s=remaining_s)
        return HeldBy(owner=0, name="", remaining_s=0.0)  # others are taking it, or this owner's own lease is over

    async def holder(self, session_id: SessionId, owner: int) -> HeldBy | None:
        found = await self._fetch(_HOLDER, session_id, owner)
        return HeldBy(owner=found[0][0], name=found[0][1], remaining_s=found[0][2]) if found else None

    async def read(self, session_id: SessionId) -> StoredSession | None:
        found = await self._fetch(_READ, session_id)
        if not found:
            return None
        rows = [StoredRow(seq=row[0], body=row[1], digest=row[2]) for row in found]
        number, at, idle_s = found[0][3:]
        return StoredSession(session_id=session_id, number=number, at=at, idle_s=max(0.0, idle_s), rows=rows)

    async def find(self, key: str) -> StoredSession | None:
        found = await self._fetch(_FIND, key)
        if not found:
            return None
        id_, number, at, body, digest = found[0]
        opening = StoredRow(seq=0, body=body, digest=digest)
        return StoredSession(session_id=SessionId(id_), number=number, at=at, rows=[opening])

    async def delete(self, session_id: SessionId, owner: int, adds: Sums) -> Deletion:
        found = await self._fetch(_NUMBER, session_id, owner)
        if not found:
            return Deletion.ABSENT
        number, is_owned = found[0]
        if not is_owned:
            return Deletion.NOT_OWNED
        async with self._reader() as lane:
            # The end first: once it is gone no row can be added, and the statement after it sees all that were.
            await lane.execute(_DELETE.format(number=int(number), owner=int(owner), adds=_literal(adds)))
        return Deletion.NOT_OWNED if await self._fetch(_NUMBER, session_id, owner) else Deletion.DELETED

    async def ended(self) -> Ended:
        found = await self._fetch(_ENDED)
        return Ended(
            sums={key: int(num) for key, num in found if num is not None},
            there={id_ for id_, num in found if num is None},
        )

    async def media_of(self, session_id: SessionId) -> Collection[str]:
        return {row[0] for row in await self._fetch(_MEDIA_OF, session_id)}

    async def put_media(self, session_id: SessionId, ref: MediaRef, body: bytes) -> None:
        await self._fetch(_PUT_MEDIA, session_id, ref.sha256, ref.kind, ref.media_type, body)

    async def get_media(self, session_id: SessionId, sha256: str) -> tuple[MediaRef, bytes] | None:
        for kind, media_type, body in await self._fetch(_GET_MEDIA, session_id, sha256):
            ref = MediaRef(sha256=sha256, kind=MediaKind(kind), media_type=media_type, num_bytes=len(body))
            return ref, body
        return None

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        return [_summary(row) for row in await self._fetch(_PAGE, limit, after)]

    async def expired(self, *, limit: int, owner: int) -> Sequence[SessionId]:
        return [SessionId(row[0]) for row in await self._fetch(_EXPIRED, limit, owner)]

    async def aclose(self) -> None:
        await asyncio.gather(*(lane.aclose() for lane in (self._writer, self._leaser, *self._readers)))

    async def _open(self) -> None:
        """Have a connection for rows and one for all else: a lease without them would keep sessions from everybody."""
        await self._writer.open()
        if not any(lane.is_open for lane in self._readers):
            await self._readers[0].open()

    async def _fetch(self, query: str, *args: object) -> Sequence[Any]:
        async with self._reader() as lane:
            return await lane.fetch(query, *args)

    @asynccontextmanager
    async def _reader(self) -> AsyncGenerator[Lane]:
        """A lane for one user at a time; one without a connection only if no other is idle."""
        async with self._num_idle:
            lane = self._idle.pop()
            try:
                yield lane
            finally:
                self._idle.insert(len(self._idle) if lane.is_open else 0, lane)


def _summary(row: Any) -> StoredSummary:
    number, id_, body, digest, seq, at, head, outcome_seq, outcome, outcome_digest = row
    return StoredSummary(
        session_id=SessionId(id_),
        number=number,
        opened=StoredRow(seq=0, body=body, digest=digest),
        last_head=head,
        last_seq=seq,
        at=at,
        outcome=None if outcome_seq is None else StoredRow(seq=outcome_seq, body=outcome, digest=outcome_digest),
    )


def _literal(sums: Sums) -> str:
    """Sums as a JSON literal of SQL: a DO block takes no parameters. Nothing in a key can end the literal or the block:
    JSON spells quotes and dollars by their numbers."""
    text = json.dumps(dict(sums)).replace("'", r"\u0027").replace("$", r"\u0024")
    return "E'" + text.replace("\\", "\\\\") + "'"
