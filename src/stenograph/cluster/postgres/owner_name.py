"""The name of an owner in a shared database: where its server is reached, and which of its processes it is. Pure.

A server of one process is `http://10.0.0.5:8080`, worker 1 of several is `http://10.0.0.5:8080#1`. Every worker listens
at the server's address, and passes on what is another's, so whoever is elsewhere needs the address alone.
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
        """The name that was written so."""
        server, _, worker = text.partition("#")
        return cls(server=server, worker=int(worker) if worker else None)
