"""Plans the engine's next step: a pure function of the waiting and running requests and the budget.

A step is one forward over at most `step_tokens` tokens. Keys and values lie in blocks, and blocks run out. `plan`
decides four things, in this order:

1. Preemption. Every decoding sequence, and the oldest whatever it does, needs a block for its next token. While
   blocks are too few for that, the youngest gives up its own: it waits again, in its place by arrival, and on its
   return recomputes evicted tokens. The youngest, because it loses least, and because the oldest never goes and so gets
   on under any load: each in its turn becomes the oldest, so all end.
2. Decode. Each gets its one token. First, because a client may be reading along, and one token more costs little.
3. Prefill, in chunks, from the rest of the step: so no long prompt holds up decoding sequences. The oldest first, and a
   younger one only if every older is done, because half a prompt is of no use.
4. Admission, in order, from the rest then. If one does not fit, it holds back those behind it, so a long prompt is not
   passed for ever. None in a step with a preemption: its blocks would be those just given up.

The corners:

- Preempted sequences with blocks in common give up more than is counted. So more may be preempted than had to be; and
  where the oldest is the only one left, there may still be no block for it by this count. Then the step only preempts,
  and the next one, with the true number, goes on.
- The oldest, alone, always has its block, because a request is accepted only if it fits all the blocks. So a plan is
  empty only where nothing is to do; an empty one beside requests means a request was accepted that does not fit.
- A chunk of prefill is cut to the blocks there are. With none, it waits until an older sequence ends or a younger one
  is preempted; rule 1 has freed a block for the oldest of all.
- An admitted request is sure of blocks for its whole prompt and one more token, though it takes them chunk by chunk:
  until it is done, no other is admitted. Only decoding sequences may be before it, and it may be preempted for them.
- Opening an admitted request may find less computed than planned, because another took its blocks. Its share then ends
  earlier in the prompt, and its blocks still suffice, since blocks without a holder were counted as taken.

Knows no ids, no blocks but their number, no time. The caller acts in the order of the plan's fields: gives back the
blocks of `preempted`, opens `admitted`, finds blocks for `shares` and computes them.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[Key]):
    """A waiting request, new or preempted. `num_cached` of its `num_tokens` are found computed, never the last.

    `num_new_blocks` are the cost of all its tokens and one more, in available blocks: a found block costs nothing if a
    running sequence holds it, and one if nobody does.
    """

    key: Key
    num_tokens: int
    num_cached: int
    num_new_blocks: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_cached < self.num_tokens:
            raise ValueError(f"{self.num_cached} of {self.num_tokens} tokens are cached: the last never is")
        if self.num_new_blocks < 1:
            raise ValueError("the last token and the one after it take a block that is not shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(Generic[Key]):
    """A running sequence: `num_filled` of its `num_tokens` are computed, in `num_blocks` blocks.

    `num_own_blocks` are held by no other sequence: surely available when this one gives up its own.
    """

    key: Key
    num_tokens: int
    num_filled: int
    num_blocks: int
    num_own_blocks: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_filled < self.num_tokens:
            raise ValueError(f"{self.num_filled} of {self.num_tokens} tokens are computed: the last is yet to be")
        if not 0 <= self.num_own_blocks <= self.num_blocks:
            raise ValueError(f"{self.num_own_blocks} own blocks of {self.num_blocks}")

    @property
    def num_pending(self) -> int:
        """Tokens to compute before it can sample the next one."""
        return self.num_tokens - self.num_filled

    @property
    def decodes(self) -> bool:
        """Whether one token is all it needs; so also does the last of a prompt."""
        return self.num_pending == 1

    def num_blocks_to_take(self, num_tokens: int, block_tokens: int) -> int:
        """Blocks needed for the next `num_tokens`, beside its own."""
        return max(0, -(-(self.num_filled + num_tokens) // block_tokens) - self.num_blocks)

    def num_tokens_that_fit(self, num_blocks: int, block_tokens: int) -> int:
        """Capacity in tokens of its own blocks and `num_blocks` more."""
        return (self.num_blocks + num_blocks) * block_tokens - self.num_filled


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a step: tokens to compute, running sequences, and blocks of `block_tokens` without a holder.

    `max_prefills` limits the prompts in prefill, those just admitted included; None: as many as fit.
    """

    step_tokens: int
    max_batch: int
    block_tokens: int
    available_blocks: int
    max_prefills: int | None = None

    def __post_init__(self) -> None:
        if self.max_prefills is not None and self.max_prefills < 1:
            raise ValueError(f"a step computes tokens of at least one prompt, got max_prefills {self.max_prefills}")
        if min(self.max_batch, self.block_tokens) < 1 or self.available_blocks < 0:
            raise ValueError(f"a step needs a sequence at least, and blocks of at least one token: {self}")
        if self.step_tokens <= self.max_batch:
            raise ValueError(
                f"{self.step_tokens} tokens a step leave prefill nothing where {self.max_batch} sequences decode"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Generic[Key]):
    """The next `num_tokens` of a sequence are computed in this step."""

    key: Key
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(Generic[Key]):
    """One step. `shares` are of staying and of just admitted sequences; each of them has one at most.

    `preempted` is youngest first: given back in this order, the blocks of the first to return are evicted last.
    """

    preempted: tuple[Key, ...]
    admitted: tuple[Key, ...]
    shares: tuple[Share[Key], ...]


def plan(waiting: Iterable[Waiting[Key]], running: Sequence[Running[Key]], budget: Budget) -> StepPlan[Key]:
    """The next step. Both are in order of arrival; no more than `max_batch` run.

    Of `waiting` only those admitted and at most one more are looked at, so it may compute its items as it goes.
    """
    size = budget.block_tokens
    num_tokens, num_blocks = budget.step_tokens, budget.available_blocks
    kept = list(running)
    preempted: list[Key] = []
    admitted: list[Key] = []
    shares: list[Share[Key]] = []

    while len(kept) > 1 and _num_blocks_needed(kept, size) > num_blocks:
        youngest = kept.pop()
        num_blocks += youngest.num_own_blocks
        preempted.append(youngest.key)

    num_prefills_left = budget.max_batch if budget.max_prefills is None else budget.max_prefills
    for sequence in sorted(kept, key=lambda sequence: not sequence.decodes):  # stable: among equals still by age
        if not sequence.decodes and not num_prefills_left:
            break
        chunk = min(sequence.num_pending, num_tokens, sequence.num_tokens_that_fit(num_blocks, size))
        if chunk > 0:
            shares.append(Share(key=sequence.key, num_tokens=chunk))
            num_tokens -= chunk
            num_blocks -= sequence.num_blocks_to_take(chunk, size)
            num_prefills_left -= not sequence.decodes
        if chunk < sequence.num_pending:
            break  # tokens or blocks are used up

    requests = iter(waiting)
    room = min(budget.max_batch - len(kept), num_prefills_left)
    while num_tokens and num_blocks and not preempted and len(admitted) < room:
        request = next(requests, None)
        if request is None or request.num_new_blocks > num_blocks:
            break
        chunk = min(request.num_tokens - request.num_cached, num_tokens)
        admitted.append(request.key)
        shares.append(Share(key=request.key, num_tokens=chunk))
        num_tokens -= chunk
        num_blocks -= request.num_new_blocks

    return StepPlan(preempted=tuple(preempted), admitted=tuple(admitted), shares=tuple(shares))


def _num_blocks_needed(kept: Sequence[Running[Key]], block_tokens: int) -> int:
    """Blocks to take so that every decoding sequence, and the oldest, has one for its next token."""
    must_go_on = (sequence for sequence in kept if sequence.decodes or sequence is kept[0])
    return sum(sequence.num_blocks_to_take(1, block_tokens) for sequence in must_go_on)
