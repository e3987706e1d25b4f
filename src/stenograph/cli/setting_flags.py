"""Settings as flags of a command line, with their help."""

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from stenograph.cli.settings_table import SETTINGS
from stenograph.core.settings import Setting


def add_flags(parser: argparse.ArgumentParser, names: Collection[str], own_help: Mapping[str, str]) -> None:
    """Add the flags of settings, in the order of the table, with a help of their own where there is one."""
    for setting in SETTINGS:
        if setting.name in names:
            own = own_help.get(setting.name)
            _add_flag(parser.add_argument, setting if own is None else replace(setting, doc=own))
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
