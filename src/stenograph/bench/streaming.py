"""`stenograph bench streaming`: what does it cost to submit a request, and where does its first token's time go?

The same prompts to the embedded engine's loop once for each way to tokenize them (in `add_request`, on so many
threads, before), in turn, over one load of the weights. Owns the run's options, order and progress; what a measurement
is, is in streaming_load.py.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stenograph.bench.artifact import Artifact, ScenarioResult, write_artifact
from stenograph.bench.processes import Child, ChildFailed, Children
from stenograph.bench.report import errors_of, json_line
from stenograph.bench.responsiveness import begin_artifact, cached_model, count
from stenograph.bench.streaming_figures import raw_of, streaming_figures
from stenograph.bench.streaming_load import StreamingPlan, Variant
from stenograph.bench.streaming_prompts import PromptKind
from stenograph.bench.streaming_report import ENGINE, streaming_table
from stenograph.bench.verdicts import RULE
from stenograph.core.errors import StartupError
from stenograph.core.settings import Settings
from stenograph.render.model_files import load_model_files

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
MAX_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is measured: one plan, in each of several ways, so often."""

    plan: StreamingPlan
    variants: tuple[Variant, ...]
    threads: int
    repeats: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    defaults = Settings()
    parser.add_argument(
        "--tokenize-workers",
        metavar="0,4",
        help="threads that tokenize, each number measured in turn; 0: add_request does. Default: 0,4.",
    )
    parser.add_argument(
        "--pretok", action="store_true", help="prompts that are ids already: alone, or beside --tokenize-workers"
    )
    parser.add_argument("--model", default="smollm2-135m", help="as of `serve`. Default: smollm2-135m.")
    parser.add_argument(
        "--prompts", choices=tuple(PromptKind), default=PromptKind.UNIQUE, help="all different, or all one"
    )
    parser.add_argument("--prompt-tokens", type=count, default=260, help="the length of a prompt. Default: 260.")
    parser.add_argument("--num-requests", type=count, default=64, help="how many. Default: 64.")
    parser.add_argument(
        "--submit-interval-ms", type=_at_least_0, default=0.0, help="fixed arrivals; 0, the default: a burst"
    )
    parser.add_argument("--max-tokens", type=count, default=16, help="tokens of each reply. Default: 16.")
    parser.add_argument("--warm-up", type=_count_or_none, default=4, help="requests before each. Default: 4.")
    parser.add_argument("--repeats", type=count, default=3, help="how often each is measured. Default: 3.")
    parser.add_argument("--threads", type=count, default=1, help="BLAS threads of the engine. Default: 1.")
    parser.add_argument(
        "--max-batch", type=count, default=defaults.max_batch, help="sequences that are stepped at once"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-streaming.json"), metavar="FILE.json", help="the artifact's place"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    try:
        asked = _asked(options)
        artifact = begin_artifact("streaming", options)
        _measure(asked, artifact, options.out)
    except (ChildFailed, StartupError, ValueError, OSError) as error:
        sys.stderr.write(f"stenograph: {error}\n")
        return 2
    write = sys.stdout.write
    write(f"{asked.plan.max_tokens} tokens each of {_load(asked.plan)}\n\n")
    write(streaming_table(artifact, [variant.name for variant in asked.variants]) + "\n")
    if len(asked.variants) > 1:
        write(RULE + "\n")
    for line in errors_of(artifact):
        write(f"ERRORS {line}\n")
    write(f"written to {options.out}\n{json_line(artifact)}\n")
    sys.stdout.flush()
    return 0


def _asked(options: argparse.Namespace) -> Run:
    """Everything that can be wrong before an engine runs. Raises ValueError and StartupError."""
    variants = tuple(_variants(options.tokenize_workers, is_pretok=options.pretok))
    options.tokenize_workers = ",".join(str(one.num_workers) for one in variants if not one.is_pretok)
    path = cached_model(options.model)
    needed, room = options.prompt_tokens + options.max_tokens, load_model_files(path).max_context_tokens
    if needed > room:
        raise ValueError(f"--prompt-tokens and --max-tokens are {needed} tokens, the model has room for {room}")
    plan = StreamingPlan(
        model=str(path),
        prompts=PromptKind(options.prompts),
        prompt_tokens=options.prompt_tokens,
        num_requests=options.num_requests,
        submit_interval_ms=options.submit_interval_ms,
        max_tokens=options.max_tokens,
        warm_up=options.warm_up,
        max_batch=options.max_batch,
        kv_tokens=Settings().kv_tokens,
    )
    return Run(plan=plan, variants=variants, threads=options.threads, repeats=options.repeats)


def _variants(workers: str | None, *, is_pretok: bool) -> Iterator[Variant]:
    """The ways to tokenize that are asked for. Raises ValueError."""
    listed = workers if workers is not None else "" if is_pretok else "0,4"
    numbers = [text.strip() for text in listed.split(",") if text.strip()]
    for text in numbers:
        if not text.isdecimal() or int(text) > MAX_WORKERS:
            raise ValueError(f"--tokenize-workers takes numbers up to {MAX_WORKERS}, separated by commas, got {text!r}")
    if len(set(map(int, numbers))) < len(numbers):
        raise ValueError(f"--tokenize-workers has a number twice: {workers}")
    if not numbers and not is_pretok:
        raise ValueError("--tokenize-workers has no number, and there is no --pretok: nothing to measure")
    yield from (Variant(num_workers=int(text)) for text in numbers)
    if is_pretok:
        yield Variant(is_pretok=True)


def _measure(asked: Run, artifact: Artifact, out: Path) -> None:
    """All repeats of every way, in an order that alternates. What is measured is kept at once."""
    environment = {**os.environ, **dict.fromkeys(BLAS_THREADS, str(asked.threads))}
    sys.stderr.write("loading the model\n")
    with Children() as children:
        arguments = ["stenograph.bench.streaming_load", msgspec.json.encode(asked.plan).decode()]
        engine = children.start("the engine", arguments, environment=environment)
        ready = engine.event()
        artifact.arguments |= {"num_prompt_tokens": ready["prompt_tokens"], "tokenizer": ready["tokenizer"]}
        results = {variant.name: _result(asked.plan, variant, ready) for variant in asked.variants}
        artifact.scenarios += results.values()
        for repeat in range(asked.repeats):
            for variant in _in_turn(asked.variants, repeat):
                sys.stderr.write(f"{repeat + 1} of {asked.repeats}, {variant.name}: {_load(asked.plan)}\n")
                measured = _step(engine, variant)
                if not measured["num_ok"]:
                    raise ValueError(f"no request was answered; the first failure: {measured['first_error']}")
                results[variant.name].figures[ENGINE].append(streaming_figures(measured))
                results[variant.name].raw[ENGINE].append(raw_of(measured))
                write_artifact(out, artifact)


def _step(engine: Child, variant: Variant) -> dict[str, Any]:
    engine.tell(msgspec.json.encode(variant).decode())
    while "step" not in (event := engine.event()):
        sys.stderr.write(f"  {event['progress']} of {event['of']} requests ended, {event['tokens']} tokens drawn\n")
    return event


def _result(plan: StreamingPlan, variant: Variant, ready: dict[str, Any]) -> ScenarioResult:
    return ScenarioResult(
        name=f"{_arrivals(plan)}, {variant.name}",
        title=f"{_load(plan)}, {plan.max_tokens} tokens each",
        sessions=plan.num_requests,
        turns=1,
        message_bytes=round(ready["prompt_bytes"]),
        goals=[],
        figures={ENGINE: []},
        raw={ENGINE: []},
    )


def _load(plan: StreamingPlan) -> str:
    return f"{plan.num_requests} {plan.prompts} prompts of {plan.prompt_tokens} tokens, {_arrivals(plan)}"


def _arrivals(plan: StreamingPlan) -> str:
    return f"every {plan.submit_interval_ms:g} ms" if plan.submit_interval_ms else "burst"


def _in_turn(variants: Sequence[Variant], repeat: int) -> Sequence[Variant]:
    """Every other repeat the other way round: what drifts with time falls on all."""
    return variants if repeat % 2 == 0 else variants[::-1]


def _at_least_0(text: str) -> float:
    """An option's value of at least 0."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _count_or_none(text: str) -> int:
    """An option's value of at least 0."""
    return 0 if text == "0" else count(text)
