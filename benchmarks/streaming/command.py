"""`stenograph bench streaming`: what does it cost to submit a request, and where does its first token's time go?

The same prompts to the embedded engine's loop once for each way to tokenize them (in `add_request`, on so many
threads, before), in turn, over one load of the weights. Owns the run's options, order and progress; what a measurement
is, is in load.py.
"""

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from benchmarks.kit.artifact import ENGINE, Artifact, Measurement, ScenarioResult, write_artifact
from benchmarks.kit.figures import values_of
from benchmarks.kit.options import (
    add_artifact,
    add_engine,
    at_least_0,
    count,
    count_or_none,
    engine_options,
    numbers,
)
from benchmarks.kit.processes import CannotMeasure, Child, Children
from benchmarks.kit.report import errors_of
from benchmarks.kit.runner import begin_artifact, cached_model, in_turn, say, show
from benchmarks.kit.verdicts import RULE
from benchmarks.streaming.figures import raw_of, streaming_figures, streaming_table
from benchmarks.streaming.load import StreamingPlan, Variant
from benchmarks.streaming.prompts import PromptKind
from stenograph.model.files import load_model_files
from stenograph.parts import EmbeddedSettings, ForwardKind

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
MAX_WORKERS = 64
DEFAULT_PROMPT_TOKENS = 260


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add = parser.add_argument
    defaults = EmbeddedSettings()
    add(
        "--tokenize-workers",
        metavar="0,4",
        help="threads that tokenize, each number measured in turn; 0: add_request does. Default: 0,4.",
    )
    add("--pretok", action="store_true", help="prompts that are ids already: alone, or beside --tokenize-workers")
    add_engine(parser)
    add("--prompts", choices=tuple(PromptKind), default=PromptKind.UNIQUE, help="all different, or all one")
    add("--prompt-tokens", type=count, help="the length of a prompt. Default: 260.")
    add("--prompt", metavar="TEXT", help="the text of every prompt; unique ones have their number first")
    add("--prompt-repeats", type=count, default=1, metavar="N", help="how often a prompt has --prompt")
    add("--num-requests", type=count, default=64, help="how many. Default: 64.")
    add("--submit-interval-ms", type=at_least_0, default=0.0, help="fixed arrivals; 0, the default: a burst")
    add("--max-tokens", type=count, default=16, help="tokens of each reply. Default: 16.")
    add("--warm-up", type=count_or_none, default=4, help="requests before each. Default: 4.")
    add_artifact(parser, "streaming", repeats=3)
    add("--max-batch", type=count, default=defaults.max_batch, help="sequences that are stepped at once")
    add(
        "--max-prefill-batch",
        type=count,
        metavar="N",
        help="prompts that a step computes tokens of. Default: no limit.",
    )
    add("--no-prefix-cache", action="store_true", help="the KV of earlier prompts is not found again")
    eos = parser.add_mutually_exclusive_group()
    eos.add_argument(
        "--ignore-eos", action="store_true", default=True, help="every reply has all of --max-tokens. Default."
    )
    eos.add_argument("--stop-on-eos", action="store_false", dest="ignore_eos", help="a reply ends where the model does")
    add("--forward", choices=tuple(ForwardKind), default=ForwardKind.NUMPY, help="what computes. Default: numpy.")
    add("--torch-device", help="where `--forward torch` computes. Default: the first GPU, else the CPU.")


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    variants = tuple(_variants(options.tokenize_workers, is_pretok=options.pretok))
    plan = _plan(options)
    options.tokenize_workers = ",".join(str(one.num_workers) for one in variants if not one.is_pretok)
    artifact = begin_artifact("streaming", options)
    _measure(plan, variants, artifact, options)
    shown = streaming_table(artifact, [variant.name for variant in variants])
    rule = RULE if len(variants) > 1 else ""
    return show(artifact, options, f"{_header(plan, artifact)}\n", shown, rule, *errors_of(artifact))


def _plan(options: argparse.Namespace) -> StreamingPlan:
    """Everything that can be wrong before an engine runs. Raises ValueError and StartupError."""
    path = cached_model(options.model)
    if options.prompt is None and options.prompt_repeats != 1:
        raise ValueError("--prompt-repeats repeats --prompt, which is not given")
    if options.prompt is not None and options.prompt_tokens is not None:
        raise ValueError("--prompt is taken as it is: it has no --prompt-tokens")
    if options.prompt == "":
        raise ValueError("--prompt is empty")
    if options.torch_device is not None and options.forward != ForwardKind.TORCH:
        raise ValueError(f"--torch-device is for --forward torch, not for {options.forward}")
    length = options.prompt_tokens or DEFAULT_PROMPT_TOKENS
    needed, room = length + options.max_tokens, load_model_files(path).max_context_tokens
    if options.prompt is None and room is not None and needed > room:
        raise ValueError(f"--prompt-tokens and --max-tokens are {needed} tokens, the model has room for {room}")
    return StreamingPlan(
        model=str(path),
        prompts=PromptKind(options.prompts),
        prompt_tokens=min(length, max(1, room - options.max_tokens)),
        prompt=(options.prompt or "") * options.prompt_repeats,
        num_requests=options.num_requests,
        submit_interval_ms=options.submit_interval_ms,
        max_tokens=options.max_tokens,
        warm_up=options.warm_up,
        engine=replace(
            engine_options(threads=options.threads, max_batch=options.max_batch),
            forward=ForwardKind(options.forward),
            torch_device=options.torch_device or "auto",
            reuses_prefixes=not options.no_prefix_cache,
        ),
        max_prefills=options.max_prefill_batch,
        ignore_eos=options.ignore_eos,
    )


def _variants(workers: str | None, *, is_pretok: bool) -> Iterator[Variant]:
    """The ways to tokenize that are asked for. Raises ValueError."""
    asked = workers if workers is not None else "" if is_pretok else "0,4"
    found = numbers("--tokenize-workers", asked, _num_workers)
    if len(set(found)) < len(found):
        raise ValueError(f"--tokenize-workers has a number twice: {workers}")
    if not found and not is_pretok:
        raise ValueError("--tokenize-workers has no number, and there is no --pretok: nothing to measure")
    yield from (Variant(num_workers=num) for num in found)
    if is_pretok:
        yield Variant(is_pretok=True)


def _num_workers(text: str) -> int:
    if (num := count_or_none(text)) > MAX_WORKERS:
        raise ValueError(f"the most are {MAX_WORKERS}")
    return num


def _measure(plan: StreamingPlan, variants: Sequence[Variant], artifact: Artifact, options: argparse.Namespace) -> None:
    """All repeats of every way, in an order that alternates. What is measured is kept at once."""
    environment = {**os.environ, **dict.fromkeys(BLAS_THREADS, str(options.threads))}
    say("loading the model")
    with Children() as children:
        engine, ready = children.start_planned("the engine", "benchmarks.streaming.load", plan, environment=environment)
        artifact.arguments |= {
            "num_prompt_tokens": ready["prompt_tokens"],
            "tokenizer": ready["tokenizer"],
            "device": ready["device"],
        }
        results = {variant.name: _result(plan, variant, ready) for variant in variants}
        artifact.scenarios += results.values()
        for repeat in range(options.repeats):
            for variant in in_turn(variants, repeat):
                say(f"{repeat + 1} of {options.repeats}, {variant.name}: {_load(plan)}")
                results[variant.name].keep(ENGINE, _measured(engine, variant))
                write_artifact(options.out, artifact)


def _measured(engine: Child, variant: Variant) -> Measurement:
    """Raises CannotMeasure if nothing was answered."""
    run = engine.step(msgspec.json.encode(variant).decode(), _note)
    if not run["num_ok"]:
        raise CannotMeasure(f"no request was answered; the first failure: {run['first_error']}")
    return Measurement(figures=streaming_figures(run), raw=raw_of(run))


def _note(event: dict[str, Any]) -> None:
    say(f"  {event['progress']} of {event['of']} requests ended, {event['tokens']} tokens sampled")


def _result(plan: StreamingPlan, variant: Variant, ready: dict[str, Any]) -> ScenarioResult:
    return ScenarioResult(
        name=f"{_arrivals(plan)}, {variant.name}",
        title=f"{_load(plan)}, {plan.max_tokens} tokens each",
        sessions=plan.num_requests,
        turns=1,
        message_bytes=round(ready["prompt_bytes"]),
    )


def _header(plan: StreamingPlan, artifact: Artifact) -> str:
    """The load, and the tokens of one measurement: their median over all of them."""
    repeats = [figures for result in artifact.scenarios for figures in result.figures[ENGINE]]
    totals = [f"{statistics.median(values_of(repeats, name)):,.0f}" for name in ("prompt_tokens", "completion_tokens")]
    most = f"{plan.max_tokens} tokens each" if plan.ignore_eos else f"up to {plan.max_tokens} tokens each, or the eos"
    reuse = "" if plan.engine.reuses_prefixes else ", no prefix cache"
    return (
        f"{most} of {_load(plan)}\n{totals[0]} prompt tokens and {totals[1]} completion tokens a measurement;"
        f" {plan.engine.forward} on {artifact.arguments['device']}{reuse}"
    )


def _load(plan: StreamingPlan) -> str:
    length = "of the text given" if plan.prompt else f"of {plan.prompt_tokens} tokens"
    return f"{plan.num_requests} {plan.prompts} prompts {length}, {_arrivals(plan)}"


def _arrivals(plan: StreamingPlan) -> str:
    return f"every {plan.submit_interval_ms:g} ms" if plan.submit_interval_ms else "burst"
