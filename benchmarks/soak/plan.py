"""The plan of a soak's clients: sessions sampled from a seed, and faults dealt from a deck. Pure.

Owns the acts that the engine is ordered, and what a client must see of each. A session is the same for a seed and its
number, as long as sessions are drawn in the order of their numbers: the deck is one for all.
"""

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass

SMALL_BYTES = (40, 1200)
LARGE_MESSAGE_BYTES = 200_000
FILLER_BYTES = 1_000_000
"""Of replay payload, which makes a reply of 1.3 MiB: in base64 it is a third longer."""
SPECIAL_SHARE = 0.35
"""Of the turns, those for which a card is dealt."""
LARGE_REPLY_SHARE = 0.02
LARGE_MESSAGE_SHARE = 0.005
DELETED_SHARE = 0.2
"""Of the sessions, those that are deleted with a chat in flight."""
REPLAY_SHARE = 0.3
"""Of the sessions, those whose large replies are of a payload that the session keeps. Only some turns have one, which
an engine does not do: such sessions have no samples (422)."""
TURNS = (5, 30)
MOST_WAIT_S = 0.03
"""The longest time after its request until a client hangs up."""
SLOW_EVERY = 16
"""In how many rounds of the deck one card comes that takes seconds."""
NUM_REPLIES = 24

OK, CUT, ABORTED = "200 stop", "200 length", "200 abort"
INVALID, UNREACHABLE, TIMEOUT = "502 upstream_invalid", "502 upstream_unreachable", "504 upstream_timeout"

OUTCOMES: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "none",
            "slow_headers",
            "slow_body",
            "chunked",
            "gzip",
            "deflate",
            "raw_deflate",
            "doubled_headers",
            "unframed",
        ),
        frozenset({OK}),
    ),
    "length": frozenset({CUT}),
    "abort": frozenset({ABORTED}),
    **dict.fromkeys(
        ("closed", "reset", "reset_in_body", "cut_body", "cut_chunk", "long_length", "bad_chunk", "garbage"),
        frozenset({UNREACHABLE}),
    ),
    "short_length": frozenset({INVALID, UNREACHABLE}),  # whether the rest comes with it is the network's choice
    **dict.fromkeys(("false_gzip", "cut_gzip", "unknown_encoding"), frozenset({INVALID})),
    **{f"status_{status}": frozenset({str(status)}) for status in (400, 429, 500, 503)},
    **{
        f"lie_{lie}": frozenset({INVALID})
        for lie in (
            *("null_content", "no_meta_info", "no_logprobs", "a_token_less", "id_beyond_vocabulary", "nan_logprob"),
            *("another_prompt", "another_finish"),
        )
    },
}
"""The answer to a client that waits, by the act that the engine is ordered."""
NEVER = ("hang", "held_headers", "held_body")
"""Acts that end only when someone ends them."""


class Move(enum.StrEnum):
    """The moves of a client in a turn."""

    ASK = "ask"
    LARGE_REPLY = "large reply"
    LARGE_MESSAGE = "large message"
    RETRY = "retry with a key after"
    REPEAT = "repeat with a key"
    JOIN = "join with a key"
    LOST = "hang up, ask again with the key"
    HANG_UP = "hang up"
    LEAVE = "hang up on"
    ABORT = "abort"
    BUSY = "chat on a busy session"
    DEADLINE = "wait for the deadline of"
    REGENERATE = "regenerate the last turn"
    BRANCH = "branch"
    TWINS = "two chats at once"
    STALE = "discard two turns"
    OTHER_BODY = "another body with the key"
    DELETE = "delete in flight"


TREE_ONLY = frozenset({Move.BRANCH, Move.TWINS})
LINEAR_ONLY = frozenset({Move.BUSY, Move.STALE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A move, and the act that the engine is ordered for it."""

    move: Move
    act: str = "none"

    @property
    def name(self) -> str:
        """As reports show it."""
        if self.move is Move.ASK and self.act != "none":
            return f"fault {self.act}"
        return str(self.move) if self.act == "none" else f"{self.move} {self.act}"

    def suits(self, *, is_tree: bool) -> bool:
        """Whether it can be played on such a session."""
        return self.move not in (LINEAR_ONLY if is_tree else TREE_ONLY)


DECK = (
    *(Card(move=Move.ASK, act=act) for act in OUTCOMES if act != "none"),
    *(Card(move=Move.RETRY, act=act) for act in ("cut_body", "status_503")),
    *(Card(move=Move.LEAVE, act=act) for act in NEVER),
    *(
        Card(move=move)
        for move in (
            *(Move.LARGE_REPLY, Move.LARGE_MESSAGE, Move.REPEAT, Move.JOIN, Move.LOST, Move.HANG_UP),
            *(Move.REGENERATE, Move.BRANCH, Move.TWINS, Move.STALE, Move.OTHER_BODY),
        )
    ),
    *(Card(move=move, act="paused") for move in (Move.ABORT, Move.BUSY)),
)
"""The cards of each round, which are shuffled."""
SLOW = (
    Card(move=Move.ABORT, act="hang"),
    Card(move=Move.DEADLINE, act="held_body"),
    Card(move=Move.DEADLINE, act="hang"),
)
"""They hold a client for seconds, so that they come seldom."""
DELETES = (Card(move=Move.DELETE, act="paused"), Card(move=Move.DELETE, act="hang"))


class Deck:
    """Deals each card once in a round."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"deck {seed}")
        self._cards: list[Card] = []
        self._num_rounds = 0

    def deal(self, *, is_tree: bool) -> Card:
        """The first card that suits a session; the others wait for theirs."""
        if not any(card.suits(is_tree=is_tree) for card in self._cards):
            self._shuffle()
        index = next(i for i, card in enumerate(self._cards) if card.suits(is_tree=is_tree))
        return self._cards.pop(index)

    def _shuffle(self) -> None:
        slow_round, is_plain = divmod(self._num_rounds, SLOW_EVERY)
        cards = [*DECK, *(() if is_plain else (SLOW[slow_round % len(SLOW)],))]
        self._rng.shuffle(cards)
        self._cards += cards
        self._num_rounds += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn: `replies` are the numbers of what is said the first time, and again. `wait_s` is for who hangs up."""

    card: Card
    turn: str
    message_bytes: int
    filler_bytes: int
    replies: tuple[int, int]
    streams: bool
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSession:
    """The script of one session's client. `delete` is the chat that runs when it is deleted, if one does."""

    number: int
    is_tree: bool
    replays: bool
    steps: tuple[Step, ...]
    delete: Step | None


def draw_session(number: int, *, seed: int, deck: Deck) -> SoakSession:
    """The `number`-th session of a soak."""
    rng = random.Random(f"{seed} session {number}")
    is_tree, replays = rng.random() < 0.5, rng.random() < REPLAY_SHARE
    cards = list(_cards(rng, deck, is_tree=is_tree))
    steps = tuple(_step(rng, card, f"{seed}.{number}.{index}") for index, card in enumerate(cards))
    delete: Step | None = None
    if rng.random() < DELETED_SHARE:
        card = DELETES[rng.randrange(8) == 0]  # one that hangs takes the whole grace time
        delete = _step(rng, card, f"{seed}.{number}.delete")
    return SoakSession(number=number, is_tree=is_tree, replays=replays, steps=steps, delete=delete)


def _cards(rng: random.Random, deck: Deck, *, is_tree: bool) -> Iterator[Card]:
    for _ in range(rng.randint(*TURNS)):
        if rng.random() < SPECIAL_SHARE:
            yield deck.deal(is_tree=is_tree)
            continue
        drawn = rng.random()
        if drawn < LARGE_REPLY_SHARE:
            yield Card(move=Move.LARGE_REPLY)
        elif drawn < LARGE_REPLY_SHARE + LARGE_MESSAGE_SHARE:
            yield Card(move=Move.LARGE_MESSAGE)
        else:
            yield Card(move=Move.ASK)


def _step(rng: random.Random, card: Card, turn: str) -> Step:
    first, again = rng.sample(range(NUM_REPLIES), 2)
    return Step(
        card=card,
        turn=turn,
        message_bytes=LARGE_MESSAGE_BYTES if card.move is Move.LARGE_MESSAGE else rng.randint(*SMALL_BYTES),
        filler_bytes=FILLER_BYTES if card.move is Move.LARGE_REPLY else 0,
        replies=(first, again),
        streams=rng.random() < 0.4,
        wait_s=rng.random() * MOST_WAIT_S,
    )
