"""A worker's place in its server: its number, the sockets of all workers, and the page of their counts."""

import socket
from dataclasses import dataclass, field
from pathlib import Path

from stenograph.cluster.owners import FileOwners
from stenograph.cluster.shared_capacity import CapacityPage
from stenograph.store.folder import NUM_FILES


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One of several workers. `sockets` are the addresses of all, in order; `listener` listens at its own.

    `engine` is the socket of the engine's process shared by all; None where engines have addresses of their own.
    """

    number: int
    sockets: tuple[Path, ...]
    listener: socket.socket
    page: CapacityPage
    instance_id: str
    engine: Path | None = None
    owners: FileOwners = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", FileOwners(self.sockets, own=self.number))

    @property
    def last(self) -> int | None:
        """This worker's owner in its life before; nobody has its sessions any more. As `OwnerMemory`."""
        return self.page.owner(self.number) or None

    def taken(self, owner: int) -> None:
        """This worker is an owner now; as `OwnerMemory`."""
        self.page.set_owner(self.number, owner)

    @property
    def digits(self) -> str:
        """The beginning of its new sessions' ids: the name of their file."""
        return f"{self.number:02x}"

    @property
    def files_before(self) -> list[int]:
        """The numbers of all possible files of the workers before it."""
        return [number for number in range(NUM_FILES) if number % len(self.sockets) < self.number]

    def files(self, there: list[int]) -> list[int]:
        """The numbers of the files to open: its own, and the present ones belonging to it."""
        own = {number for number in there if number % len(self.sockets) == self.number}
        return [self.number, *sorted(own - {self.number})]
