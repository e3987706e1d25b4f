"""The run of distribution.py on a real model: long work, which can be interrupted and goes on where it was.

`python -m scripts.distribution_run MODEL NUM_TOKENS [--folder DIR] [--fresh]`. The figures of each batch become a file
of the state folder; the same command, with the same model and the same code, goes on after the last one. A run that
comes to its end removes its state.
"""

import argparse
import asyncio
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

import stenograph
from scripts.distribution import Figures, mixed_samples, recompute
from scripts.engine_table import serving
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.model.settings import default_cache_dir

PROMPTS = (
    "Once upon a time there was a",
    "The three most important rules of writing are",
    "def fibonacci(n):\n",
    "Q: What is the capital of France, and why?\nA:",
    "Dear colleagues,\n\nI am writing to",
    "The experiment showed that",
)
TOKENS_AT_ONCE = 2500
"""Tokens of a batch: an interrupted run loses at most one, a minute or two."""
MOST_APART_NATS, LEAST_IGNORED_NATS, MOST_BYTES = 1e-4, 1e-2, 8

Batch = Callable[[int, int], tuple[int, Figures]]
"""(the first session's number, tokens wanted) to how many sessions there were, and their figures."""


class SavedFigures:
    """The figures so far, and their files in a folder: one a batch, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        """Read what is there. A file that cannot be read, and what comes after it, is measured again."""
        self.figures = Figures()
        self.num_sessions = self._num_batches = 0
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        while (path := self._path()).exists():
            try:
                with path.open("rb") as file, np.load(file) as kept:
                    batch = {name: kept[name].tolist() for name in kept.files}
            except (OSError, EOFError, ValueError, BadZipFile):
                break
            self._count(batch.pop("num_sessions"), Figures(**batch))

    def __repr__(self) -> str:
        return f"<SavedFigures {self._num_batches} batches, {len(self.figures.apart)} tokens in {self._folder}>"

    def add(self, num_sessions: int, batch: Figures) -> None:
        """Count a batch, and keep it."""
        partial = self._folder / "partial.npz"
        np.savez(
            partial,
            num_sessions=num_sessions,
            apart=np.array(batch.apart, np.float64),
            ignored=np.array(batch.ignored, np.float64),
            num_bytes=np.array(batch.num_bytes, np.int64),
            num_ids=np.array(batch.num_ids, np.int64),
        )
        partial.replace(self._path())
        self._count(num_sessions, batch)

    def remove(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder)

    def _path(self) -> Path:
        return self._folder / f"{self._num_batches:05}.npz"

    def _count(self, num_sessions: int, batch: Figures) -> None:
        self.num_sessions += num_sessions
        self._num_batches += 1
        self.figures.apart += batch.apart
        self.figures.ignored += batch.ignored
        self.figures.num_bytes += batch.num_bytes
        self.figures.num_ids += batch.num_ids


def measure(saved: SavedFigures, num_tokens: int, batch: Batch, say: Callable[[str], None]) -> None:
    """Measure batch after batch until there are so many tokens, keep each, and say how far it is."""
    begin, known = time.monotonic(), len(saved.figures.apart)
    if known:
        say(f"going on after {known} of {num_tokens} tokens: {saved!r}")
    while (num_left := num_tokens - len(saved.figures.apart)) > 0:
        saved.add(*batch(saved.num_sessions, min(num_left, TOKENS_AT_ONCE)))
        done = len(saved.figures.apart)
        left_s = (time.monotonic() - begin) / (done - known) * max(0, num_tokens - done)
        say(f"{min(done, num_tokens)} of {num_tokens}, about {left_s / 60:.0f} min left. {saved.figures}")


def is_good(figures: Figures) -> bool:
    """Whether the recorded log-probabilities are those of the distribution, the support matters, and it is small."""
    is_close = np.mean(figures.apart) <= MOST_APART_NATS and np.mean(figures.ignored) > LEAST_IGNORED_NATS
    return bool(is_close and np.median(figures.num_bytes) <= MOST_BYTES)


def state_name(model: Path) -> str:
    """A name that another model, or another version of this package, does not have."""
    told = hashlib.blake2b(digest_size=6)
    with model.open("rb") as file:
        told.update(hashlib.file_digest(file, "sha256").digest())
    package = Path(stenograph.__file__).parent
    for path in sorted(package.rglob("*.py")):
        told.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return told.hexdigest()


def main() -> int:
    """Sample through `stenograph serve`, compute again, print figures as they come; 1 where they are not good."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path)
    options.add_argument("num_tokens", type=int)
    options.add_argument("--folder", type=Path, help="where runs keep their state (default: in the cache folder)")
    options.add_argument("--fresh", action="store_true", help="forget what an interrupted run measured")
    asked = options.parse_args()
    cache = Path(os.environ.get("STENOGRAPH_CACHE") or default_cache_dir(os.environ))
    folder = (asked.folder or cache / "test-distribution") / state_name(asked.model)
    if asked.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    saved = SavedFigures(folder)
    try:
        _measure_served(asked.model, saved, asked.num_tokens)
    except KeyboardInterrupt:
        _say(f"interrupted: {len(saved.figures.apart)} tokens are kept in {folder}, and the same command goes on")
        return 130
    saved.remove()
    return int(not is_good(saved.figures))


def _measure_served(model: Path, saved: SavedFigures, num_tokens: int) -> None:
    config, weights = load_weights(model)
    forward = NumpyForward(config, weights, num_kv_tokens=config.max_context)
    with serving(model) as url:

        def batch(first: int, num_wanted: int) -> tuple[int, Figures]:
            sampling = mixed_samples(url, PROMPTS, num_tokens=num_wanted, max_tokens=64, first=first)
            samples, figures = asyncio.run(sampling), Figures()
            for sample in samples:
                recompute(sample, forward, figures)
            return len(samples), figures

        measure(saved, num_tokens, batch, _say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
