"""All settings in one table: each field of `Settings` carries its doc, its unit and how its value is read.

Flags (`--max-batch`), environment names (`STENOGRAPH_MAX_BATCH`), keys of the TOML file (`max_batch`) and
docs/settings.md all come from this table. Precedence: file < environment < flag. An unknown key or a bad value stops
the start with one line that names key, value and source. Knows nothing of what the settings do.
"""

# ruff: noqa: RUF009  (`_setting` and `_computed` make dataclass fields)

import dataclasses
import enum
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from stenograph.core.errors import StartupError

ENV_PREFIX = "STENOGRAPH_"
_SHOWN_CHARS = 80
_T = TypeVar("_T")


class EngineKind(enum.StrEnum):
    """What samples the tokens."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"
    SGLANG_GENERATE = "sglang-generate"
    LLAMACPP = "llamacpp"
    VLLM = "vllm"
    LMDEPLOY = "lmdeploy"


class ReplyMode(enum.StrEnum):
    """What a client gets of a reply that the engine wrote: all of it, or all but the training-only payloads."""

    PASSTHROUGH = "passthrough"
    LEAN = "lean"


class Switch(enum.StrEnum):
    """Whether something is done."""

    ON = "on"
    OFF = "off"


class HistoryKind(enum.StrEnum):
    """How many lines a session's history has."""

    LINEAR = "linear"
    TREE = "tree"


class ReplayKind(enum.StrEnum):
    """Which training-only payloads an engine is asked for."""

    NONE = "none"
    ROUTED_EXPERTS = "routed_experts"
    INDEXER_TOPK = "indexer_topk"
    ALL = "all"


class UnknownFields(enum.StrEnum):
    """What becomes of a request field that no dialect knows."""

    REFUSE = "refuse"
    RECORD = "record"


class OverBudget(enum.StrEnum):
    """What becomes of a `max_tokens` that the context has no room for."""

    REFUSE = "refuse"
    CLAMP = "clamp"


class ForwardKind(enum.StrEnum):
    """What computes the embedded engine's forward pass."""

    NUMPY = "numpy"
    TORCH = "torch"


class TorchDtype(enum.StrEnum):
    """What torch holds weights, keys and values in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class GrammarBackendKind(enum.StrEnum):
    """What compiles the embedded engine's grammars."""

    LLGUIDANCE = "llguidance"
    XGRAMMAR = "xgrammar"


class LogLevel(enum.StrEnum):
    """How much goes to the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How one setting's value is read. `read` takes text or a TOML value and raises ValueError for what it is not."""

    expected: str
    read: Callable[[object], object]
    choices: tuple[str, ...] = ()
    repeatable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row of the table: one setting under all of its names. `default` is text for people to read.

    `field` is that of `Settings`; `name`, the file's key and what the other names are made of, has no unit in it.
    """

    field: str
    name: str
    env: str
    doc: str
    unit: str
    default: str
    kind: Kind
    secret: bool

    @property
    def flag(self) -> str:
        """The command line's name of it."""
        return "--" + self.name.replace("_", "-")


def _int(low: int, high: int = 2**31 - 1) -> Kind:
    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError
        return value

    return Kind(expected=f"a whole number from {low} to {high}", read=read)


def _seconds(high: float) -> Kind:
    def read(value: object) -> float:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise ValueError
        return float(value)

    return Kind(expected=f"a number of seconds above 0 and at most {high:g}", read=read)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def _text() -> Kind:
    def read(value: object) -> str:
        if not _is_text(value):
            raise ValueError
        return cast("str", value)

    return Kind(expected="a text that is not empty", read=read)


def _choice(options: type[enum.StrEnum]) -> Kind:
    names = tuple(str(option) for option in options)

    def read(value: object) -> enum.StrEnum:
        if not isinstance(value, str):
            raise ValueError
        return options(value)

    return Kind(expected="one of " + ", ".join(names), read=read, choices=names)


def _torch_device() -> Kind:
    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
            raise ValueError
        return value

    return Kind(expected="one of auto, cpu, cuda, cuda:0, cuda:1 and so on", read=read)


def _folder() -> Kind:
    def read(value: object) -> Path:
        if not _is_text(value):
            raise ValueError
        try:
            return Path(cast("str", value)).expanduser()
        except RuntimeError as error:  # "~nobody/": there is no such home
            raise ValueError from error

    return Kind(expected="a path", read=read)


def _keys() -> Kind:
    def read(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise ValueError
        keys = cast("list[object]", parts)
        # What can stand in a header: visible ASCII. The comma separates keys in the environment.
        if not all(isinstance(key, str) and re.fullmatch(r"[!-+\--~]+", key) for key in keys):
            raise ValueError
        return tuple(dict.fromkeys(cast("list[str]", keys)))

    return Kind(expected="keys of visible ASCII without commas", read=read, repeatable=True)


def _paths() -> Kind:
    def read(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise ValueError
        paths = cast("list[object]", parts)
        if not all(isinstance(path, str) and re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", path) for path in paths):
            raise ValueError
        return tuple(dict.fromkeys(cast("list[str]", paths)))

    return Kind(expected="paths like v1/models, without a slash before or after", read=read, repeatable=True)


def _json_object() -> Kind:
    def read(value: object) -> dict[str, object]:
        try:
            decoded = json.loads(value) if isinstance(value, str) else value
            json.dumps(decoded, allow_nan=False)  # TOML has dates, and both have NaN
        except (TypeError, RecursionError) as error:
            raise ValueError from error
        if not isinstance(decoded, dict):
            raise ValueError
        return cast("dict[str, object]", decoded)

    return Kind(expected="a JSON object", read=read)


def _urls() -> Kind:
    def read(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise ValueError
        urls = cast("list[object]", parts)
        if not all(isinstance(url, str) and re.fullmatch(r"https?://[^\s/?#@,]+(/[^\s?#,]*)?", url) for url in urls):
            raise ValueError
        return tuple(dict.fromkeys(url.rstrip("/") for url in cast("list[str]", urls)))

    return Kind(expected="http or https addresses, without a query", read=read, repeatable=True)


def _setting(default: _T, kind: Kind, doc: str, *, unit: str = "", shown: str = "", secret: bool = False) -> _T:
    """A field of `Settings` with its row of the table. `shown` is the default in words."""
    metadata = {"kind": kind, "doc": doc, "unit": unit, "shown": shown or str(default), "env": ""}
    return field(default=default, metadata=metadata, repr=not secret)


def _computed(factory: Callable[[], _T], kind: Kind, doc: str, *, shown: str, unit: str = "", env: str = "") -> _T:
    """The same for a default that depends on the machine. `env` replaces the environment name made of the field's."""
    metadata = {"kind": kind, "doc": doc, "unit": unit, "shown": shown, "env": env}
    return field(default_factory=factory, metadata=metadata)


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """The cache folder where none is set: `$XDG_CACHE_HOME/stenograph`, else `~/.cache/stenograph`."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path is ignored.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "stenograph"


def _default_cpu_workers() -> int:
    return min(16, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server is told at its start. Made by `load_settings`, or by hand in tests; never changed."""

    host: str = _setting("127.0.0.1", _text(), "Address to listen on.")
    port: int = _setting(8080, _int(0, 65535), "Port to listen on; 0 takes any free one.")
    model: str = _setting("smollm2-135m", _text(), "The model: `smollm2-135m`, a .gguf file, or a folder.")
    family: str = _setting("auto", _text(), "The model's family: how its turns are rendered and parsed.")
    chat_template_kwargs: Mapping[str, object] = _computed(
        dict[str, object],
        _json_object(),
        "Arguments of the chat template in every turn; a session's own win, and a request's over both.",
        shown="none",
    )
    allow_special_in_text: Switch = _setting(
        Switch.OFF,
        _choice(Switch),
        "Whether a control token that a user, a tool or a file spells in plain text becomes that token.",
    )
    engine: EngineKind = _setting(EngineKind.EMBEDDED, _choice(EngineKind), "What samples the tokens.")
    engine_url: tuple[str, ...] = _setting(
        (),
        _urls(),
        "Address of the engine, for those that are servers; repeatable, for several that serve the same model.",
        shown="none",
    )
    connect_timeout_s: float = _setting(
        5.0, _seconds(3600), "How long a connection to the engine may take to be made.", unit="seconds"
    )
    replay: ReplayKind = _setting(
        ReplayKind.NONE, _choice(ReplayKind), "Training-only payloads that the engine is asked for with each reply."
    )
    reply: ReplyMode = _setting(
        ReplyMode.PASSTHROUGH,
        _choice(ReplyMode),
        "Whether clients get an engine's reply whole, or without routed_experts and indexer_topk.",
    )
    engine_threads: int = _setting(1, _int(1, 1024), "BLAS threads of the embedded engine.", unit="threads")
    max_batch: int = _setting(16, _int(1, 4096), "Sequences that the embedded engine steps at once.", unit="sequences")
    kv_tokens: int = _setting(65536, _int(16), "Room of the embedded engine's KV cache.", unit="tokens")
    step_tokens: int = _setting(
        256,
        _int(2, 1_048_576),
        "Tokens that the embedded engine computes in a step at most, more than max_batch: a prompt's chunk, and how "
        "long those that decode wait for it.",
        unit="tokens",
    )
    prefix_reuse: Switch = _setting(
        Switch.ON, _choice(Switch), "Whether the embedded engine finds the KV of earlier turns again."
    )
    forward: ForwardKind = _setting(
        ForwardKind.NUMPY,
        _choice(ForwardKind),
        "What computes the embedded engine's forward pass; torch needs `pip install 'stenograph[torch]'`.",
    )
    torch_device: str = _setting(
        "auto", _torch_device(), "Where `--forward torch` computes; auto is the first GPU, else the CPU."
    )
    torch_dtype: TorchDtype = _setting(
        TorchDtype.FLOAT32, _choice(TorchDtype), "What `--forward torch` holds weights, keys and values in."
    )
    grammar_backend: GrammarBackendKind = _setting(
        GrammarBackendKind.LLGUIDANCE,
        _choice(GrammarBackendKind),
        "What compiles the embedded engine's grammars; xgrammar needs `pip install 'stenograph[xgrammar]'`.",
    )
    cpu_workers: int = _computed(
        _default_cpu_workers, _int(1, 1024), "Threads for CPU work off the loop.", unit="threads", shown="min(16, CPUs)"
    )
    body_slots: int = _setting(
        2,
        _int(1, 1024),
        "Large bodies that are read and decoded at a time; the others wait in their sockets.",
        unit="bodies",
    )
    loop_watchdog: Switch = _setting(
        Switch.OFF, _choice(Switch), "Log what holds the event loop whenever it is held for 50 ms."
    )
    history: HistoryKind = _setting(
        HistoryKind.LINEAR, _choice(HistoryKind), "The history of sessions that do not say which they want."
    )
    matcher: str = _setting(
        "harness",
        _text(),
        "When a replayed message is the stored one: harness, strict, loose_tool_call, role_content,"
        " or the dotted path of a Python object with `matches(stored, given)`.",
    )
    max_sessions: int = _setting(10_000, _int(1), "Sessions that may be open at once.", unit="sessions")
    max_in_flight: int = _setting(256, _int(1), "Turns that may run at once in the whole server.", unit="turns")
    max_held_tokens: int = _setting(
        10**9, _int(1), "Tokens that all sessions together may hold before turns are refused.", unit="tokens"
    )
    max_nodes: int = _setting(4096, _int(1), "Turns that a tree history may hold.", unit="turns")
    session_ttl_s: float | None = _setting(
        None,
        _seconds(10 * 365 * 86400),
        "Time without a chat after which a session is dropped.",
        unit="seconds",
        shown="none: kept until deleted",
    )
    max_body_bytes: int = _setting(32 * 2**20, _int(1024), "Largest request body that is taken.", unit="bytes")
    request_timeout_s: float = _setting(
        600.0, _seconds(86400), "A turn's deadline, from its admission.", unit="seconds"
    )
    abort_grace_s: float = _setting(
        5.0, _seconds(3600), "How long an aborted turn waits for the engine's partial reply.", unit="seconds"
    )
    drain_timeout_s: float = _setting(30.0, _seconds(86400), "How long a stop waits for running turns.", unit="seconds")
    unknown_fields: UnknownFields = _setting(
        UnknownFields.REFUSE, _choice(UnknownFields), "Refuse a request's unknown fields, or only record them."
    )
    over_budget: OverBudget = _setting(
        OverBudget.REFUSE,
        _choice(OverBudget),
        "Refuse a `max_tokens` that the context has no room for, or take it as the room that there is.",
    )
    proxy_allow: tuple[str, ...] = _setting(
        ("v1/models", "v1/embeddings", "tokenize", "detokenize"),
        _paths(),
        "A path that is passed on to the engine as it comes, unrecorded; repeatable like `--api-key`.",
        shown="v1/models, v1/embeddings, tokenize, detokenize",
    )
    api_key: tuple[str, ...] = _setting(
        (),
        _keys(),
        "A key that clients must send; repeatable as a flag, a list in the file, comma-separated in the environment.",
        shown="none: open",
        secret=True,
    )
    log_level: LogLevel = _setting(LogLevel.INFO, _choice(LogLevel), "How much is logged.")
    cache_dir: Path = _computed(
        lambda: default_cache_dir(os.environ),
        _folder(),
        "Folder that fetched models are kept in.",
        shown="$XDG_CACHE_HOME/stenograph, else ~/.cache/stenograph",
        env="STENOGRAPH_CACHE",
    )


def _row(setting: "dataclasses.Field[object]") -> Setting:
    facts = setting.metadata
    return Setting(
        field=setting.name,
        name=setting.name.removesuffix("_s"),
        env=facts["env"] or ENV_PREFIX + setting.name.removesuffix("_s").upper(),
        doc=facts["doc"],
        unit=facts["unit"],
        default=facts["shown"],
        kind=facts["kind"],
        secret=not setting.repr,
    )


SETTINGS: tuple[Setting, ...] = tuple(_row(setting) for setting in dataclasses.fields(Settings))
"""The table: every setting, in the order of the docs."""

_BY_NAME = {setting.name: setting for setting in SETTINGS}
_BY_ENV = {setting.env: setting for setting in SETTINGS}


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> Settings:
    """Read the settings: file < environment < flag.

    `flags` maps field names to text or values; None means that the flag was not given. `environ` is the whole
    environment, of which only `STENOGRAPH_…` (and the cache folder's XDG variable) is looked at.
    Raises StartupError (one line: key, value, source) for an unknown key, a bad value or an unreadable file.
    """
    values: dict[str, object] = {"cache_dir": default_cache_dir(environ)}
    if file is not None:
        for key, value in _read_toml(file).items():
            values[key] = _read(_BY_NAME, key, value, f"the file {str(file)!r}", text=False)
    for key in sorted(key for key in environ if key.startswith(ENV_PREFIX)):
        setting = _BY_ENV.get(key)
        values[setting.name if setting else key] = _read(_BY_ENV, key, environ[key], "the environment")
    for key, value in flags.items():
        if value is not None:
            values[key] = _read(_BY_NAME, key, value, "the command line")
    # The table has checked each value against its field; a type checker cannot follow that through a mapping.
    settings = Settings(**{_BY_NAME[name].field: value for name, value in values.items()})  # type: ignore[arg-type]
    _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    """Raise StartupError for settings that do not fit each other."""
    _check_embedded(settings)
    is_embedded = settings.engine is EngineKind.EMBEDDED
    if not is_embedded and not settings.engine_url:
        raise StartupError(f"engine {settings.engine} needs its address: set engine_url")
    if is_embedded and settings.engine_url:
        raise StartupError("engine_url is set, but the engine is the embedded one: set engine too")
    if is_embedded and settings.replay is not ReplayKind.NONE:
        raise StartupError("replay is set, but the embedded engine has no experts to replay")
    if is_embedded and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"reply is {settings.reply}, but the embedded engine writes no replies: set engine too")
    if settings.engine is EngineKind.LLAMACPP and settings.replay is not ReplayKind.NONE:
        raise StartupError("replay is set, but llama.cpp does not tell of its experts")
    if settings.engine is EngineKind.LLAMACPP and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"reply is {settings.reply}, but llama.cpp writes no replies here")
    if settings.engine is EngineKind.VLLM and settings.replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        raise StartupError(f"replay is {settings.replay}, but vLLM tells of routed_experts alone")
    if settings.engine is EngineKind.VLLM and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"reply is {settings.reply}, but vLLM writes no replies here")
    if settings.engine is EngineKind.SGLANG_GENERATE and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"reply is {settings.reply}, but SGLang's own route writes no replies")
    if settings.engine is EngineKind.LMDEPLOY and settings.replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        raise StartupError(f"replay is {settings.replay}, but LMDeploy tells of routed_experts alone")
    if settings.engine is EngineKind.LMDEPLOY and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"reply is {settings.reply}, but LMDeploy writes no replies here")


def _check_embedded(settings: Settings) -> None:
    """Raise StartupError for the embedded engine's settings that do not fit each other, or are of no use."""
    is_embedded = settings.engine is EngineKind.EMBEDDED
    if settings.step_tokens <= settings.max_batch:
        raise StartupError(
            f"step_tokens is {settings.step_tokens}, but must be above max_batch, {settings.max_batch}: set it too"
        )
    if not is_embedded and settings.prefix_reuse is Switch.OFF:
        raise StartupError(f"prefix_reuse is off, but engine is {settings.engine}: only the embedded one has it")
    if not is_embedded and settings.grammar_backend is not GrammarBackendKind.LLGUIDANCE:
        raise StartupError(f"grammar_backend is set, but engine is {settings.engine}: only the embedded one has it")
    if not is_embedded and settings.forward is not ForwardKind.NUMPY:
        raise StartupError(
            f"forward is {settings.forward}, but engine is {settings.engine}: only the embedded one has it"
        )
    if settings.forward is not ForwardKind.TORCH and settings.torch_device != "auto":
        raise StartupError(
            f"torch_device is {settings.torch_device}, but forward is {settings.forward}: set forward too"
        )
    if settings.forward is not ForwardKind.TORCH and settings.torch_dtype is not TorchDtype.FLOAT32:
        raise StartupError(f"torch_dtype is {settings.torch_dtype}, but forward is {settings.forward}: set forward too")


def _read_toml(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read the file {str(file)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, an absurd number, or nested without end
        raise StartupError(f"the file {str(file)!r} is not TOML: {' '.join(str(error).split())}") from error


def _read(table: Mapping[str, Setting], key: str, value: object, source: str, *, text: bool = True) -> object:
    setting = table.get(key)
    if setting is None:
        raise StartupError(f"unknown setting {_shown(key)} in {source}; docs/settings.md lists all")
    try:
        if not text and isinstance(value, str) and not isinstance(setting.kind.read(value), str | Path):
            raise ValueError  # in TOML, a number is not written as a text
        return setting.kind.read(value)
    except ValueError:
        shown = "(not shown)" if setting.secret else _shown(value)
        raise StartupError(f"bad value {shown} for {key} in {source}: expected {setting.kind.expected}") from None


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 1] + "…"
