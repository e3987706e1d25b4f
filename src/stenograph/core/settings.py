"""Reads settings: file < environment < flag, each value checked by the row of its setting. Knows none of them.

A room declares its settings as fields of a frozen dataclass, made by `setting` and `computed`: each field carries its
doc, its unit and how its value is read. `cli/settings_table.py` assembles them into a `SettingsTable`. Flags
(`--max-batch`), environment names (`STENOGRAPH_MAX_BATCH`), keys of the TOML file (`max_batch`) and docs/settings.md
all come from this table. An unknown key or a bad value stops the start with one line: key, value and source.
"""

import dataclasses
import enum
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar, cast

from stenograph.core.errors import StartupError
from stenograph.core.nearest import nearest_name

ENV_PREFIX = "STENOGRAPH_"
_KUBERNETES_ENV = re.compile(
    r"STENOGRAPH_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables set by Kubernetes in every container for a Service named `stenograph` or `stenograph-…`.

Source: kubernetes.io/docs/tutorials/services/connect-applications-service, and kubelet's `pkg/kubelet/envvars`.
"""
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://.*")
COMMAND_LINE = "the command line"
_SHOWN_CHARS = 80
_T = TypeVar("_T")
_S = TypeVar("_S")


class Section(enum.StrEnum):
    """Sections of the docs and of `serve --help`, in their order."""

    SERVER = "server"
    MODEL = "model"
    ENGINE = "engine"
    EMBEDDED = "embedded engine"
    CPU_WORK = "CPU work"
    SESSIONS = "sessions"
    STORE = "store"
    LIMITS = "limits and deadlines"
    REQUESTS = "requests"
    SECURITY = "security"
    LOGS = "logs"
    TRACES = "traces"
    FILES = "files"


class Switch(enum.StrEnum):
    """Whether something is done."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Reader of one setting's value. `read` takes text or a TOML value and raises ValueError for a bad one."""

    expected: str
    read: Callable[[object], object]
    choices: tuple[str, ...] = ()
    repeatable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row of the table: one setting under all of its names. `default` is text for people to read.

    `field` is the field of `Settings`; `name`, the file's key and the base of the other names, has no unit in it.
    """

    field: str
    name: str
    env: str
    doc: str
    unit: str
    default: str
    kind: Kind
    secret: bool
    section: Section

    @property
    def flag(self) -> str:
        """The command line's name of it."""
        return "--" + self.name.replace("_", "-")


# --- kinds of values -------------------------------------------------------------------------------------------------


def whole_number(low: int, high: int = 2**31 - 1) -> Kind:
    """A whole number in a range, both ends included."""

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError
        return value

    return Kind(expected=f"a whole number from {low} to {high}", read=read)


def seconds(high: float) -> Kind:
    """A number of seconds, fractions included."""

    def read(value: object) -> float:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise ValueError
        return float(value)

    return Kind(expected=f"a number of seconds above 0 and at most {high:g}", read=read)


def seconds_or_zero(high: float) -> Kind:
    """A number of seconds, fractions included, or 0."""
    above = seconds(high)

    def read(value: object) -> float:
        is_zero = value == "0" or (value == 0 and not isinstance(value, bool))
        return 0.0 if is_zero else cast("float", above.read(value))

    return Kind(expected=f"a number of seconds from 0 to {high:g}", read=read)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def text() -> Kind:
    """A printable text, not blank."""

    def read(value: object) -> str:
        if not _is_text(value):
            raise ValueError
        return cast("str", value)

    return Kind(expected="a text that is not empty", read=read)


def choice(options: type[enum.StrEnum]) -> Kind:
    """One of the values of an enum."""
    names = tuple(str(option) for option in options)

    def read(value: object) -> enum.StrEnum:
        if not isinstance(value, str):
            raise ValueError
        return options(value)

    return Kind(expected="one of " + ", ".join(names), read=read, choices=names)


def matching(pattern: str, expected: str) -> Kind:
    """A text matching `pattern`."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError
        return value

    return Kind(expected=expected, read=read)


def folder() -> Kind:
    """A path; `~` in it is the home."""

    def read(value: object) -> Path:
        if not _is_text(value):
            raise ValueError
        try:
            return Path(cast("str", value)).expanduser()
        except RuntimeError as error:  # "~nobody/": there is no such home
            raise ValueError from error

    return Kind(expected="a path", read=read)


def json_object() -> Kind:
    """A JSON object: of the file a table, else its text."""

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


def texts(pattern: str, expected: str, *, normalize: Callable[[str], str] = str, may_be_empty: bool = False) -> Kind:
    """Texts, all matching `pattern`, without repeats: a list, or separated by commas."""

    def read(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not (parts or may_be_empty):
            raise ValueError
        found = cast("list[object]", parts)
        if not all(isinstance(part, str) and re.fullmatch(pattern, part) for part in found):
            raise ValueError
        return tuple(dict.fromkeys(normalize(part) for part in cast("list[str]", found)))

    return Kind(expected=expected, read=read, repeatable=True)


# --- declaring -------------------------------------------------------------------------------------------------------


def setting(
    default: _T,
    kind: Kind,
    doc: str,
    *,
    section: Section | None = None,
    after: str = "",
    unit: str = "",
    shown: str = "",
    secret: bool = False,
) -> _T:
    """A field of a room's settings, with its row of the table. `shown` is the default in words.

    `section` begins a section; the fields after it are in it too. `after` names the setting before it in the table.
    """
    shown = shown or str(default)
    metadata = {"kind": kind, "doc": doc, "unit": unit, "shown": shown, "env": "", "section": section, "after": after}
    return field(default=default, metadata=metadata, repr=not secret)


def computed(
    factory: Callable[[], _T],
    kind: Kind,
    doc: str,
    *,
    shown: str,
    section: Section | None = None,
    unit: str = "",
    env: str = "",
) -> _T:
    """The same for a machine-dependent default. `env` replaces the environment name made of the field's."""
    metadata = {"kind": kind, "doc": doc, "unit": unit, "shown": shown, "env": env, "section": section}
    return field(default_factory=factory, metadata=metadata)


def rows_of(settings: type[object]) -> tuple[Setting, ...]:
    """The rows of a dataclass of settings, section by section."""
    rows: list[Setting] = []
    section: Section | None = None
    for declared in dataclasses.fields(settings):  # type: ignore[arg-type]
        section = declared.metadata["section"] or section
        assert section is not None, f"{declared.name} is in no section"
        before = declared.metadata.get("after")
        at = next((at for at, row in enumerate(rows, 1) if row.name == before), len(rows))
        rows.insert(at, _row(declared, section))
    return tuple(sorted(rows, key=lambda row: list(Section).index(row.section)))


def _row(declared: "dataclasses.Field[object]", section: Section) -> Setting:
    facts = declared.metadata
    return Setting(
        field=declared.name,
        name=declared.name.removesuffix("_s"),
        env=facts["env"] or ENV_PREFIX + declared.name.removesuffix("_s").upper(),
        doc=facts["doc"],
        unit=facts["unit"],
        default=facts["shown"],
        kind=facts["kind"],
        secret=not declared.repr,
        section=section,
    )


# --- reading ---------------------------------------------------------------------------------------------------------


class SettingsTable(Generic[_S]):
    """Every setting, in the order of the docs, and how a value of `settings` is made of them.

    Each class among the bases of `settings` may have a `check`: it raises StartupError for contradictory settings.
    """

    def __init__(self, settings: type[_S], rows: Sequence[Setting]) -> None:
        self._settings = settings
        self._by_name = {row.name: row for row in rows}
        self._by_env = {row.env: row for row in rows}

    def load(
        self,
        flags: Mapping[str, object],
        environ: Mapping[str, str],
        file: Path | None,
        *,
        defaults: Mapping[str, object],
    ) -> _S:
        """Read the settings: each as `given`, or its default. `defaults` replace those of the fields.

        Raises StartupError as `given`, and for contradictory settings.
        """
        values = {**defaults, **self.given(flags, environ, file)}
        # The table has checked each value against its field; a type checker cannot follow that through a mapping.
        settings = self._settings(**{self._by_name[name].field: value for name, value in values.items()})
        for room in reversed(self._settings.__mro__):
            if (check := vars(room).get("check")) is not None:
                check(settings)
        return settings

    def given(self, flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> dict[str, object]:
        """The given settings, by name: file < environment < flag.

        `flags` maps field names to text or values; None: the flag was not given. `environ` is the whole environment;
        only its `STENOGRAPH_…` is looked at. Raises StartupError (one line: key, value, source) for an unknown key, a
        bad value or an unreadable file.
        """
        values: dict[str, object] = {}
        if file is not None:
            for key, value in _read_toml(file).items():
                values[key] = _read(self._by_name, key, value, f"the file {str(file)!r}", text=False)
        of_kubernetes = set(self.kubernetes_variables(environ))
        for key in sorted(key for key in environ if key.startswith(ENV_PREFIX) and key not in of_kubernetes):
            row = self._by_env.get(key)
            values[row.name if row else key] = _read(self._by_env, key, environ[key], "the environment")
        for key, value in flags.items():
            if value is not None:
                values[key] = _read(self._by_name, key, value, COMMAND_LINE)
        return values

    def kubernetes_variables(self, environ: Mapping[str, str]) -> list[str]:
        """The variables set by Kubernetes for a Service, not by a person for this server: they are no settings.

        `STENOGRAPH_PORT` is both: it is Kubernetes' where its value is an address such as `tcp://10.0.0.1:8080`.
        """
        return sorted(
            key for key in environ if key.startswith(ENV_PREFIX) and self._is_of_kubernetes(key, environ[key])
        )

    def _is_of_kubernetes(self, key: str, value: str) -> bool:
        if key.endswith("_PORT") and _KUBERNETES_URL.fullmatch(value):
            return True
        return key not in self._by_env and _KUBERNETES_ENV.fullmatch(key) is not None


def _read_toml(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as opened:  # in text mode a lone carriage return would pass for a line's end
            return tomllib.load(opened)
    except OSError as error:
        raise StartupError(f"cannot read the file {str(file)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, an absurd number, or nested without end
        raise StartupError(f"the file {str(file)!r} is not TOML: {' '.join(str(error).split())}") from error


def _read(table: Mapping[str, Setting], key: str, value: object, source: str, *, text: bool = True) -> object:
    row = table.get(key)
    if row is None:
        # Compared without the prefix, which makes all names alike; cache_dir is STENOGRAPH_CACHE: either way is meant.
        bare = {n: name for name, r in table.items() for n in (r.name, r.env.removeprefix(ENV_PREFIX).lower())}
        near = nearest_name(key.removeprefix(ENV_PREFIX), bare)
        meant = f"did you mean {bare[near]}? " if near is not None else ""
        raise StartupError(f"unknown setting {_shown(key)} {_in(source)}; {meant}docs/settings.md lists all")
    try:
        if not text and isinstance(value, str) and not isinstance(row.kind.read(value), str | Path):
            raise ValueError  # in TOML, a number is not written as a text
        return row.kind.read(value)
    except ValueError:
        shown = "(not shown)" if row.secret else _shown(value)
        name = row.flag if source == COMMAND_LINE else key
        raise StartupError(f"bad value {shown} for {name} {_in(source)}: expected {row.kind.expected}") from None


def _in(source: str) -> str:
    return f"{'on' if source == COMMAND_LINE else 'in'} {source}"


def _shown(value: object) -> str:
    """A value as it was typed: a list for a flag that may be repeated."""
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    shown = ", ".join(map(ascii, listed))
    return shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 1] + "…"
