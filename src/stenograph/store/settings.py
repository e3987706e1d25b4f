"""The settings of the store: the folder of sessions, and the durability of a turn."""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

import enum
from dataclasses import dataclass
from pathlib import Path

from stenograph.core.settings import Section, choice, folder, setting


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

    @property
    def kept(self) -> Durability:
        """The durability in force in a folder."""
        if self.durability is not None:
            return self.durability
        return Durability.NONE if self.data_dir is None else Durability.COMMIT
