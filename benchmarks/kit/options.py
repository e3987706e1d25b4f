"""Options that several benchmarks have, and the values that they take."""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stenograph.embedded.options import EmbeddedOptions
from stenograph.parts import EmbeddedSettings

Number = TypeVar("Number", int, float)
PLOT_NEEDS = "needs matplotlib: pip install matplotlib"


def count(text: str) -> int:
    """A whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def count_or_none(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else count(text)


def at_least_0(text: str) -> float:
    """A number of at least 0."""
    if not 0 <= (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    if not 0 < (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    if (value := positive(text)) > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, got {text}")
    return value


def numbers(option: str, text: str | None, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of a list with commas; what is empty is left out. Raises ValueError, which names option and part."""
    found: list[Number] = []
    for part in filter(str.strip, (text or "").split(",")):
        try:
            found.append(kind(part))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"{option} takes numbers, separated by commas, got {part!r}: {error}") from error
    return found


def add_artifact(parser: argparse.ArgumentParser, bench: str, *, repeats: int) -> None:
    """--repeats and --out."""
    parser.add_argument(
        "--repeats", type=count, default=repeats, help=f"how often each is measured. Default: {repeats}."
    )
    add_out(parser, bench)


def add_out(parser: argparse.ArgumentParser, bench: str) -> None:
    """--out."""
    default = f"bench-{bench}.json"
    parser.add_argument(
        "--out", type=Path, default=Path(default), metavar="FILE.json", help=f"the artifact's place. Default: {default}"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model."""
    parser.add_argument("--model", default="smollm2-135m", help="as of `serve`. Default: smollm2-135m.")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--model and --threads of an embedded engine that the benchmark starts itself."""
    add_model(parser)
    parser.add_argument("--threads", type=count, default=1, help="BLAS threads of the engine. Default: 1.")


def engine_options(*, threads: int, max_batch: int) -> EmbeddedOptions:
    """The embedded engine as `serve` runs it, but that a step has tokens for a batch of this size."""
    defaults = EmbeddedSettings()
    return EmbeddedOptions(
        threads=threads,
        max_batch=max_batch,
        kv_tokens=defaults.kv_tokens,
        step_tokens=max(defaults.step_tokens, 2 * max_batch),
    )


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    """--plot."""
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"{what}; needs the extra `bench`")


def check_plot(options: argparse.Namespace) -> None:
    """Raises ValueError where --plot is asked for and cannot be drawn: before anything is measured."""
    if options.plot is not None and not can_plot():
        raise ValueError(f"--plot {PLOT_NEEDS}")


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None
