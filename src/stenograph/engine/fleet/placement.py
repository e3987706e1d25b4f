"""The engines that stand in for each other, the choice of a turn's engine, and the trust in one that has failed. Pure.

A session stays on the engine of its last turn: its prefix is there, and elsewhere all of it is computed again. A
session without one goes to the engine with the least load; among equals to the one that is home to the fewest sessions,
and then by rendezvous hashing (Thaler and Ravishankar, 1998), equal on every server; it changes only for the sessions
of an engine that comes or goes. Hashing alone would bind sessions to engines at random, for as long as they live (of 64
on four engines, 20 to the fullest and 12 to the emptiest: medians of 300 trials), and it would send a displaced session
back to an engine without its last turn.

A home is passed over when it has too much to do, by the rule of consistent hashing with bounded loads (Mirrokni, Thorup
and Zadimoghaddam, 2016, arXiv:1608.01350), with weights for balls: a turn of `cost` stays if

    load(home) <= LOAD_FACTOR * (load of all + cost) / number of engines

so no engine is given more than LOAD_FACTOR times its share, and one turn. A load is of turns under way: the tokens of
their prompts, and TURN_TOKENS for each, since a short turn takes its place in every step too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Protocol, TypeVar

from stenograph.core.errors import StartupError
from stenograph.core.types import GrammarKind
from stenograph.engine.base import Capabilities

LOAD_FACTOR = 1.5
"""With two engines, a home may have three times as much to do as the other; moving costs a whole prefill."""
TURN_TOKENS = 256


_MAY_DIFFER = {"max_context_tokens", "streams", "reports_support", "grammars", "media", "note", "policy", "policies"}


def difference(one: tuple[str, Capabilities], other: tuple[str, Capabilities]) -> str:
    """The ability that keeps two named engines from standing in for each other, in words; "" for none."""
    (first_name, first), (name, second) = one, other
    for what in (field.name for field in fields(Capabilities) if field.name not in _MAY_DIFFER):
        ours, theirs = getattr(first, what), getattr(second, what)
        if ours != theirs:
            return f"engines differ in {what}: {first_name} has {ours!r}, {name} has {theirs!r}"
    return ""


def common_capabilities(members: Mapping[str, Capabilities]) -> Capabilities:
    """Abilities shared by all of them, and the media that any takes: a turn with them goes to none of the others.

    Raises StartupError for engines unfit to stand in for each other.
    """
    first_name, first = next(iter(members.items()))
    for member in members.items():
        if problem := difference((first_name, first), member):
            raise StartupError(problem)
    limits = [told.max_context_tokens for told in members.values() if told.max_context_tokens is not None]
    return replace(
        first,
        max_context_tokens=min(limits, default=None),
        streams=all(told.streams for told in members.values()),
        reports_support=all(told.reports_support for told in members.values()),
        grammars=frozenset[GrammarKind].intersection(*(told.grammars for told in members.values())),
        media=first.media.union(*(told.media for told in members.values())),
        note="; ".join(f"{name}: {told.note}" for name, told in members.items() if told.note),
    )


class Candidate(Protocol):
    """A candidate engine for a turn: our load on it now, and the number of sessions at home there."""

    @property
    def name(self) -> str: ...
    @property
    def load_tokens(self) -> int: ...
    @property
    def num_sessions(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def cost_of(num_prompt_tokens: int) -> int:
    """The load of a turn while it runs."""
    return num_prompt_tokens + TURN_TOKENS


def choose(candidates: Sequence[C], *, key: str, home: C | None, cost_tokens: int) -> C:
    """Choose the engine for a turn of session `key`. Its last turn, if it had any, ran at `home`."""
    bound = load_bound(candidates, cost_tokens=cost_tokens)
    for candidate in candidates:
        if candidate is home and candidate.load_tokens <= bound:
            return candidate
    return min(candidates, key=lambda one: (one.load_tokens, one.num_sessions, -_weight(one.name, key)))


def load_bound(candidates: Sequence[Candidate], *, cost_tokens: int) -> float:
    """The highest load for a home to be kept."""
    total = sum(candidate.load_tokens for candidate in candidates)
    return LOAD_FACTOR * (total + cost_tokens) / len(candidates)


def _weight(name: str, key: str) -> int:
    """The rendezvous weight; the heaviest engine wins. The hash is keyed: a key's bytes cannot pass for a name's."""
    keyed = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=blake2b(name.encode()).digest())
    return int.from_bytes(keyed.digest(), "big")


FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Trust:
    """One engine's standing, by its outcomes: trusted, in doubt, or on trial. The caller gives the time.

    An unreachable engine is in doubt at once, and gets nothing for a while. Then one request is let through; if it is
    answered the engine is trusted again, and if not the while is twice as long. A trial without a failure for `trial_s`
    counts as passed: a reply may take minutes, but an absent engine is known sooner.
    """

    def __init__(self, *, trial_s: float) -> None:
        self._trial_s = trial_s
        self._pause_s = FIRST_PAUSE_S
        self._retry_at: float | None = None
        self._on_trial_since: float | None = None
        self.why = ""

    def __repr__(self) -> str:
        return f"<Trust {'in doubt: ' + self.why if self.in_doubt else 'whole'}>"

    @property
    def in_doubt(self) -> bool:
        """Whether it failed last, and nothing has come of it since."""
        return self._retry_at is not None

    def admits(self, now: float) -> bool:
        """Whether a request may go there: always, or as the one trial."""
        if self._on_trial_since is not None and now - self._on_trial_since >= self._trial_s:
            self.worked()
        return self._retry_at is None or (now >= self._retry_at and self._on_trial_since is None)

    def began(self, now: float) -> bool:
        """Note a request to the engine; returns whether it is a trial."""
        if self._retry_at is None or self._on_trial_since is not None:
            return False
        self._on_trial_since = now
        return True

    def worked(self) -> None:
        """Note an answer, even an error."""
        self._pause_s, self._retry_at, self._on_trial_since, self.why = FIRST_PAUSE_S, None, None, ""

    def failed(self, now: float, why: str, *, was_trial: bool) -> None:
        """Note a failure to reach it. Many requests may find out at once; only a trial lengthens the pause."""
        self.why = why
        if was_trial:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._on_trial_since = None
        elif self._retry_at is not None:
            return
        self._retry_at = now + self._pause_s

    def left(self, *, was_trial: bool) -> None:
        """A request ended before anything came of it; after a trial, the next one is let through."""
        if was_trial:
            self._on_trial_since = None

    def retry_in_s(self, now: float) -> float:
        """Seconds until a trial; 0 where there is no doubt."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - now)
