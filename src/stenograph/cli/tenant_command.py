"""`stenograph tenant add`: a new tenant, whose key is printed and kept nowhere."""

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
    name, scopes, config = options.pop("name"), options.pop("scope"), options.pop("config")
    del options["action"]
    # Of the settings only the file's name is of use: the others may be at odds with each other.
    file = load_settings({**options, "api_key": ["none"]}, os.environ, config).tenants
    if file is None:
        raise StartupError("tenant: name the file: give --tenants")
    print(added(file, name, scopes or ("rollout", "train")))
    print(f"stenograph: {name} is in {file}; a running server takes it at SIGHUP", file=sys.stderr)
    return 0


def added(file: Path, name: str, scopes: "tuple[str, ...] | list[str]") -> str:
    """Append a tenant to a file, and return its key. Raises StartupError."""
    text = ""
    try:
        with suppress(FileNotFoundError):
            text = file.read_text(encoding="utf-8")
        if name in read_tenants(text).by_name:
            raise StartupError(
                f"tenant: {str(file)!r} has {name} already; a second key's hash goes into its key_sha256"
            )
        key = new_key()
        listed = ", ".join(f'"{scope}"' for scope in scopes)
        table = f'[{name}]\nkey_sha256 = ["{hash_of(key.encode())}"]\nscopes = [{listed}]\n'
        whole = f"{text.rstrip()}\n\n{table}" if text.strip() else table
        read_tenants(whole)
        _write(file, whole)
    except BadTenants as error:
        raise StartupError(f"tenant: the file {str(file)!r}: {error}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"tenant: the file {str(file)!r} is not UTF-8") from error
    except OSError as error:
        raise StartupError(f"tenant: cannot write {str(file)!r}: {error.strerror}") from error
    return key


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
