"""The part of BFCL's package (PyPI `bfcl-eval`) in a task: data, simulators, checks. In a process of its own.

The simulators evaluate calls as Python text, and keep their state among the package's globals. The check of single
turns imports a table of models, and with it every vendor's SDK, to know how a model spells a dot in a tool's name: here
the table has one row, for a model that writes an underscore.
"""

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

if "BFCL_PROJECT_ROOT" not in os.environ:  # the package makes folders for results when it is imported
    os.environ["BFCL_PROJECT_ROOT"] = tempfile.mkdtemp(prefix="bfcl-")

utils: Any = importlib.import_module("bfcl_eval.utils")
prompts: Any = importlib.import_module("bfcl_eval.constants.default_prompts")
enums: Any = importlib.import_module("bfcl_eval.constants.enums")
types: Mapping[str, str] = importlib.import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
simulators: Any = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
multi_turn: Any = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")

MODEL = "stenograph"
_models = ModuleType("bfcl_eval.constants.model_config")
_models.MODEL_CONFIG_MAPPING = {MODEL: SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
sys.modules.setdefault(_models.__name__, _models)
single_turn: Any = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")

Entry = Mapping[str, Any]


class BfclJudge:
    """The package, for one task at most."""

    def tasks(self, category: str, limit: int | None) -> list[tuple[Entry, object]]:
        """The entries of a category in the package's order, each with its truth: None where calling or not decides."""
        entries = cast("list[Entry]", utils.load_dataset_entry(category))[:limit]
        if "relevance" in category:
            return [(one, None) for one in entries]
        truths = {one["id"]: one["ground_truth"] for one in utils.load_ground_truth_entry(category)}
        return [(one, truths[one["id"]]) for one in entries]

    def rules(self) -> tuple[str, int]:
        """The words of a user who brings more functions, and the number of steps that a turn may take."""
        return prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC, prompts.MAXIMUM_STEP_LIMIT

    def tools(self, functions: Sequence[Entry]) -> list[dict[str, object]]:
        """The functions as a chat's tools."""
        return [
            {
                "type": "function",
                "function": {
                    "name": re.sub(r"\.", "_", one["name"]),
                    "description": one["description"],
                    "parameters": _schema(one["parameters"]),
                },
            }
            for one in functions
        ]

    def execute(self, entry: Entry, calls: Sequence[str]) -> list[str]:
        """Run calls in the simulators; their results as text."""
        results, _ = simulators.execute_multi_turn_func_call(
            list(calls),
            entry.get("initial_config", {}),
            entry["involved_classes"],
            MODEL,
            entry["id"],
            long_context="long_context" in entry["id"],
        )
        return cast("list[str]", results)

    def turns_are_right(self, entry: Entry, calls: Sequence[Sequence[Sequence[str]]], truth: object) -> bool:
        """The package's word on all turns of a task."""
        category = str(entry["id"]).rpartition("_")[0]
        return bool(multi_turn.multi_turn_checker(calls, truth, entry, category, MODEL)["valid"])

    def calls_are_right(self, entry: Entry, category: str, calls: Sequence[Entry], truth: object) -> bool:
        """The package's word on the calls of a single turn, each `{name: arguments}`."""
        if "relevance" in category:
            return bool(calls) != ("irrelevance" in category)
        python = enums.Language.PYTHON
        return bool(single_turn.ast_checker(entry["function"], list(calls), truth, python, category, MODEL)["valid"])


def _schema(schema: object) -> object:
    """A JSON Schema of the package's own: its types have other names."""
    if isinstance(schema, list):
        return [_schema(one) for one in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    found = {name: _schema(value) for name, value in cast("dict[str, object]", schema).items()}
    if isinstance(kind := found.get("type"), str):
        found["type"] = types.get(kind, "string")
    return found
