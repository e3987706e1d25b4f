"""The choice of a turn's engine. Pure.

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

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_FACTOR = 1.5
"""With two engines, a home may have three times as much to do as the other; moving costs a whole prefill."""
TURN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate engine for a turn: our load on it now, and the number of sessions at home there."""

    name: str
    load_tokens: int
    num_sessions: int


def cost_of(num_prompt_tokens: int) -> int:
    """The load of a turn while it runs."""
    return num_prompt_tokens + TURN_TOKENS


def choose(candidates: Sequence[Candidate], *, key: str, home: str | None, cost_tokens: int) -> Candidate:
    """Choose the engine for a turn of session `key`. Its last turn, if it had any, ran at `home`."""
    bound = load_bound(candidates, cost_tokens=cost_tokens)
    for candidate in candidates:
        if candidate.name == home and candidate.load_tokens <= bound:
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
