"""The settings of the HTTP server, and `Settings`: all settings of the core."""

from dataclasses import dataclass

from stenograph.core.settings import Section, seconds, setting, text, texts, whole_number
from stenograph.dialects.settings import HOSTS, DialectSettings
from stenograph.engine.settings import EngineSettings
from stenograph.model.settings import ModelSettings
from stenograph.offload.settings import OffloadSettings
from stenograph.session.settings import SessionSettings
from stenograph.store.settings import StoreSettings
from stenograph.text.settings import RenderSettings

KEYS = texts(r"[!-+\--~]+", "keys of visible ASCII without commas")
"""The characters allowed for a key in a header: visible ASCII. The comma separates keys in the environment."""

PATHS = texts(
    r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*",
    "paths like v1/models, without a slash before or after",
    may_be_empty=True,
)
ORIGINS = texts(
    r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@,*]+",
    "origins like https://example.org, without a path",
    normalize=str.lower,
)


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """The server's address, its keys and allowed sites, and its deadlines for clients."""

    host: str = setting("127.0.0.1", text(), "Address to listen on.", section=Section.SERVER)
    port: int = setting(8080, whole_number(0, 65535), "Port to listen on; 0 takes any free one.")
    exit_with: int | None = setting(
        None,
        whole_number(1, 2**31 - 1),
        "Stop, as SIGTERM does, once the process of this number has ended, however it did: a trainer's, or a shell's.",
        shown="none",
    )
    max_body_bytes: int = setting(
        32 * 2**20, whole_number(1024), "Largest request body that is taken.", unit="bytes", section=Section.LIMITS
    )
    header_timeout_s: float = setting(
        10.0, seconds(3600), "How long a request's head may take to come; then 408.", unit="seconds"
    )
    body_timeout_s: float = setting(
        30.0,
        seconds(3600),
        "How long nothing of a request's body may come, or less than 1 KiB a second; then 408.",
        unit="seconds",
    )
    request_timeout_s: float = setting(600.0, seconds(86400), "A turn's deadline, from its admission.", unit="seconds")
    abort_grace_s: float = setting(
        5.0, seconds(3600), "Time that an aborted turn waits for the engine's partial reply.", unit="seconds"
    )
    drain_timeout_s: float = setting(30.0, seconds(86400), "How long a stop waits for running turns.", unit="seconds")
    proxy_allow: tuple[str, ...] = setting(
        ("v1/models", "v1/embeddings", "tokenize", "detokenize"),
        PATHS,
        "A path that is passed on to the engine as it comes, unrecorded; repeatable like `--api-key`.",
        shown="v1/models, v1/embeddings, tokenize, detokenize",
        section=Section.REQUESTS,
    )
    api_key: tuple[str, ...] = setting(
        (),
        KEYS,
        "A key that clients must send; repeatable as a flag, a list in the file, comma-separated in the environment.",
        shown="none: open",
        secret=True,
        section=Section.SECURITY,
    )
    admin_key: tuple[str, ...] = setting(
        (),
        KEYS,
        "A key that the routes for trainers and administrators take: weights, engines, backups; repeatable like"
        " `--api-key`, of which none is enough for these. Good for everything else, too.",
        shown="none: open without --api-key, else refused",
        secret=True,
    )
    allow_host: tuple[str, ...] = setting(
        (),
        HOSTS,
        "A name that this server is asked for under, besides this machine's own; repeatable. Asked of every request"
        " where `--host` is a loopback address, or where any is given.",
        shown="none",
    )
    allow_origin: tuple[str, ...] = setting(
        (),
        ORIGINS,
        "A site whose web pages may use this server; repeatable. Pages of other sites are refused.",
        shown="none",
    )


@dataclass(frozen=True, kw_only=True)
class Settings(
    HttpSettings,
    SessionSettings,
    DialectSettings,
    StoreSettings,
    EngineSettings,
    RenderSettings,
    OffloadSettings,
    ModelSettings,
):
    """All settings of the core, each room's side by side. Never changed."""
