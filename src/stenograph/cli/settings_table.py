"""The table of all settings: each room's own rows, in the order of docs/settings.md and of `serve --help`."""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stenograph.cli.settings_checks import check_together
from stenograph.core.settings import Section, Setting, SettingsTable, choice, rows_of, setting
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

    log_level: LogLevel = setting(LogLevel.INFO, choice(LogLevel), "Lowest level that is logged.", section=Section.LOGS)
    log_format: LogFormat = setting(
        LogFormat.TEXT, choice(LogFormat), "Format of the log: text for people, or a JSON object a line."
    )


@dataclass(frozen=True, kw_only=True)
class CommandSettings(Settings, LogSettings):
    """A command's settings: a server's, and those of its log. Made by `load_settings`, or by hand in tests."""


SETTINGS: tuple[Setting, ...] = rows_of(CommandSettings)
"""The table: every setting, in the order of the docs."""

_TABLE = SettingsTable(CommandSettings, SETTINGS, check=check_together)


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> CommandSettings:
    """Read the settings as `SettingsTable.load` does; the cache folder where none is set is the environment's."""
    return _TABLE.load(flags, environ, file, defaults={"cache_dir": default_cache_dir(environ)})


def given_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> dict[str, object]:
    """The settings given and not left at their defaults, read as `load_settings` does, by name."""
    return _TABLE.given(flags, environ, file)


def kubernetes_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables set by Kubernetes for a Service, not by a person for this server: they are no settings."""
    return _TABLE.kubernetes_variables(environ)
