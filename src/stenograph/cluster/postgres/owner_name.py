"""The name of an owner in a shared database: the address of its server, and its number among the processes. Pure.

A server of one process is `http://10.0.0.5:8080`, worker 1 of several is `http://10.0.0.5:8080#1`. Every worker listens
at the server's address, and passes on others' requests, so other servers need the address alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerName:
    """`server` is an address, `worker` a number; None where the server has one process."""

    server: str
    worker: int | None = None

    def __str__(self) -> str:
        return self.server if self.worker is None else f"{self.server}#{self.worker}"

    @classmethod
    def of(cls, text: str) -> "OwnerName":
        """The name written so."""
        server, _, worker = text.partition("#")
        return cls(server=server, worker=int(worker) if worker else None)
