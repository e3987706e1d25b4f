"""`stenograph tenant add`: a new tenant, or a further key of one, printed and kept nowhere."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from stenograph.cli.settings_table import load_settings
from stenograph.core.errors import StartupError
from stenograph.tenants.tenant import BadTenants, hash_of, new_key, read_tenants


def tenant(options: dict[str, Any]) -> int:
    """Add a tenant, and print its key; returns the exit code. Raises StartupError."""
    name, key, scopes = options.pop("name"), options.pop("key"), options.pop("scope")
    config = options.pop("config")
    del options["action"]
    # Of the settings only the file's name is of use: the others may be at odds with each other.
    file = load_settings({**options, "api_key": ["none"]}, os.environ, config).tenants
    if file is None:
        raise StartupError("tenant: name the file: give --tenants")
    print(added(file, name, scopes or ("rollout", "train"), key=key))
    print(
        f"stenograph: {name if key is None else f'{name}/{key}'} is in {file}; a running server takes it at SIGHUP",
        file=sys.stderr,
    )
    return 0


def added(file: Path, name: str, scopes: "tuple[str, ...] | list[str]", *, key: str | None) -> str:
    """Append a tenant to a file, or a tenant's further key by its name, and return the key. Raises StartupError."""
    text = ""
    try:
        with suppress(FileNotFoundError):
            text = file.read_text(encoding="utf-8")
        known = read_tenants(text).by_name.get(name)
        if known is not None and key is None:
            raise StartupError(f"tenant: {str(file)!r} has {name} already; --key KEY adds a further key to it")
        if known is not None and key in known.keys:
            raise StartupError(f"tenant: {str(file)!r} has {name}/{key} already")
        new = new_key()
        listed, hashed = ", ".join(f'"{scope}"' for scope in scopes), hash_of(new.encode())
        table, field = (name, "key_sha256") if key is None else (f"{name}.keys.{key}", "sha256")
        rows = f'[{table}]\n{field} = ["{hashed}"]\nscopes = [{listed}]\n'
        whole = f"{text.rstrip()}\n\n{rows}" if text.strip() else rows
        read_tenants(whole)
        _write(file, whole)
    except BadTenants as error:
        raise StartupError(f"tenant: the file {str(file)!r}: {error}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"tenant: the file {str(file)!r} is not UTF-8") from error
    except OSError as error:
        raise StartupError(f"tenant: cannot write {str(file)!r}: {error.strerror}") from error
    return new


def _write(file: Path, text: str) -> None:
    """Write a file whole, or leave it as it was; nobody else may read it. Raises OSError."""
    part = file.with_name(f"{file.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        part.rename(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
