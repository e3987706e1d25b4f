"""A forward whose keys and values are a ledger: what it reads from a wrong row, it cannot take for the right one."""

from collections.abc import Sequence

import numpy as np

from stenograph.embedded.forward.base import LogitsFor, PreparedWeights, Routes, RowSpan, Segment
from stenograph.embedded.forward.weight_memory import WeightMemory
from stenograph.embedded.forward.weights import F32Array, LlamaConfig, LlamaWeights

VOCAB, CONTEXT = 320, 96
_CONFIG = LlamaConfig(
    num_layers=1, hidden=2, num_heads=1, num_kv_heads=1, head_dim=2, ffn=1, vocab_size=VOCAB, rope_theta=1.0,
    rms_eps=1.0, tied_embeddings=True, max_context=CONTEXT,
)  # fmt: skip

Entry = int
"""What stands for a position's keys and values: it depends on the position's id and on all entries before it."""


def logits_after(entries: Sequence[Entry]) -> F32Array:
    """Logits [V] of whoever reads these entries, the same to the last bit each time."""
    random = np.random.Generator(np.random.PCG64(hash(tuple(entries)) % 2**64))
    return np.asarray(3 * random.standard_normal(VOCAB), np.float32)


def entry_of(before: Sequence[Entry], id_: int) -> Entry:
    """The entry of an id after all those before it."""
    return hash((*before, id_))


def logits_of(ids: Sequence[int], weights: int = 0) -> F32Array:
    """Logits [V] after a line, of which nothing was computed before, by the weights of this number."""
    entries: list[Entry] = [weights] if weights else []
    for id_ in ids:
        entries.append(entry_of(entries, id_))
    return logits_after(entries)


class LedgerWeights:
    """Weights that are a number: it stands before the entries of every line."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_freed = False

    @property
    def config(self) -> LlamaConfig:
        return _CONFIG

    def free(self) -> WeightMemory | None:
        self.is_freed = True
        return None


class LedgerForward:
    """A `Forward` as exact as integers: batches, chunks, copies and places change no bit of what it computes."""

    def __init__(self, num_kv_tokens: int) -> None:
        self._entries: list[Entry] = [0] * num_kv_tokens
        self._weights = LedgerWeights(0)

    @property
    def config(self) -> LlamaConfig:
        return _CONFIG

    @property
    def num_kv_tokens(self) -> int:
        return len(self._entries)

    def forward(self, segments: Sequence[Segment]) -> F32Array:
        logits: list[F32Array] = []
        for segment in segments:
            rows = [row for span in segment.spans for row in range(span.begin, span.end)]
            number = self._weights.number
            entries = [*([number] if number else []), *(self._entries[row] for row in rows[: segment.start])]
            for row, id_ in zip(rows[segment.start :], segment.ids.tolist(), strict=True):
                self._entries[row] = entry_of(entries, id_)
                entries.append(self._entries[row])
                if segment.logits_for is LogitsFor.ALL:
                    logits.append(logits_after(entries))
            if segment.logits_for is LogitsFor.LAST:
                logits.append(logits_after(entries))
        return np.array(logits, np.float32).reshape(len(logits), VOCAB)

    def copy_kv(self, source: int, target: int, num_tokens: int) -> None:
        self._entries[target : target + num_tokens] = self._entries[source : source + num_tokens]

    def routes(self, spans: Sequence[RowSpan]) -> Routes | None:
        return None

    def prepare(self, config: LlamaConfig, weights: LlamaWeights) -> LedgerWeights:
        raise AssertionError("these weights are made by their number")

    def swap(self, prepared: PreparedWeights) -> LedgerWeights:
        assert isinstance(prepared, LedgerWeights)
        before, self._weights = self._weights, prepared
        return before
