"""The settings of the store: the place of sessions, the processes sharing it, and the durability of a turn."""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

import enum
from dataclasses import dataclass
from pathlib import Path

from stenograph.core.settings import Section, choice, folder, matching, seconds, setting

POSTGRES = r"postgres(ql)?://[^\s]+"
"""An address of a database to keep sessions in."""


class Durability(enum.StrEnum):
    """The events that an acknowledged turn survives."""

    NONE = "none"
    INTERVAL = "interval"
    COMMIT = "commit"


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The folder of the store, and how durable its turns are."""

    data_dir: Path | None = setting(
        None,
        folder(),
        "Folder in which sessions are kept; without one they are in memory, and end with the process.",
        shown="none: in memory",
        section=Section.STORE,
    )
    durability: Durability | None = setting(
        None,
        choice(Durability),
        "The events that an acknowledged turn survives: `commit` the end of the process and a loss of power, `interval`"
        " the end of the process, and a loss of power but for the last second.",
        shown="commit with --data-dir or --store, else none",
    )
    store: str | None = setting(
        None,
        matching(POSTGRES, "an address like postgresql://user@host/database"),
        "PostgreSQL database in which sessions are kept, shared by all servers that have the same one; in place of"
        " `--data-dir`.",
        shown="none",
        secret=True,
    )
    advertise_url: str | None = setting(
        None,
        matching(r"https?://[^\s/?#@]+", "an address like http://10.0.0.5:8080, without a path"),
        "With `--store`: the address under which the other servers reach this one.",
        shown="that of --host and --port",
    )
    lease_s: float = setting(
        5.0,
        seconds(3600),
        "With `--store`: the time after which the sessions of a server that is dead, or cut off, are taken over. Each"
        " of several workers has a lease.",
        unit="seconds",
    )

    @property
    def kept(self) -> Durability:
        """The durability in force."""
        if self.durability is not None:
            return self.durability
        return Durability.NONE if self.data_dir is None and self.store is None else Durability.COMMIT
