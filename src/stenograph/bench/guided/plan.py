"""The options of `bench guided`, read and checked before any engine runs."""

import argparse
import enum
import json
from dataclasses import dataclass
from pathlib import Path

from stenograph.bench.guided.figures import FREE, GUIDED
from stenograph.bench.guided.grammar import (
    PROFILE_SCHEMA,
    CheckedGrammar,
    of_choices,
    of_ebnf,
    of_json_object,
    of_regex,
    of_schema,
)
from stenograph.bench.guided.prompts import Prompts, built_in, random_prompts, read_prompts, sharegpt_prompts
from stenograph.bench.guided.report import check_csv
from stenograph.bench.kit.datasets import read_sharegpt
from stenograph.bench.kit.options import add_artifact, add_engine, count, count_or_none, engine_options
from stenograph.bench.kit.runner import cached_model
from stenograph.core.types import Grammar, SamplingParams
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.app import make_renderer
from stenograph.http.settings import Settings
from stenograph.model.files import load_model_files
from stenograph.render.renderer import Renderer

DEFAULT_MAX_TOKENS = 96
DEFAULT_INPUT_TOKENS = 128


class Dataset(enum.StrEnum):
    """Where prompts come from that are neither built in nor a file of prompts."""

    SHAREGPT = "sharegpt"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedPlan:
    """Everything that is measured."""

    model: Path
    constraint: CheckedGrammar
    prompts: Prompts
    renderer: Renderer
    options: argparse.Namespace

    def params(self, number: int, grammar: Grammar | None) -> SamplingParams:
        """The sampling of the reply to a prompt: the same in every round, guided and free, but for the grammar."""
        return SamplingParams(
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            top_k=self.options.top_k,
            seed=self.options.seed + number,
            max_tokens=self.options.max_tokens,
            ignore_eos=self.options.ignore_eos,
            grammar=grammar,
        )

    @property
    def modes(self) -> tuple[str, ...]:
        """The phases of each round."""
        return (GUIDED,) if self.options.no_baseline else (GUIDED, FREE)

    def engine_options(self) -> EmbeddedOptions:
        """The engine as `serve` runs it, but that all that is asked at once is decoded at once."""
        max_batch = max(Settings().max_batch, self.options.concurrency)
        return engine_options(threads=self.options.threads, max_batch=max_batch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add = parser.add_argument
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", type=Path, metavar="FILE", help="a JSON Schema. Default: a built-in one.")
    grammar.add_argument("--json-object", action="store_true", help="any JSON object")
    grammar.add_argument("--regex", metavar="R", help="a regular expression that the whole reply matches")
    grammar.add_argument("--choice", metavar="a,b", help="one of these texts")
    grammar.add_argument("--ebnf", type=Path, metavar="FILE", help="a grammar in EBNF: root ::= …")
    add_engine(parser)
    add("--prompts", type=Path, metavar="FILE", help="one a line, or a .jsonl. Default: built in.")
    add("--dataset", choices=tuple(Dataset), help="prompts of a data set instead")
    add("--dataset-path", type=Path, metavar="FILE", help="ShareGPT's file: .json or .jsonl")
    add("--input-len", type=count, help="tokens of a text of --dataset random. Default: 128.")
    add("--output-len", type=count, help="--max-tokens, by its name for data sets")
    add("--num-prompts", type=count, default=16, help="how many of them. Default: 16.")
    add("--concurrency", type=count, default=16, help="requests at once. Default: 16.")
    add("--max-tokens", type=count, help="the most that a reply has. Default: 96.")
    add("--ignore-eos", action="store_true", help="no reply ends before its grammar or max_tokens does")
    add("--temperature", type=float, default=0.7, help="0 is greedy. Default: 0.7.")
    add("--top-p", type=float, default=1.0, help="the most likely tokens of this share. Default: 1.")
    add("--top-k", type=int, default=0, help="the most likely so many tokens. Default: 0, all.")
    add("--seed", type=int, default=0, help="of replies and orders. Default: 0.")
    add("--warm-up", type=count_or_none, default=1, help="rounds before them. Default: 1.")
    add_artifact(parser, "guided", repeats=5)
    add("--csv", type=Path, metavar="FILE.csv", help="append a row of medians for each mode")
    add("--no-baseline", action="store_true", help="guided alone, without the free runs beside it")
    add("--stream-output", action="store_true", help="write the row of each mode and round to stdout as it is known")


def read_plan(options: argparse.Namespace) -> GuidedPlan:
    """Everything that can be wrong before an engine runs. Raises ValueError, OSError, StartupError."""
    constraint = _constraint(options)
    _check_dataset(options)
    options.max_tokens = options.output_len or options.max_tokens or DEFAULT_MAX_TOKENS
    conversations = None if options.dataset_path is None else read_sharegpt(options.dataset_path)
    prompts = None if options.prompts is None else read_prompts(options.prompts, options.num_prompts)
    if options.csv is not None:
        check_csv(options.csv)
    model = cached_model(options.model)
    files = load_model_files(model)
    renderer = make_renderer(files, "auto")
    if conversations is not None:
        assert files.max_context_tokens is not None, "weights come with their context"
        room = files.max_context_tokens - options.max_tokens
        prompts = sharegpt_prompts(conversations, renderer, num=options.num_prompts, most_tokens=room)
    elif options.dataset is not None:
        num_tokens = options.input_len or DEFAULT_INPUT_TOKENS
        prompts = random_prompts(renderer.tokenizer, num=options.num_prompts, num_tokens=num_tokens)
    prompts = prompts or built_in(options.num_prompts)
    plan = GuidedPlan(model=model, constraint=constraint, prompts=prompts, renderer=renderer, options=options)
    plan.params(0, None)
    return plan


def _check_dataset(options: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if options.dataset is not None and options.prompts is not None:
        raise ValueError("--prompts and --dataset are two sources of prompts: give one")
    if (options.dataset == Dataset.SHAREGPT) != (options.dataset_path is not None):
        raise ValueError("--dataset sharegpt needs its file as --dataset-path, and no other data set has one")
    if options.input_len is not None and options.dataset != Dataset.RANDOM:
        raise ValueError("--input-len is the length of the texts of --dataset random")
    if options.output_len is not None and options.max_tokens is not None:
        raise ValueError("--output-len and --max-tokens are the same: give one")


def _constraint(options: argparse.Namespace) -> CheckedGrammar:
    if options.json_object:
        return of_json_object()
    if options.regex is not None:
        return of_regex(options.regex)
    if options.choice is not None:
        return of_choices(options.choice.split(","))
    if options.ebnf is not None:
        return of_ebnf(options.ebnf.read_text("utf-8"))
    return of_schema(
        json.dumps(PROFILE_SCHEMA) if options.json_schema is None else options.json_schema.read_text("utf-8")
    )
