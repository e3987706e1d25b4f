"""The ledger of a session: every request naming it, in order, whatever its outcome.

Owns the rows, and `OpenRow` to end one. Knows neither the contents of a request nor how a row is written for a
client; `RequestLedger` is pure, its caller has the time. A row takes 54 bytes, and 2 for each overlap and each rewrite;
texts are kept once. The first 10,000 requests have rows, later ones are counted.
"""

import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import cast

from msgspec import Struct

from stenograph.core.clock import Clock, SystemClock
from stenograph.core.errors import StenographError
from stenograph.core.kinds import UNLABELLED, Label, StrandKind
from stenograph.session.turn import TurnOutcome
from stenograph.trajectory.commits import LedgerRow

ECHO = Label(kind=StrandKind.ECHO, rule="echo")
"""The label of a request that was its strand's last reply once more."""

ROWS_AT_ONCE = 512
"""Rows made at once where all are wanted."""

MAX_ROWS = 10_000
"""Number of requests with a row. A number fits in 16 bits."""

MAX_LISTED = 16
"""Number of overlaps in a row, and of rewrites."""

MAX_CLIENT_TEXTS = 256
"""Number of different texts kept in a ledger for clients: paths and user agents."""

MAX_TEXT_CHARS = 200
"""The kept part of such a text."""

OTHER_TEXT = "…"
"""Stands for every text beyond the kept ones."""

_BEGUN = struct.Struct("<dHHH")
"""received_s, indices of path, dialect, client."""

_LABELLED = struct.Struct("<H")
"""Index of the label."""

_ENDED = struct.Struct("<dHHiiIIIIBB")
"""ended_s, status, index of the error, strand, turn, prompt, cached and sampled tokens, start and sizes of the lists.

NaN, 0 and -1 stand for None.
"""

_NOT_ENDED = _LABELLED.pack(0) + _ENDED.pack(math.nan, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0)
"""The rest of the row of a running request without a label."""

_LABEL_AT = _BEGUN.size
_END_AT = _LABEL_AT + _LABELLED.size
_ROW_BYTES = _END_AT + _ENDED.size


class RequestLedger:
    """The requests of one session. `num_requests` counts all, also those without a row."""

    __slots__ = (
        *("_client_texts", "_labels", "_lists", "_lost", "_own_texts", "_packed", "_running"),
        *("num_open", "num_requests"),
    )

    def __init__(self) -> None:
        self.num_requests = 0
        self._packed = bytearray()
        self._lists = array("H")
        self._running: dict[int, array[int]] = {}
        self._own_texts = {"": 0}
        self._client_texts: dict[str, int] = {}
        self._labels = {UNLABELLED: 0}
        self._lost: set[int] = set()
        self.num_open = 0
        """Requests begun and not ended, those without a row included."""

    def __repr__(self) -> str:
        return f"<RequestLedger {self.num_requests} requests, {len(self._running)} running>"

    @property
    def num_rows(self) -> int:
        """Number of requests with a row."""
        return len(self._packed) // _ROW_BYTES

    def open_row(self, clock: Clock, *, path: str, dialect: str, client: str) -> "OpenRow":
        """`begin` now, as a row that ends itself."""
        number = self.begin(received_s=clock.wall(), path=path, dialect=dialect, client=client)
        return OpenRow(ledger=self, number=number, clock=clock)

    def begin(self, *, received_s: float, path: str, dialect: str, client: str) -> int:
        """Note the arrival of a request; it overlaps with all running ones. Returns its number, from 1."""
        self.num_requests += 1
        self.num_open += 1
        number = self.num_requests
        if number > MAX_ROWS:
            return number
        texts = self._own_texts
        own = texts.setdefault(dialect, len(texts))
        self._packed += _BEGUN.pack(received_s, self._client_text(path), own, self._client_text(client)) + _NOT_ENDED
        overlaps = array("H")
        for other, its_overlaps in self._running.items():
            if len(overlaps) < MAX_LISTED:
                overlaps.append(other)
            if len(its_overlaps) < MAX_LISTED:
                its_overlaps.append(number)
        self._running[number] = overlaps
        return number

    def label(self, number: int, label: Label) -> None:
        """Note a rule's label for a request. A request without a row is left alone."""
        if number <= self.num_rows:
            index = self._labels.setdefault(label, len(self._labels))
            _LABELLED.pack_into(self._packed, (number - 1) * _ROW_BYTES + _LABEL_AT, index)

    def end(
        self,
        number: int,
        *,
        ended_s: float,
        status: int | None = None,
        error: str | None = None,
        strand: int | None = None,
        turn: int | None = None,
        num_prompt_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_sampled_tokens: int = 0,
        rewrites: Sequence[str] = (),
    ) -> None:
        """Note the end of a running request. A request without a row is left alone."""
        self.num_open -= 1
        if number > MAX_ROWS:
            return
        assert number in self._running, f"request {number} is not running"
        overlaps = self._running.pop(number)
        texts = self._own_texts
        applied = [texts.setdefault(name, len(texts)) for name in dict.fromkeys(rewrites)][:MAX_LISTED]
        _ENDED.pack_into(
            self._packed,
            (number - 1) * _ROW_BYTES + _END_AT,
            ended_s,
            status or 0,
            0 if error is None else texts.setdefault(error, len(texts)),
            -1 if strand is None else strand,
            -1 if turn is None else turn,
            num_prompt_tokens,
            num_cached_tokens,
            num_sampled_tokens,
            len(self._lists),
            len(overlaps),
            len(applied),
        )
        self._lists.extend(overlaps)
        self._lists.extend(applied)

    def rows(self, limit: int, after: int = 0) -> list[LedgerRow]:
        """At most `limit` rows in order, of the requests numbered above `after`."""
        begin = max(after, 0)
        own, clients, labels = list(self._own_texts), list(self._client_texts), list(self._labels)
        kept = (number for number in range(begin + 1, self.num_rows + 1) if number not in self._lost)
        return [self._row(number, own, clients, labels) for number in islice(kept, max(limit, 0))]

    def chunks(self) -> Iterator[list[LedgerRow]]:
        """All rows in order, so many at once as are made in some milliseconds."""
        after = 0
        while rows := self.rows(ROWS_AT_ONCE, after):
            yield rows
            after = rows[-1].number

    def restore(self, row: LedgerRow) -> None:
        """Note a request of before this process began. Earlier ones not noted are lost, and have no row."""
        if not self.num_requests < row.number <= MAX_ROWS:
            self.num_requests = max(self.num_requests, row.number)
            return
        while self.num_requests < row.number:
            number = self.begin(received_s=row.received_s, path=row.path, dialect=row.dialect, client=row.client)
            if number < row.number:
                self.end(number, ended_s=math.nan)
                self._lost.add(number)
        self.label(row.number, row.label)
        self._running[row.number] = array("H", row.overlaps)
        self.end(
            row.number,
            ended_s=math.nan if row.ended_s is None else row.ended_s,
            status=row.status,
            error=row.error,
            strand=row.strand,
            turn=row.turn,
            num_prompt_tokens=row.num_prompt_tokens,
            num_cached_tokens=row.num_cached_tokens,
            num_sampled_tokens=row.num_sampled_tokens,
            rewrites=row.rewrites,
        )

    def _row(self, number: int, own: list[str], clients: list[str], labels: list[Label]) -> LedgerRow:
        at = (number - 1) * _ROW_BYTES
        received_s, path, dialect, client = cast("tuple[float, int, int, int]", _BEGUN.unpack_from(self._packed, at))
        (label,) = cast("tuple[int]", _LABELLED.unpack_from(self._packed, at + _LABEL_AT))
        ended_s, *numbers = cast("tuple[float, *tuple[int, ...]]", _ENDED.unpack_from(self._packed, at + _END_AT))
        status, error, strand, turn, prompt, cached, sampled, start, num_overlaps, num_rewrites = numbers
        middle = start + num_overlaps
        return LedgerRow(
            number=number,
            received_s=received_s,
            path=clients[path],
            dialect=own[dialect],
            client=clients[client],
            label=labels[label],
            overlaps=tuple(self._running.get(number, self._lists[start:middle])),
            ended_s=None if math.isnan(ended_s) else ended_s,
            status=status or None,
            error=own[error] or None,
            strand=None if strand < 0 else strand,
            turn=None if turn < 0 else turn,
            num_prompt_tokens=prompt,
            num_cached_tokens=cached,
            num_sampled_tokens=sampled,
            rewrites=tuple(own[index] for index in self._lists[middle : middle + num_rewrites]),
        )

    def _client_text(self, text: str) -> int:
        kept = text[:MAX_TEXT_CHARS]
        index = self._client_texts.get(kept)
        if index is not None:
            return index
        texts = self._client_texts
        return texts.setdefault(kept if len(texts) < MAX_CLIENT_TEXTS else OTHER_TEXT, len(texts))


class OpenRow(Struct, eq=False, kw_only=True):
    """One request's row while it is served. It ends once: by an answer, an error, or a disconnect of its client.

    `is_open`: it has not ended.
    """

    ledger: RequestLedger
    number: int
    clock: Clock
    is_open: bool = True

    def __repr__(self) -> str:
        return f"<OpenRow {self.number}>"

    def so_far(self) -> LedgerRow | None:
        """The row as it is now; None if the request has none."""
        rows = self.ledger.rows(1, self.number - 1) if self.is_open else []
        return rows[0] if rows and rows[0].number == self.number else None

    def labelled(self, label: Label) -> None:
        """Note a rule's label for the request."""
        if self.is_open:
            self.ledger.label(self.number, label)

    def refused(self, error: StenographError) -> None:
        """The request failed."""
        if self.is_open:
            self.is_open = False
            self.ledger.end(self.number, ended_s=self.clock.wall(), status=error.client_status, error=error.code)

    def answered(self, outcome: TurnOutcome) -> None:
        """The request has its reply; only writing it for the client is left."""
        if self.is_open:
            self.is_open = False
            if outcome.is_echo:
                self.ledger.label(self.number, ECHO)
            num_prompt = num_cached = num_sampled = 0
            for reply in outcome.replies:
                num_prompt += reply.usage.num_prompt
                num_cached += reply.usage.num_cached
                num_sampled += reply.usage.num_completion
            self.ledger.end(
                self.number,
                ended_s=self.clock.wall(),
                status=200,
                error=None if outcome.spent is None else outcome.spent.code,
                strand=outcome.strand,
                turn=outcome.node,
                num_prompt_tokens=num_prompt,
                num_cached_tokens=num_cached,
                num_sampled_tokens=num_sampled,
                rewrites=[one.rule for one in outcome.rewrites] if outcome.rewrites else (),
            )

    def counted(self, num_prompt_tokens: int) -> None:
        """The request was answered with the tokens of its prompt, and made no turn."""
        if self.is_open:
            self.is_open = False
            self.ledger.end(self.number, ended_s=self.clock.wall(), status=200, num_prompt_tokens=num_prompt_tokens)

    def close(self) -> None:
        """Nothing was answered: the client has left."""
        if self.is_open:
            self.is_open = False
            self.ledger.end(self.number, ended_s=self.clock.wall())


NO_ROW = OpenRow(ledger=RequestLedger(), number=0, clock=SystemClock(), is_open=False)
"""The row of a request without a session."""
