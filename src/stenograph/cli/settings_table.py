"""The table of all settings: each room's own rows, in the order of docs/settings.md and of `serve --help`."""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stenograph.cli.settings_checks import check_together
from stenograph.core.settings import Setting, SettingsTable, choice, rows_of, setting
from stenograph.http.settings import Settings
from stenograph.model.settings import default_cache_dir


class LogLevel(enum.StrEnum):
    """Levels of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """Formats of the log's lines."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Settings of the log."""

    log_level: LogLevel = setting(LogLevel.INFO, choice(LogLevel), "Lowest level that is logged.")
    log_format: LogFormat = setting(
        LogFormat.TEXT, choice(LogFormat), "Format of the log: text for people, or a JSON object a line."
    )


@dataclass(frozen=True, kw_only=True)
class CommandSettings(Settings, LogSettings):
    """A command's settings: a server's, and those of its log. Made by `load_settings`, or by hand in tests."""


SECTIONS: dict[str, tuple[str, ...]] = {
    "server": (
        "host",
        "port",
        "workers",
        "exit_with",
    ),
    "model": (
        "model",
        "family",
        "chat_template_kwargs",
        "allow_special_in_text",
    ),
    "engine": (
        "engine",
        "engine_url",
        "engine_api_key",
        "engine_keys",
        "connect_timeout",
        "max_reply_bytes",
        "engine_logprobs",
        "weight_version",
        "weights_dir",
        "replay",
        "reply",
    ),
    "embedded engine": (
        "engine_threads",
        "max_batch",
        "kv_tokens",
        "step_tokens",
        "prefix_reuse",
        "forward",
        "torch_device",
        "torch_dtype",
        "tokenize_workers",
    ),
    "CPU work": (
        "cpu_workers",
        "body_slots",
        "loop_watchdog",
    ),
    "sessions": (
        "history",
        "compat",
        "after_length",
        "matcher",
        "sampling",
        "side_rules",
        "canonical",
        "support",
        "cache_salt",
        "require_logprobs",
    ),
    "store": (
        "data_dir",
        "durability",
        "store",
        "advertise_url",
        "lease",
    ),
    "limits and deadlines": (
        "max_sessions",
        "max_in_flight",
        "max_held_tokens",
        "max_nodes",
        "max_strands",
        "session_ttl",
        "max_body_bytes",
        "header_timeout",
        "body_timeout",
        "request_timeout",
        "abort_grace",
        "drain_timeout",
    ),
    "requests": (
        "dialects",
        "unknown_fields",
        "over_budget",
        "proxy_allow",
    ),
    "security": (
        "api_key",
        "admin_key",
        "allow_host",
        "allow_origin",
    ),
    "logs": (
        "log_level",
        "log_format",
    ),
    "traces": ("otlp_endpoint",),
    "files": ("cache_dir",),
}
"""The groups of `serve --help`, and the settings of each, by name."""

_ROWS = rows_of(CommandSettings)

SETTINGS: tuple[Setting, ...] = tuple(_ROWS[name] for names in SECTIONS.values() for name in names)
"""The table: every setting, in the order of the docs."""

_TABLE = SettingsTable(CommandSettings, SETTINGS, check=check_together)


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> CommandSettings:
    """Read the settings as `SettingsTable.load` does; the cache folder where none is set is the environment's."""
    return _TABLE.load(flags, environ, file, defaults={"cache_dir": default_cache_dir(environ)})


def given_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> dict[str, object]:
    """The settings that are given and not left at their defaults, read as `load_settings` does, by name."""
    return _TABLE.given(flags, environ, file)


def kubernetes_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables that Kubernetes set for a Service, not a person for this server: they are no settings."""
    return _TABLE.kubernetes_variables(environ)
