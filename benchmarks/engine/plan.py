"""The options of `stenograph bench engine`, read and checked before any engine runs."""

import argparse
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.engine.llamacpp import NEEDED, THREADS, is_installed
from benchmarks.kit.options import add_artifact, add_engine, count, count_or_none
from benchmarks.kit.runner import cached_model
from stenograph.embedded.options import EmbeddedOptions
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.parts import EmbeddedSettings

SHORT_TOKENS = 16
"""The prompt of a decode."""
MAX_BATCH = 256
LLAMACPP = "llamacpp"

_WARM_UP_TOKENS = 8
_WARM_UP_TURNS = 2


class EngineScenario(enum.StrEnum):
    """The kinds of measurement."""

    DECODE = "decode"
    PREFILL = "prefill"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The work of a round: tokens of each decode, prompts of a prefill, turns of a session."""

    decode_tokens: int
    num_prompts: int
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchPlan:
    """The measurements of a run."""

    files: ModelFiles
    scenarios: tuple[EngineScenario, ...]
    batches: tuple[int, ...]
    options: argparse.Namespace

    @property
    def is_beside_llamacpp(self) -> bool:
        """Whether llama.cpp gets the same."""
        return bool(self.options.beside == LLAMACPP)

    @property
    def sizes(self) -> Sizes:
        """Of a round that is measured."""
        options = self.options
        return Sizes(decode_tokens=options.max_tokens, num_prompts=options.num_prompts, num_turns=options.turns)

    @property
    def warm_up_sizes(self) -> Sizes:
        """Of a round before them: everything is touched once, and no more."""
        return Sizes(
            decode_tokens=min(self.options.max_tokens, _WARM_UP_TOKENS),
            num_prompts=1,
            num_turns=min(self.options.turns, _WARM_UP_TURNS),
        )

    @property
    def longest_tokens(self) -> int:
        """The longest sequence of a decode or a prefill."""
        lengths = {
            EngineScenario.DECODE: SHORT_TOKENS + self.options.max_tokens,
            EngineScenario.PREFILL: self.options.prompt_tokens + 1,
        }
        return max((lengths[scenario] for scenario in self.scenarios if scenario in lengths), default=0)

    @property
    def session_tokens(self) -> int:
        """The whole session's."""
        return int(self.options.turns * (self.options.turn_tokens + self.options.reply_tokens))

    @property
    def slots(self) -> tuple[int, ...]:
        """For each of llama.cpp's servers, its requests at a time."""
        decodes = self.batches if EngineScenario.DECODE in self.scenarios else ()
        return tuple(sorted({*decodes, *([1] if EngineScenario.PREFILL in self.scenarios else [])}))

    def engine_options(self, *, reuses_prefixes: bool = True) -> EmbeddedOptions:
        """The engine as `serve` runs it, but that all that is asked at once is decoded at once."""
        defaults = EmbeddedSettings()
        max_batch = max(defaults.max_batch, *self.batches)
        return EmbeddedOptions(
            threads=self.options.threads,
            max_batch=max_batch,
            step_tokens=max(defaults.step_tokens, 2 * max_batch),
            kv_tokens=max(defaults.kv_tokens, 2 * max(self.batches) * self.longest_tokens),
            reuses_prefixes=reuses_prefixes,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument(
        "--scenario",
        default="decode,prefill",
        metavar="decode,prefill,reuse",
        help="what is looked at. Default: decode,prefill.",
    )
    add_engine(parser)
    parser.add_argument(
        "--beside",
        choices=(LLAMACPP,),
        help=f"decode and prefill of llama.cpp too, in turn. {NEEDED.partition(': ')[2]}",
    )
    parser.add_argument("--batch", default="1,4,16", metavar="1,4,16", help="decode: at once. Default: 1,4,16.")
    parser.add_argument("--max-tokens", type=count, default=64, help="decode: of each reply. Default: 64.")
    parser.add_argument("--prompt-tokens", type=count, default=512, help="prefill: of each prompt. Default: 512.")
    parser.add_argument("--num-prompts", type=count, default=4, help="prefill: one after the other. Default: 4.")
    parser.add_argument("--turns", type=count, default=20, help="reuse: of the session. Default: 20.")
    parser.add_argument("--turn-tokens", type=count, default=60, help="reuse: new ones of each turn. Default: 60.")
    parser.add_argument("--reply-tokens", type=count, default=24, help="reuse: of each reply. Default: 24.")
    add_artifact(parser, "engine", repeats=3)
    parser.add_argument("--warm-up", type=count_or_none, default=1, help="short rounds before them. Default: 1.")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts. Default: 0.")


def read_plan(options: argparse.Namespace) -> EngineBenchPlan:
    """Everything that can be wrong before an engine runs. Raises ValueError and StartupError."""
    scenarios = tuple(dict.fromkeys(_scenarios(options.scenario)))
    batches = tuple(sorted(set(_batches(options.batch))))
    if options.beside == LLAMACPP:
        _check_beside(scenarios, options)
    plan = EngineBenchPlan(
        files=load_model_files(cached_model(options.model)), scenarios=scenarios, batches=batches, options=options
    )
    if plan.is_beside_llamacpp and plan.files.path.suffix.lower() != ".gguf":
        raise ValueError(f"--beside llamacpp needs the weights as a .gguf file, {plan.files.path} is none")
    room = plan.files.max_context_tokens
    needed = max(plan.longest_tokens, plan.session_tokens if EngineScenario.REUSE in scenarios else 0)
    if room is not None and needed > room:
        raise ValueError(f"{needed} tokens are asked for in one sequence, the model has room for {room}")
    return plan


def _check_beside(scenarios: tuple[EngineScenario, ...], options: argparse.Namespace) -> None:
    """Raises ValueError where llama.cpp cannot be beside."""
    if not is_installed():
        raise ValueError(NEEDED)
    if options.threads != THREADS:
        raise ValueError(f"--beside llamacpp has {THREADS} thread: leave --threads at {THREADS}")
    if set(scenarios) == {EngineScenario.REUSE}:
        raise ValueError("--beside llamacpp is for decode and prefill: --scenario reuse has nothing beside it")


def _scenarios(text: str) -> Iterator[EngineScenario]:
    for name in text.split(","):
        try:
            yield EngineScenario(name.strip())
        except ValueError:
            known = ", ".join(EngineScenario)
            raise ValueError(f"--scenario takes {known}, separated by commas, got {name.strip()!r}") from None


def _batches(text: str) -> Iterator[int]:
    for number in text.split(","):
        stripped = number.strip()
        if not stripped.isdecimal() or not 1 <= int(stripped) <= MAX_BATCH:
            raise ValueError(f"--batch takes numbers from 1 to {MAX_BATCH}, separated by commas, got {stripped!r}")
        yield int(stripped)
