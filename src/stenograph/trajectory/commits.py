"""The additions of one commit to a session, as values for a store to write and to read a session back from. Pure.

A session begins with a `SessionOpened` and goes on with `SessionCommit`s: each has the additions of one request, with
all of its turns. Between them stand outcomes (core/outcome.py); the last one holds. They have the order of the commits;
applied in this order to an empty session they make the session again. Knows neither the bytes in a store (store/codec)
nor how a session is run. Where a session has many of a class, it is a struct, made in a tenth of a dataclass's time:
all of them are made again when a session is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from stenograph.core.chat import Remaining
from stenograph.core.kinds import UNLABELLED, AfterLength, Compat, HistoryKind, Label
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.stated_options import NOTHING_STATED, StatedOptions
from stenograph.core.types import SessionId
from stenograph.core.weights import FOLLOWING, CacheSalt
from stenograph.trajectory.canonical import Canonical
from stenograph.trajectory.turn import CommittedTurn, Node

if TYPE_CHECKING:
    from stenograph.trajectory.forks import ForkPoint  # loaded by the first fork


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMark:
    """The tokenizer and the chat template of a session's ids: a name for people, a digest to compare.

    An empty digest is of an unknown model.
    """

    name: str = ""
    digest: bytes = b""


class RequestMark(Struct, frozen=True, kw_only=True, gc=False):
    """The part of a request kept to recognize another as its repetition: the print of its body, not the body.

    `body_print` is XXH3 of 128 bits of its `num_body_bytes`. `order` counts the session's requests as they were begun,
    `num_begun` those begun by the time of the commit. `budget` is the budget left before anything was sampled.
    """

    route: str
    body_print: bytes
    num_body_bytes: int
    key: str | None = None
    order: int = 0
    num_begun: int = 0
    budget: Remaining = msgspec.field(default_factory=Remaining)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options of a session, set at its creation. None is no limit.

    `matcher` is its name. `ttl_s`: seconds without a chat before the session is dropped. Its requests are under the
    rules of `sampling` and of `canonical`. `support`: its engine is asked for the ids that could be sampled. `compat`
    is another server's contract, kept by the session. `fork`: where it left another. `cache_salt`: see there. `tenant`
    owns it; None: the server's operator does. `stated` has the others.
    """

    history: HistoryKind = HistoryKind.STRANDS
    matcher: str = "harness"
    after_length: AfterLength = AfterLength.CLOSE
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    ttl_s: float | None = None
    stated: StatedOptions = NOTHING_STATED
    max_nodes: int | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    sampling: SamplingRules | None = None
    canonical: Canonical = field(default_factory=Canonical)
    support: bool = False
    compat: Compat | None = None
    cache_salt: CacheSalt = FOLLOWING
    fork: "ForkPoint | None" = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A session as it was opened. `created_at`: seconds of the epoch.

    `request` serves to recognize a repetition of the opening request; None if it had no key.
    """

    session_id: SessionId
    created_at: float
    model: ModelMark = ModelMark()
    options: SessionOptions = SessionOptions()
    request: RequestMark | None = None


class StrandOpened(Struct, frozen=True, kw_only=True, gc=False):
    """A strand opened by a turn: its key, None if no request can have it, and the numbers of the strand it continues
    and of the one it is a fork of."""

    key: bytes | None = None
    agent_id: str = ""
    continues: int | None = None
    fork_of: int | None = None


class PlacedTurn(Struct, frozen=True, kw_only=True, gc=False):
    """A turn and its place: after `parent`, in the strand of this number, or in one opened by the turn.

    Where a session has but one strand, every turn says how it was opened, and the first to come opened it.
    """

    turn: CommittedTurn
    parent: Node | None = None
    strand: int | None = None
    opened: StrandOpened = StrandOpened()


class LedgerRow(Struct, frozen=True, kw_only=True, gc=False):
    """A request of a session. Times are in seconds by the caller's clock; `ended_s` None: it is still running.

    `client` is the user agent. `strand` and `turn` (its node's id) are None if it made no turn. `overlaps` are the
    numbers of the requests running beside it, the first 16. `status` is the HTTP answer's, None if none was sent;
    `error` is the code of an error. `rewrites` are the names of the applied rewrites, the first 16.
    """

    number: int
    received_s: float
    path: str
    dialect: str
    client: str
    label: Label
    overlaps: tuple[int, ...]
    ended_s: float | None = None
    status: int | None = None
    error: str | None = None
    strand: int | None = None
    turn: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sampled_tokens: int = 0
    rewrites: tuple[str, ...] = ()


class SessionCommit(Struct, frozen=True, kw_only=True, gc=False):
    """The turns added by one request. The client knows its reply by `reply_id`; None: by the id of the one turn.

    `label` comes from rules. `request` None: no other can be known to repeat it. `ledger` has the rows of the requests
    ended since the commit before, and this one's.
    """

    turns: tuple[PlacedTurn, ...]
    label: Label = UNLABELLED
    reply_id: str | None = None
    request: RequestMark | None = None
    ledger: tuple[LedgerRow, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a commit has at least one turn")
