"""Weights of a stand-in for an engine: which sampled each token, and which computed what a prompt finds in its cache.

It has no keys and values, only the name of the weights that would have computed each position. Pure.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Version = str | int | None


def version_spans(versions: Sequence[Version]) -> list[dict[str, Any]]:
    """Spans of tokens by the weight version that sampled them, as SGLang and vLLM report them: `end` is exclusive."""
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    return spans


def lora_cards(loras: Mapping[str, str], model: str) -> list[dict[str, Any]]:
    """LoRAs, folders by name, as a list of models has them."""
    told: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "stand-in", "max_model_len": None}
    return [{"id": name, "root": folder, "parent": model, **told} for name, folder in loras.items()]


class CacheKey(NamedTuple):
    """A prompt's ids, and the salt that it has to have in common with what it finds."""

    ids: Sequence[int]
    salt: Hashable


class CachedLine(NamedTuple):
    """Ids, and the weights that computed each."""

    ids: list[int]
    versions: list[Version]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrompt:
    """A prompt at a cache: `line` has the weights of each of its positions, the first `num_found` of which were there.

    `siblings` are the lines of the same salt.
    """

    key: CacheKey
    line: CachedLine
    num_found: int
    siblings: list[CachedLine]

    @property
    def found(self) -> set[Version]:
        """The weights that computed what was found."""
        return set(self.line.versions[: self.num_found])

    def keep(self, ids: Sequence[int], versions: Sequence[Version]) -> None:
        """Keep the prompt and the ids that were sampled after it, as far as the weights in `versions` computed them."""
        num = min(len(ids), len(versions))
        self.siblings.append(CachedLine([*self.line.ids, *ids[:num]], [*self.line.versions, *versions[:num]]))


@dataclass(slots=True)
class PrefixCache:
    """Lines of token ids by salt. `prompts` are all that came, in order."""

    prompts: list[CachedPrompt] = field(default_factory=list[CachedPrompt])
    _lines: dict[Hashable, list[CachedLine]] = field(default_factory=lambda: defaultdict(list))

    def find(self, key: CacheKey, version: Version) -> CachedPrompt:
        """Look a prompt up; weights `version` compute the rest of it, its last id always among that."""
        best: list[Version] = []
        for ids, versions in self._lines[key.salt]:
            shorter = min(len(ids), len(key.ids) - 1)
            pairs = zip(ids[:shorter], key.ids[:shorter], strict=True)
            num = next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)
            best = versions[:num] if num > len(best) else best
        line = CachedLine([*key.ids], [*best, *[version] * (len(key.ids) - len(best))])
        self.prompts.append(CachedPrompt(key=key, line=line, num_found=len(best), siblings=self._lines[key.salt]))
        return self.prompts[-1]

    def flush(self) -> None:
        """Forget all lines."""
        for lines in self._lines.values():
            lines.clear()
