"""The services shared by all turns of a process: made once, by the code wiring the rooms together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stenograph.core.clock import Clock
from stenograph.core.kinds import SaltMode
from stenograph.engine.base import Engine
from stenograph.offload.pool import CpuPool, LoopShare
from stenograph.session.kinds import KindRules
from stenograph.session.rewrite_rules import RewriteRules
from stenograph.session.settings import OverBudget
from stenograph.session.side_rules import SHIPPED_RULES, read_kind_rules
from stenograph.session.weights import Weights
from stenograph.text.renderer import Renderer
from stenograph.trajectory.canonical import Canonical


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnServices:
    """Services shared by all turns. `timeout_s` is a request's deadline, None for none.

    `abort_grace_s` is how long an aborted request waits for the engine's partial reply. `over_budget` decides about a
    `max_tokens` beyond the context's room. `template_kwargs` are the template's arguments in every chat, unless it or
    its session sets them. `share` does GIL-holding work in pieces. `tokenizer` makes ids of the text of completions and
    of chats without a session; None: `renderer` does, on `pool`. `kind_rules` label the requests of sessions. Of the
    `rewrite_rules` chats are under those of `canonical`, unless their session has its own. `weights` names those of an
    engine that does not itself, and holds new turns while they change; `cache_salt` is that of turns without a session.
    `policy` is the LoRA of a session's turns.
    """

    engine: Engine
    renderer: Renderer
    pool: CpuPool
    clock: Clock
    timeout_s: float | None
    abort_grace_s: float = 5.0
    over_budget: OverBudget = OverBudget.REFUSE
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    share: LoopShare = field(default_factory=LoopShare)
    tokenizer: Engine | None = None
    kind_rules: KindRules = field(default_factory=lambda: read_kind_rules(SHIPPED_RULES))
    rewrite_rules: RewriteRules = field(default_factory=lambda: RewriteRules.read(SHIPPED_RULES))
    canonical: Canonical = field(default_factory=Canonical)
    weights: Weights = field(default_factory=Weights)
    cache_salt: SaltMode = SaltMode.FOLLOW
    policy: str | None = None


class Place(Protocol):
    """A tenant's part of the turns in flight, for one request."""

    @property
    def tenant(self) -> str | None:
        """The tenant's name; None: the server's operator."""
        ...

    def grow(self, num_turns: int) -> None:
        """Take so many more. Raises LimitExceeded."""
        ...

    def end(self) -> None:
        """Give all of it back."""
        ...

    def sampled(self, num_tokens: int) -> None:
        """Its turns have sampled so many tokens."""
        ...
