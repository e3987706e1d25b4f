"""The schema of a shared database: its tables, and how an older one is brought up to date.

The tables lie in the first schema of the connection's `search_path`.
"""

from stenograph.core.errors import StartupError
from stenograph.store.postgres.connection import PgConnection, connect

SCHEMA = 1
"""The schema that this server writes, in `stenograph_schema`."""

_LOCK = 0x53746E67
"""`Stng`: the advisory lock under which one node at a time brings the schema up to date."""

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
)
"""The statements that bring a database from each schema to the next."""

_HAS_TABLES = "SELECT to_regclass('stenograph_schema') IS NOT NULL"


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
        connection.terminate()


async def check_schema(url: str, *, timeout_s: float) -> None:
    """Raise StartupError for a database without our tables, or with a schema that this program does not know."""
    connection = await _connected(url, timeout_s)
    try:
        version = await _version(connection)
    finally:
        connection.terminate()
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
        problem = str(error) or type(error).__name__
        raise StartupError(f"--store: cannot connect to the database: {problem}") from error


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
