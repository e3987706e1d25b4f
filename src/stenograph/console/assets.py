"""The files of the console's page, read once at import: for a server to send, and to write into a file."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType

from stenograph.console.page import joined_script

INDEX = "index.html"
SCRIPT = "app.js"

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """A file of the page, as it is and compressed. `etag` is of its bytes."""

    name: str
    content: bytes
    compressed: bytes = field(init=False, repr=False)
    etag: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressed", gzip.compress(self.content, mtime=0))
        object.__setattr__(self, "etag", f'"{hashlib.sha256(self.content).hexdigest()[:32]}"')

    @property
    def media_type(self) -> str:
        """By its name's end."""
        return _TYPES[self.name.rsplit(".", 1)[1]]

    @property
    def text(self) -> str:
        """Its text."""
        return self.content.decode()


def _read() -> dict[str, PageFile]:
    """The files of the folder, all modules of ours as one."""
    folder = resources.files("stenograph.console") / "static"
    found: dict[str, bytes] = {}
    for prefix, place in (("", folder), ("vendor/", folder / "vendor")):
        for entry in sorted(place.iterdir(), key=lambda entry: entry.name):
            if entry.is_file():
                found[prefix + entry.name] = entry.read_bytes()
    modules = {name: found.pop(name).decode() for name in list(found) if _is_module(name)}
    found[SCRIPT] = joined_script(modules, SCRIPT).encode()
    return {name: PageFile(name=name, content=content) for name, content in found.items()}


def _is_module(name: str) -> bool:
    return name.endswith(".js") and "/" not in name


FILES: Mapping[str, PageFile] = MappingProxyType(_read())
"""All files by their path below `/console/`."""
