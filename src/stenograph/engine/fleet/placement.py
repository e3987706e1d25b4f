"""The choice of the engine that gets a turn. Pure.

A session stays on the engine that ran its last turn: that is where its prefix is, and elsewhere all of it is computed
again. A session without one goes to the engine with the least load; among equals to the one that is home to the fewest
sessions, and then by rendezvous hashing (Thaler and Ravishankar, 1998), which is the same on every server and changes
only for the sessions of an engine that comes or goes. Hashing alone would bind sessions to engines at random, for as
long as they live (of 64 on four engines, 20 to the fullest and 12 to the emptiest: medians of 300 trials), and it
would send a session that had to leave back to where its last turn is not.

A home is passed over when it has too much to do, by the rule of consistent hashing with bounded loads (Mirrokni, Thorup
and Zadimoghaddam, 2016, arXiv:1608.01350), with weights for balls: a turn of `cost` stays if

    load(home) <= LOAD_FACTOR * (load of all + cost) / number of engines

so that no engine is given more than LOAD_FACTOR times its share, and one turn. A load is of turns under way: the tokens
of their prompts, and TURN_TOKENS for each, since a short turn takes its place in every step too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_FACTOR = 1.5
"""With two engines, a home may have three times as much to do as the other; moving costs a whole prefill."""
TURN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine that could take a turn: what it has to do of ours now, and how many sessions are at home there."""

    name: str
    load_tokens: int
    num_sessions: int


def cost_of(num_prompt_tokens: int) -> int:
    """The load of a turn while it runs."""
    return num_prompt_tokens + TURN_TOKENS


def choose(candidates: Sequence[Candidate], *, key: str, home: str | None, cost_tokens: int) -> Candidate:
    """Choose the engine for a turn of session `key`, whose last turn, if it had any, ran at `home`."""
    bound = load_bound(candidates, cost_tokens=cost_tokens)
    for candidate in candidates:
        if candidate.name == home and candidate.load_tokens <= bound:
            return candidate
    return min(candidates, key=lambda one: (one.load_tokens, one.num_sessions, -_weight(one.name, key)))


def load_bound(candidates: Sequence[Candidate], *, cost_tokens: int) -> float:
    """The load up to which a home is kept."""
    total = sum(candidate.load_tokens for candidate in candidates)
    return LOAD_FACTOR * (total + cost_tokens) / len(candidates)


def _weight(name: str, key: str) -> int:
    """The rendezvous weight; the heaviest engine wins. A keyed hash, so that a key's bytes cannot pass for a name's."""
    keyed = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=blake2b(name.encode()).digest())
    return int.from_bytes(keyed.digest(), "big")
