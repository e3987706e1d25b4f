"""The table of all settings, of each room and of each part, in the order of docs/settings.md and of `serve --help`.

Reads them, refuses those in conflict (one of no use to the engine, or one in need of another), and makes them flags.
"""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

import argparse
import enum
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from stenograph.core.errors import StartupError
from stenograph.core.kinds import ReplyMode, SaltMode
from stenograph.core.settings import Section, Setting, SettingsTable, Switch, choice, rows_of, setting
from stenograph.engine.settings import EngineKind
from stenograph.http.settings import Settings
from stenograph.model.settings import default_cache_dir
from stenograph.parts import (
    AccountSettings,
    ClusterSettings,
    EmbeddedSettings,
    ForwardKind,
    ReplaySettings,
    ScoreSettings,
    TenantSettings,
    TraceSettings,
    WeightSettings,
)
from stenograph.store.settings import Durability


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
class CommandSettings(
    ClusterSettings,
    TraceSettings,
    TenantSettings,
    AccountSettings,
    ScoreSettings,
    ReplaySettings,
    WeightSettings,
    EmbeddedSettings,
    Settings,
    LogSettings,
):
    """A command's settings: a server's, those of its parts and of its log. Made by `load_settings`, or by hand in
    tests."""

    def check(self) -> None:
        _check_rooms(self)


SALTING = (EngineKind.SGLANG, EngineKind.SGLANG_GENERATE, EngineKind.VLLM)
"""Engines with a salt for their cache."""

NO_REPLIES = {
    EngineKind.EMBEDDED: "the embedded engine writes no replies: set --engine too",
    EngineKind.LLAMACPP: "llama.cpp writes no replies here",
    EngineKind.VLLM: "vLLM writes no replies here",
    EngineKind.SGLANG_GENERATE: "SGLang's own route writes no replies",
    EngineKind.LMDEPLOY: "LMDeploy writes no replies here",
    EngineKind.REPLAY: "the engine replay samples nothing",
}
"""Engines that leave the parsing of replies to us."""

UNSPECIFIED = ("0.0.0.0", "::")
"""Hosts standing for every address of a machine."""


def _check_rooms(settings: CommandSettings) -> None:
    """Raise StartupError for settings in conflict with those of another room: each room checks its own."""
    _check_store(settings)
    _check_support(settings)
    _check_embedded(settings)
    _check_play(settings)
    _check_tenants(settings)
    if settings.engine in NO_REPLIES and settings.reply is not ReplyMode.PASSTHROUGH:
        raise StartupError(f"--reply is {settings.reply}, but {NO_REPLIES[settings.engine]}")


def _check_store(settings: CommandSettings) -> None:
    if settings.store is not None:
        _check_shared(settings)
        return
    if settings.data_dir is None and settings.kept is not Durability.NONE:
        raise StartupError(f"--durability is {settings.durability}, but sessions are in memory: give --data-dir, too")
    if settings.data_dir is not None and settings.kept is Durability.NONE:
        raise StartupError("--data-dir is set, but --durability is none, which keeps nothing: leave one of them out")


def _check_shared(settings: CommandSettings) -> None:
    """Raise StartupError for settings in conflict with a database shared by servers."""
    if settings.data_dir is not None:
        raise StartupError("--store and --data-dir are both set, but sessions are kept in one place: leave one out")
    if settings.durability not in (None, Durability.COMMIT):
        raise StartupError(
            f"--durability is {settings.durability}, but a database of --store keeps turns as commit does"
        )
    if settings.advertise_url is None and settings.host in UNSPECIFIED:
        raise StartupError(
            f"--host {settings.host} is not an address that other servers can reach: give --advertise-url, for instance"
            f" http://10.0.0.5:{settings.port}"
        )


def _check_support(settings: CommandSettings) -> None:
    if settings.support is Switch.ON and settings.engine in (EngineKind.LLAMACPP, EngineKind.LMDEPLOY):
        raise StartupError(f"--support is on, but {settings.engine} does not report which ids could be sampled")

    if settings.cache_salt is SaltMode.PIN and settings.engine not in SALTING:
        raise StartupError(
            f"--cache-salt is pin, but {settings.engine} cannot keep a cache of the weights that a session began with"
        )


def _check_embedded(settings: CommandSettings) -> None:
    """Raise StartupError for settings of the embedded engine where another one samples."""
    is_embedded = settings.engine is EngineKind.EMBEDDED
    own: tuple[tuple[str, object, object, str], ...] = (
        ("--prefix-reuse", settings.prefix_reuse, Switch.ON, "it"),
        ("--tokenize-workers", settings.tokenize_workers, 0, "them"),
        ("--forward", settings.forward, ForwardKind.NUMPY, "it"),
    )
    for flag, value, default, it in own:
        if not is_embedded and value != default:
            raise StartupError(f"{flag} is {value}, but --engine is {settings.engine}: only the embedded one has {it}")


def _check_play(settings: CommandSettings) -> None:
    """Raise StartupError where sessions cannot be lived again as it is set."""
    is_alone = settings.engine is EngineKind.REPLAY
    flag = "--engine replay" if is_alone else "--play"
    if settings.play is None and not is_alone:
        if settings.strict is Switch.ON or settings.play_ignores:
            flag = "--strict" if settings.strict is Switch.ON else "--play-ignores"
            raise StartupError(f"{flag} is set, but no sessions are lived again: give --play, too")
    elif settings.workers > 1 or settings.store is not None:
        other = "--store" if settings.workers == 1 else f"--workers {settings.workers}"
        raise StartupError(f"{flag} is of one process and its --data-dir: leave {other} out")
    elif settings.data_dir is None:
        raise StartupError(f"{flag} lives the sessions of a folder again: give --data-dir, too")


def _check_tenants(settings: CommandSettings) -> None:
    """Raise StartupError for tenants without an operator, or whose sessions anybody could live again."""
    if settings.tenants is None:
        if settings.audit_log is not None:
            raise StartupError("--audit-log says who did what, but nobody has a name: give --tenants, too")
        return
    if not settings.api_key:
        raise StartupError("--tenants is set, but the operator has no key: give --api-key, too")
    if settings.play is not None or settings.engine is EngineKind.REPLAY:
        raise StartupError("--tenants is set, but a replay lives the sessions of one folder again: leave --play out")


SETTINGS: tuple[Setting, ...] = rows_of(CommandSettings)
"""The table: every setting, in the order of the docs."""

_TABLE = SettingsTable(CommandSettings, SETTINGS)


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> CommandSettings:
    """Read the settings as `SettingsTable.load` does; the cache folder where none is set is the environment's."""
    return _TABLE.load(flags, environ, file, defaults={"cache_dir": default_cache_dir(environ)})


def given_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> dict[str, object]:
    """The settings given and not left at their defaults, read as `load_settings` does, by name."""
    return _TABLE.given(flags, environ, file)


def kubernetes_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables set by Kubernetes for a Service, not by a person for this server: they are no settings."""
    return _TABLE.kubernetes_variables(environ)


# --- as flags


def add_flags(parser: argparse.ArgumentParser, names: Collection[str], own_help: Mapping[str, str]) -> None:
    """Add the flags of settings, in the order of the table, with a help of their own where there is one."""
    for row in SETTINGS:
        if row.name in names:
            _add_flag(parser.add_argument, replace(row, doc=own_help.get(row.name, row.doc)))
    _add_config(parser)


def add_sections(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all settings, in their groups."""
    for section, rows in groupby(SETTINGS, key=attrgetter("section")):
        group = parser.add_argument_group(section)
        for row in rows:
            _add_flag(group.add_argument, row)
    _add_config(parser)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings file; flags win over it")


def _add_flag(add_argument: Callable[..., argparse.Action], setting: Setting) -> None:
    shown = f"{setting.doc} Default: {_default_shown(setting)}."
    add_argument(
        setting.flag,
        dest=setting.name,
        action="append" if setting.kind.repeatable else "store",
        metavar="|".join(setting.kind.choices) or (setting.unit or setting.name.split("_")[-1]).upper(),
        help=shown.replace("%", "%%"),
    )


def _default_shown(setting: Setting) -> str:
    """The default with its unit; a default in words has none."""
    if not setting.unit or re.fullmatch(r"[0-9.]+", setting.default) is None:
        return setting.default
    return f"{setting.default} {setting.unit.removesuffix('s') if setting.default == '1' else setting.unit}"
