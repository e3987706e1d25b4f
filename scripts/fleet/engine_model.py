"""A model of an engine: batches, keys and values, a prefix cache, preemption. Advanced by events; it knows no policy.

A step computes one token of each running request and up to `STEP_TOKENS` of prompts (chunked prefill). Keys and values
of ended requests stay cached, by session, until memory is wanted: the least recently used go first. Where a step finds
no memory the request that came last is preempted: it waits at the head of the queue, and what is no longer cached of
it is computed again. Steps that are alike are advanced at once.

Sources. vLLM's defaults (`docs/configuration/optimization.md`, `vllm/config`): `max_num_batched_tokens` 8192 and
`max_num_seqs` 256 of its server on an H100, `gpu_memory_utilization` 0.9, preemption by recomputation, LRU eviction
(`docs/design/prefix_caching.md`). The model is Qwen3-8B (config.json: 36 layers, 8 KV heads of 128, bfloat16), so a
token's keys and values have 147,456 bytes; the card has 80 GB, 3.35 TB/s and 989 TFLOP/s (NVIDIA's data sheet), of
which 75 % and 40 % are taken as reached.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

KV_BYTES = 36 * 2 * 8 * 128 * 2
WEIGHT_BYTES = 16.4e9
KV_TOKENS = int((80e9 * 0.9 - WEIGHT_BYTES - 3e9) / KV_BYTES)
STEP_TOKENS = 8192
MAX_RUNNING = 256
BYTES_PER_S = 0.75 * 3.35e12
STEP_S = WEIGHT_BYTES / BYTES_PER_S
HELD_TOKEN_S = KV_BYTES / BYTES_PER_S
PREFILL_TOKEN_S = 2 * 8.2e9 / (0.4 * 989e12)


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A request at an engine: a prompt of a session, and the tokens that it will sample."""

    session: int
    num_prompt: int
    num_sampled: int
    num_cached: int = 0
    was_begun: bool = False
    held: int = 0
    """Its tokens in memory, while it is prefilled; and at `held_at`, while it samples."""
    held_at: int = 0
    ends_at: int = 0
    """The step that samples its last token."""
    left: int = 0
    """Tokens to be computed before it samples."""


@dataclass(slots=True, eq=False)
class ModelEngine:
    """One engine. `advance` returns the requests that ended, and `next_at` is when to call it again."""

    kv_tokens: int = KV_TOKENS
    num_preemptions: int = 0
    next_at: float | None = None
    waiting: deque[ModelRequest] = field(default_factory=deque[ModelRequest])
    _sampling: dict[ModelRequest, None] = field(default_factory=dict["ModelRequest", None])
    _prefilling: dict[ModelRequest, None] = field(default_factory=dict["ModelRequest", None])
    _ends: list[tuple[int, int, ModelRequest]] = field(default_factory=list[tuple[int, int, ModelRequest]])
    _cached: "OrderedDict[int, int]" = field(default_factory=OrderedDict[int, int])
    _num_cached: int = 0
    _num_held: int = 0
    _step: int = 0
    _began_at: float = 0.0
    _step_s: float = 0.0
    _num_steps: int = 0
    _chunk: int = 0
    _num_added: int = 0

    @property
    def num_running(self) -> int:
        return len(self._sampling) + len(self._prefilling)

    @property
    def kv_usage(self) -> float:
        return self._num_held / self.kv_tokens

    def add(self, request: ModelRequest, now: float) -> None:
        """A request comes: it is looked at when the step under way ends."""
        self.waiting.append(request)
        if self.next_at is None:
            self._plan(now)
        elif self._num_steps > 1:
            self._num_steps = min(self._num_steps, int((now - self._began_at) / self._step_s) + 1)
            self.next_at = self._began_at + self._num_steps * self._step_s

    def advance(self, now: float) -> list[ModelRequest]:
        """The steps under way have ended."""
        self._step += self._num_steps
        self._num_held += self._num_steps * len(self._sampling)
        self._prefill()
        ended = list[ModelRequest]()
        while self._ends and self._ends[0][0] <= self._step:
            _, _, request = heappop(self._ends)
            if request in self._sampling and request.ends_at <= self._step:
                self._release(request)
                ended.append(request)
        self._plan(now)
        return ended

    def _prefill(self) -> None:
        left = self._chunk
        for request in list(self._prefilling):
            done = min(left, request.left)
            left, request.left, request.held = left - done, request.left - done, request.held + done
            self._num_held += done
            if request.left == 0:
                del self._prefilling[request]
                self._sampling[request] = None
                request.held_at = self._step
                request.ends_at = self._step + request.num_sampled
                self._num_added += 1
                heappush(self._ends, (request.ends_at, self._num_added, request))

    def _release(self, request: ModelRequest) -> None:
        """Its tokens are only cached from now on."""
        num = request.held + (self._step - request.held_at if request in self._sampling else 0)
        self._sampling.pop(request, None)
        self._prefilling.pop(request, None)
        self._num_held -= num
        self._num_cached += num - self._cached.pop(request.session, 0)
        self._cached[request.session] = num
        request.held = num

    def _preempt(self) -> None:
        running = self._prefilling or self._sampling
        request = next(reversed(running))
        num_sampled = self._step - request.held_at if request in self._sampling else 0
        self._release(request)
        request.num_prompt, request.num_sampled = request.num_prompt + num_sampled, request.num_sampled - num_sampled
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _evict(self, num_wanted: int) -> None:
        """Keep only what leaves room for so many more tokens."""
        excess = self._num_held + self._num_cached + num_wanted - self.kv_tokens
        while excess > 0 and self._cached:
            session, num = next(iter(self._cached.items()))
            gone = min(num, excess)
            excess, self._num_cached = excess - gone, self._num_cached - gone
            if gone == num:
                del self._cached[session]
            else:
                self._cached[session] = num - gone

    def _admit(self) -> None:
        budget = STEP_TOKENS - len(self._sampling) - sum(one.left for one in self._prefilling)
        while self.waiting and budget > 0 and self.num_running < MAX_RUNNING:
            request = self.waiting[0]
            hit = min(self._cached.get(request.session, 0), request.num_prompt - 1)
            left = request.num_prompt - hit
            wanted = hit + min(left, budget) + len(self._sampling) + sum(one.left for one in self._prefilling)
            if self._num_held + wanted > self.kv_tokens:
                return
            self.waiting.popleft()
            self._num_cached -= self._cached.pop(request.session, 0)
            self._num_held += hit
            if not request.was_begun:
                request.num_cached, request.was_begun = hit, True
            request.held, request.left = hit, left
            self._prefilling[request] = None
            budget -= left

    def _plan(self, now: float) -> None:
        """The next steps: as many as are alike."""
        self._admit()
        while self.num_running and self._num_held + self._wanted() > self.kv_tokens:
            self._preempt()
        if not self.num_running:
            self._admit()  # what was preempted last, alone
        self._evict(self._wanted())
        if not self.num_running:
            self.next_at = None
            return
        self._chunk = self._wanted() - len(self._sampling)
        self._num_steps = 1
        if not self._chunk:
            while self._ends[0][2] not in self._sampling or self._ends[0][0] != self._ends[0][2].ends_at:
                heappop(self._ends)
            full = (self.kv_tokens - self._num_held) // len(self._sampling)
            self._num_steps = max(1, min(self._ends[0][0] - self._step, full))
            self._evict(self._num_steps * len(self._sampling))
        self._step_s = STEP_S + HELD_TOKEN_S * self._num_held + PREFILL_TOKEN_S * self._chunk
        self._began_at, self.next_at = now, now + self._num_steps * self._step_s

    def _wanted(self) -> int:
        """New tokens of the next step."""
        num = len(self._sampling)
        return num + min(STEP_TOKENS - num, sum(one.left for one in self._prefilling))
