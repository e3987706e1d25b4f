"""The settings of the store: where sessions are kept, and what an acknowledged turn survives."""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

from dataclasses import dataclass
from pathlib import Path

from stenograph.core.settings import choice, folder, setting
from stenograph.store.base import Durability


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The folder of the store, and how durable its turns are."""

    data_dir: Path | None = setting(
        None,
        folder(),
        "Folder in which sessions are kept; without one they are in memory, and end with the process.",
        shown="none: in memory",
    )
    durability: Durability | None = setting(
        None,
        choice(Durability),
        "The events that an acknowledged turn survives: `commit` the end of the process and a loss of power, `interval`"
        " the end of the process, and a loss of power but for the last second.",
        shown="commit with --data-dir, else none",
    )

    @property
    def kept(self) -> Durability:
        """The durability that holds."""
        if self.durability is not None:
            return self.durability
        return Durability.NONE if self.data_dir is None else Durability.COMMIT
