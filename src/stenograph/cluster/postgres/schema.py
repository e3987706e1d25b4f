"""A shared database at the start of a server: its connections, its tables, and how older ones are brought up to date.

The tables lie in the first schema of the connection's `search_path`.
"""

import asyncio

from stenograph.cluster.postgres.connection import PgConnection, closed, connect
from stenograph.core.errors import StartupError

SCHEMA = 3
"""The schema written by this server, in `stenograph_schema`."""

_LOCK = 0x53746E67
"""`Stng`: the advisory lock for one node at a time to bring the schema up to date."""

_MEDIA_LOCK = _LOCK + 1
"""Shared by those that put media, and alone for one that looks whether a content is used. Taken after a session's row:
in one order, so nobody waits in a circle."""

_MIGRATIONS = (
    """
    CREATE TABLE stenograph_owners (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, url text NOT NULL,
        until timestamptz NOT NULL) WITH (fillfactor = 50);
    CREATE TABLE stenograph_sessions (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE,
        ttl_s double precision, at double precision NOT NULL, body bytea NOT NULL, digest bytea NOT NULL, key text);
    CREATE INDEX stenograph_sessions_by_key ON stenograph_sessions (key) WHERE key IS NOT NULL;
    CREATE TABLE stenograph_ends (session bigint PRIMARY KEY, owner bigint NOT NULL, epoch bigint NOT NULL,
        seq bigint NOT NULL, at double precision NOT NULL, head bytea NOT NULL, outcome bigint NOT NULL)
        WITH (fillfactor = 50);
    CREATE TABLE stenograph_rows (session bigint NOT NULL, seq bigint NOT NULL, at double precision NOT NULL,
        body bytea NOT NULL, digest bytea NOT NULL, PRIMARY KEY (session, seq));
    """,
    f"""
    CREATE TABLE stenograph_media (sha256 text PRIMARY KEY, kind text NOT NULL, media_type text NOT NULL,
        body bytea NOT NULL);
    CREATE TABLE stenograph_session_media (session bigint NOT NULL
        REFERENCES stenograph_sessions ON DELETE CASCADE, sha256 text NOT NULL, PRIMARY KEY (session, sha256));
    CREATE INDEX stenograph_sessions_of_media ON stenograph_session_media (sha256);
    CREATE FUNCTION stenograph_put_media(of_session text, new_sha256 text, new_kind text, new_type text, new_body bytea)
    RETURNS void LANGUAGE plpgsql AS $$
    DECLARE own bigint;
    BEGIN
        SELECT number INTO own FROM stenograph_sessions WHERE id = of_session FOR KEY SHARE;
        IF FOUND THEN
            PERFORM pg_advisory_xact_lock_shared({_MEDIA_LOCK});
            INSERT INTO stenograph_media VALUES (new_sha256, new_kind, new_type, new_body) ON CONFLICT DO NOTHING;
            INSERT INTO stenograph_session_media VALUES (own, new_sha256) ON CONFLICT DO NOTHING;
        END IF;
    END $$;
    CREATE FUNCTION stenograph_media_unused() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock({_MEDIA_LOCK});
        DELETE FROM stenograph_media m WHERE m.sha256 = old.sha256
            AND NOT EXISTS (SELECT FROM stenograph_session_media l WHERE l.sha256 = old.sha256);
        RETURN NULL;
    END $$;
    CREATE TRIGGER stenograph_media_unused AFTER DELETE ON stenograph_session_media
        FOR EACH ROW EXECUTE FUNCTION stenograph_media_unused();
    """,
    """
    CREATE TABLE stenograph_sums (key text PRIMARY KEY, num bigint NOT NULL);
    """,
)
"""The statements to bring a database from each schema to the next."""

_HAS_TABLES = "SELECT to_regclass('stenograph_schema') IS NOT NULL"


_POOLED = (
    "--store: what stands before the database (pgbouncer?) gives a connection's statements to any backend"
    " (pool_mode = transaction or statement). Prepared statements and settings of the session get lost there. Use"
    " pool_mode = session, or PostgreSQL's own address"
)
_LOST_STATEMENT = ("42P05", "26000")
"""A prepared statement of another connection's is there, or one's own is not."""


async def check_connections(url: str, *, num: int, timeout_s: float) -> None:
    """Hold so many connections at once, as the server's processes will. Raises StartupError."""
    held: list[PgConnection] = []
    try:
        while len(held) < num:
            held.append(await connect(url, name="start", timeout_s=timeout_s))
            if len(held) == 2:
                await _check_own_backends(*held, timeout_s=timeout_s)
    except StartupError:
        raise
    except Exception as error:
        if getattr(error, "sqlstate", None) in _LOST_STATEMENT:
            raise StartupError(_POOLED) from error
        raise StartupError(_too_few(len(held), num, error) if held else _unreachable(error)) from error
    finally:
        await asyncio.gather(*map(closed, held))


async def _check_own_backends(one: PgConnection, other: PgConnection, *, timeout_s: float) -> None:
    """Raise StartupError unless a connection keeps its backend while another is in a transaction."""
    try:
        async with asyncio.timeout(timeout_s):
            own = await _backend(one)
            await other.execute("BEGIN")
            theirs, again = await _backend(other), await _backend(one)
    except Exception as error:  # a transaction is refused, or the only backend is taken
        raise StartupError(f"{_POOLED}. It said: {str(error) or type(error).__name__}") from error
    if theirs == own or again != own:
        raise StartupError(_POOLED)


async def _backend(connection: PgConnection) -> int:
    return int((await connection.fetch("SELECT pg_backend_pid()"))[0][0])


def _too_few(num_held: int, num: int, error: Exception) -> str:
    return (
        f"--store: this server needs {num} connections to the database at once, and got {num_held}:"
        f" {str(error) or type(error).__name__}. Raise the CONNECTION LIMIT of the role or the database, or"
        " max_connections, or use fewer --workers"
    )


async def prepare(url: str, *, timeout_s: float, migrations: tuple[str, ...] = _MIGRATIONS) -> None:
    """Make the tables, or bring them up to date, whole or not at all. Raises StartupError."""
    connection = await _connected(url, timeout_s)
    try:
        await connection.execute("BEGIN")
        await connection.fetch("SELECT pg_advisory_xact_lock($1)", _LOCK)
        version = await _version(connection)
        if version is None:
            await connection.execute("CREATE TABLE stenograph_schema (version int NOT NULL)")
            await connection.execute("INSERT INTO stenograph_schema VALUES (0)")
        if (version or 0) > len(migrations):
            raise StartupError(_newer(version or 0, len(migrations)))
        for script in migrations[version or 0 :]:
            await connection.execute(script)
        await connection.fetch("UPDATE stenograph_schema SET version = $1", len(migrations))
        await connection.execute("COMMIT")
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(f"--store: the tables cannot be made in the database: {error}") from error
    finally:
        await closed(connection)


async def check_schema(url: str, *, timeout_s: float) -> None:
    """Raise StartupError for a database without our tables, or with a schema unknown to this program."""
    connection = await _connected(url, timeout_s)
    try:
        version = await _version(connection)
    finally:
        await closed(connection)
    if version is None:
        raise StartupError("there are no sessions in this database: it has no table stenograph_schema")
    if version != SCHEMA:
        raise StartupError(_newer(version, SCHEMA) if version > SCHEMA else _older(version))


async def _connected(url: str, timeout_s: float) -> PgConnection:
    try:
        return await connect(url, name="start", timeout_s=timeout_s)
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(_unreachable(error)) from error


def _unreachable(error: Exception) -> str:
    return f"--store: cannot connect to the database: {str(error) or type(error).__name__}"


async def _version(connection: PgConnection) -> int | None:
    """The version of the schema; None if there is none."""
    if not (await connection.fetch(_HAS_TABLES))[0][0]:
        return None
    return int((await connection.fetch("SELECT version FROM stenograph_schema"))[0][0])


def _newer(version: int, known: int) -> str:
    return (
        f"the database has schema {version}, and this server knows {known}: a newer stenograph has written it. Use that"
        " one, or another database"
    )


def _older(version: int) -> str:
    return f"the database has schema {version}, an older one: start a server on it, which brings it up to date"
