"""What `bench guided` is asked to do: its options, read and checked before any engine runs."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from stenograph.bench.guided_grammar import (
    PROFILE_SCHEMA,
    Constraint,
    of_choices,
    of_ebnf,
    of_json_object,
    of_regex,
    of_schema,
)
from stenograph.bench.guided_prompts import Prompts, built_in, read_prompts
from stenograph.bench.guided_report import check_csv
from stenograph.bench.responsiveness import cached_model, count
from stenograph.core.settings import Settings
from stenograph.core.types import Grammar, SamplingParams
from stenograph.embedded.options import EmbeddedOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    model: Path
    constraint: Constraint
    prompts: Prompts
    options: argparse.Namespace

    def params(self, number: int, grammar: Grammar | None) -> SamplingParams:
        """How the reply to a prompt is drawn: but for the grammar the same, guided and free, in every round."""
        return SamplingParams(
            temperature=self.options.temperature,
            seed=self.options.seed + number,
            max_tokens=self.options.max_tokens,
            ignore_eos=self.options.ignore_eos,
            grammar=grammar,
        )

    def engine_options(self) -> EmbeddedOptions:
        """The engine as `serve` runs it, but that all that is asked at once is decoded at once."""
        defaults = Settings()
        max_batch = max(defaults.max_batch, self.options.concurrency)
        return EmbeddedOptions(
            threads=self.options.threads,
            max_batch=max_batch,
            kv_tokens=defaults.kv_tokens,
            step_tokens=max(defaults.step_tokens, 2 * max_batch),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", type=Path, metavar="FILE", help="a JSON Schema. Default: a built-in one.")
    grammar.add_argument("--json-object", action="store_true", help="any JSON object")
    grammar.add_argument("--regex", metavar="R", help="a regular expression that the whole reply matches")
    grammar.add_argument("--choice", metavar="a,b", help="one of these texts")
    grammar.add_argument("--ebnf", type=Path, metavar="FILE", help="a grammar in EBNF: root ::= …")
    parser.add_argument("--model", default="smollm2-135m", help="as of `serve`. Default: smollm2-135m.")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one a line, or a .jsonl. Default: built in.")
    parser.add_argument("--num-prompts", type=count, default=16, help="how many of them. Default: 16.")
    parser.add_argument("--concurrency", type=count, default=16, help="requests at once. Default: 16.")
    parser.add_argument("--max-tokens", type=count, default=96, help="the most that a reply has. Default: 96.")
    parser.add_argument("--ignore-eos", action="store_true", help="no reply ends before its grammar or max_tokens does")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy. Default: 0.7.")
    parser.add_argument("--seed", type=int, default=0, help="of replies and orders. Default: 0.")
    parser.add_argument("--repeats", type=count, default=5, help="rounds that are measured. Default: 5.")
    parser.add_argument("--warm-up", type=_count_or_none, default=1, help="rounds before them. Default: 1.")
    parser.add_argument("--threads", type=count, default=1, help="BLAS threads of the engine. Default: 1.")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-guided.json"), metavar="FILE.json", help="the artifact's place"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="append a row of medians")


def read_plan(options: argparse.Namespace) -> Plan:
    """Everything that can be wrong before an engine runs. Raises ValueError, OSError, StartupError."""
    constraint = _constraint(options)
    prompts = built_in(options.num_prompts)
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, options.num_prompts)
    if options.csv is not None:
        check_csv(options.csv)
    plan = Plan(model=cached_model(options.model), constraint=constraint, prompts=prompts, options=options)
    plan.params(0, None)
    return plan


def _constraint(options: argparse.Namespace) -> Constraint:
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


def _count_or_none(text: str) -> int:
    """An option's value of at least 0."""
    return 0 if text == "0" else count(text)
