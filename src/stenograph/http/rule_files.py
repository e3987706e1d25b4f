"""The files named in settings: rules for requests, the sampling of all sessions, keys of engines. Read, or refused with
a line."""

import re
import tomllib
from collections.abc import Mapping
from typing import NamedTuple, cast

from stenograph.core.errors import InvalidJson, InvalidRequest, StartupError
from stenograph.core.sampling_rules import SamplingRules
from stenograph.dialects.common.sampling_rules import decode_rules
from stenograph.engine.settings import URLS
from stenograph.http.settings import Settings
from stenograph.session.kinds import KindRules
from stenograph.session.rewrite_rules import RewriteRules, UnknownRewrite
from stenograph.session.side_rules import SHIPPED_RULES, BadSideRules, read_kind_rules
from stenograph.trajectory.canonical import Canonical


class SideRules(NamedTuple):
    """The rules of sessions: those that label requests, those that rewrite them, and the chosen ones among these."""

    kinds: KindRules
    rewrites: RewriteRules
    canonical: Canonical


def side_rules_of(settings: Settings) -> SideRules:
    """The rules of `--side-rules`, then the shipped ones. Raises StartupError, with the file and the rule."""
    file, texts = repr(str(settings.side_rules)), [SHIPPED_RULES]
    try:
        if settings.side_rules is not None:
            texts.insert(0, settings.side_rules.read_text(encoding="utf-8"))
        rewrites = RewriteRules.read(*texts)
        return SideRules(read_kind_rules(*texts), rewrites, rewrites.chosen(settings.canonical))
    except UnknownRewrite as error:
        raise StartupError(f"--canonical: {error}") from error
    except OSError as error:
        raise StartupError(f"--side-rules: cannot read the file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"--side-rules: the file {file} is not UTF-8") from error
    except BadSideRules as error:
        raise StartupError(f"--side-rules: the file {file}: {error}") from error


def sampling_of(settings: Settings) -> SamplingRules | None:
    """The sampling of all sessions, from the file of `--sampling`. Raises StartupError, with the file and the field."""
    if settings.sampling is None:
        return None
    file = repr(str(settings.sampling))
    try:
        return decode_rules(settings.sampling.read_bytes())
    except OSError as error:
        raise StartupError(f"--sampling: cannot read the file {file}: {error.strerror}") from error
    except InvalidJson as error:
        raise StartupError(f"--sampling: the file {file} is not JSON: {error.__cause__}") from error
    except InvalidRequest as error:
        where = "" if error.param is None else f"{error.param} of "
        raise StartupError(f"--sampling: {where}the file {file}: {error}") from error


def engine_keys_of(settings: Settings) -> Mapping[str, str]:
    """The keys of `--engine-keys` by address. Raises StartupError, with the file and the line; never with a key."""
    if settings.engine_keys is None:
        return {}
    file, keys = repr(str(settings.engine_keys)), dict[str, str]()
    try:
        told = tomllib.loads(settings.engine_keys.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--engine-keys: cannot read the file {file}: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise StartupError(f"--engine-keys: the file {file} is not TOML in UTF-8: {error}") from error
    for address, key in told.items():
        try:
            (url,) = cast("tuple[str, ...]", URLS.read(address))
        except ValueError as error:
            raise StartupError(
                f'--engine-keys: {address[:200]!r} in the file {file} is no address; write "http://host:port" = "key"'
            ) from error
        if not isinstance(key, str) or not re.fullmatch("[!-~]+", key):
            raise StartupError(f"--engine-keys: the key of {url} in {file} is not printable ASCII without spaces")
        keys[url] = key
    return keys


def check_files(settings: Settings) -> None:
    """Read the files named in settings: a bad one ends the start before a model is loaded. Raises StartupError."""
    sampling_of(settings)
    engine_keys_of(settings)
    side_rules_of(settings)
