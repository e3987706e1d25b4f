"""The process that has a session, where servers share a database: found by its lease, and remembered.

What is remembered of a worker of this server holds for as long as that worker is the owner that it was: a session goes
to another only when an owner ends, and each owner's number stands on the page of the workers' counts. Sessions of other
servers are not passed on from here, but by cluster/nodes.py.
"""

from collections import OrderedDict
from functools import partial

from stenograph.cluster.owners import FileOwners, Found, Owner
from stenograph.cluster.ownership import SharedOwnership
from stenograph.cluster.postgres.owner_name import OwnerName
from stenograph.cluster.shared_capacity import CapacityPage
from stenograph.core.errors import StorageUnavailable

MAX_KNOWN = 20_000
"""Sessions whose worker is remembered; those that were asked for longest ago are forgotten first."""


class LeasedOwners:
    """The workers of this server as owners in the database."""

    def __init__(self, workers: FileOwners, ownership: SharedOwnership, page: CapacityPage) -> None:
        """`workers` are all workers, and say what is not of one session."""
        self._workers = workers
        self._ownership = ownership
        self._page = page
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Sessions of other workers: the worker, and which owner it was."""

    def __repr__(self) -> str:
        return f"<LeasedOwners of {len(self._known)} sessions>"

    def owner_of(self, session_id: str) -> Found:
        if self._ownership.has(session_id):
            return None
        known = self._known.get(session_id)
        if known is None or self._page.owner(known[0]) != known[1]:
            return partial(self._asked, session_id)
        self._known.move_to_end(session_id)
        return self._workers.worker(known[0])

    def opener_of(self, key: bytes) -> Owner | None:
        return self._workers.opener_of(key)

    def first(self) -> Owner | None:
        return self._workers.first()

    async def _asked(self, session_id: str) -> Owner | None:
        """The other worker of this server that has a session, as the database says."""
        self._known.pop(session_id, None)
        try:
            held = await self._ownership.holder(session_id)
        except StorageUnavailable:
            return None  # it is refused where it is served
        if held is None:
            return None
        name = OwnerName.of(held.name)
        if name.server != self._ownership.server or name.worker is None or name.worker >= self._workers.num:
            return None
        if self._page.owner(name.worker) == held.owner:
            self._known[session_id] = (name.worker, held.owner)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return self._workers.worker(name.worker)
