"""A file of rules, as data: `side.toml` is shipped, and an operator's own file stands in front of it.

A file has `[[rules]]` and `[[agent_ids]]`, and `[[drop]]` and `[[pin]]` (rewrite_rules.py). A rule has `name`,
`client`, `seen` (versions of the client), and either a `kind`, or a `header` with `kinds` (glob of its value → kind,
the first that matches). All conditions of `when` must hold:

- `header`: header name → glob; `json`: header name → (field of its JSON object → glob); `path`, `model`: globs
- `has_tools`, `schema`: whether tools are shown, whether a response schema is asked for
- `max_tokens`: the request's is at most this; `num_messages`: it has exactly as many; `stop`: one of its stop strings
- `system`, `first_user`, `last_user`: regular expressions, searched in the first 4,096 characters of the text

The system text is of the messages before the first one that is neither a system's nor a developer's, joined by a blank
line. A condition on a part missing from the request does not hold.
"""

import fnmatch
import functools
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from stenograph.core.kinds import Label, StrandKind
from stenograph.session.kinds import AgentIdFields, KindRule, KindRules, Name, WhenFields

SHIPPED_RULES = Path(__file__).with_name("side.toml").read_text(encoding="utf-8")
"""The rules shipped with the product, as TOML."""

_TEXTS = ("when.system", "when.first_user", "when.last_user")
"""The conditions on texts, in the order of a rule's numbers for them."""

_Fields = TypeVar("_Fields")


class BadSideRules(ValueError):
    """A file of rules is wrong: the rule (None: outside of all rules), the field, and the problem."""

    def __init__(self, *, rule: str | None, field: str, problem: str) -> None:
        super().__init__(f"side rules: {'' if rule is None else f'rule {rule!r}, '}{field}: {problem}")
        self.rule = rule
        self.field = field
        self.problem = problem


class RuleFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A rule, as it stands in a file."""

    name: Name
    client: Name
    kind: StrandKind | None = None
    header: Name | None = None
    kinds: dict[str, StrandKind] = {}
    when: WhenFields = WhenFields()
    seen: list[str] = []
    unshown: bool = False


class SideFileFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A file of rules. `drop` and `pin` are rewrite_rules.py's."""

    rules: list[dict[str, object]] = []
    agent_ids: list[dict[str, object]] = []
    drop: list[dict[str, object]] = []
    pin: list[dict[str, object]] = []


def read_kind_rules(*texts: str) -> KindRules:
    """Read TOML files, the first ones in front. A rule replaces those of its name in later files.

    Raises BadSideRules for any mistake in any of them.
    """
    rules: dict[str, KindRule] = {}
    agent_ids: list[AgentIdFields] = []
    for text in texts:
        file = file_of(text)
        own: dict[str, KindRule] = {}
        for index, fields in enumerate(file.rules):
            rule = _rule_of(fields, index)
            if rule.name in own:
                raise BadSideRules(rule=rule.name, field="name", problem="another rule of this file has it")
            own[rule.name] = rule
        rules = {**rules, **{name: rule for name, rule in own.items() if name not in rules}}
        agent_ids += [_agent_id_of(fields, index) for index, fields in enumerate(file.agent_ids)]
    return KindRules(tuple(rules.values()), agent_ids)


@functools.cache
def file_of(text: str) -> SideFileFields:
    """A file of rules, each table as it stands. Raises BadSideRules."""
    try:
        decoded = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSideRules(rule=None, field="the file", problem=f"it is not TOML: {error}") from error
    return converted(decoded, SideFileFields, None, "the file")


def converted(given: object, fields: type[_Fields], rule: str | None, place: str) -> _Fields:
    """A table of a file as its fields. Raises BadSideRules."""
    try:
        return msgspec.convert(given, fields)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        problem, _, path = str(error).partition(" - at `$")
        field = path.strip("`.")
        raise BadSideRules(rule=rule, field=field or place, problem=problem) from error


def _agent_id_of(given: Mapping[str, object], index: int) -> AgentIdFields:
    fields = converted(given, AgentIdFields, None, f"agent_ids[{index}]")
    unlike = None if fields.unlike is None else fields.unlike.lower()
    return msgspec.structs.replace(fields, header=fields.header.lower(), unlike=unlike)


def _rule_of(given: Mapping[str, object], index: int) -> KindRule:
    """A rule ready to be asked. Raises BadSideRules."""
    named = given.get("name")
    name = named if isinstance(named, str) else f"number {index + 1}"
    fields = converted(given, RuleFields, name, "the rule")
    _check(fields)
    when, header = fields.when, fields.header.lower() if fields.header is not None else None
    texts = enumerate((when.system, when.first_user, when.last_user))
    globs = tuple((key.lower(), _glob(text, name, f"when.header.{key}")) for key, text in when.header.items())
    in_json = tuple(_json_globs(when.json, name))
    labels = tuple(
        (_glob(value, name, f"kinds.{value}"), Label(kind=kind, client=fields.client, rule=name))
        for value, kind in fields.kinds.items()
    )
    names = [*(key for key, _ in globs), *(key for key, _, _ in in_json), *([] if header is None else [header])]
    path = None if when.path is None else _glob(when.path, name, "when.path")
    model = None if when.model is None else _glob(when.model, name, "when.model")
    return KindRule(
        name=name,
        client=fields.client,
        seen=tuple(fields.seen),
        unshown=fields.unshown,
        needs=frozenset(names),
        texts=tuple((place, regex_of(text, name, _TEXTS[place])) for place, text in texts if text is not None),
        globs=globs,
        fields=in_json,
        path=path,
        model=model,
        when=when,
        has_more=bool(globs or in_json or path or model or when.max_tokens or when.schema is not None),
        header=header,
        labels=labels,
        label=None if fields.kind is None else Label(kind=fields.kind, client=fields.client, rule=name),
    )


def _check(fields: RuleFields) -> None:
    """Check fields against each other. Raises BadSideRules."""
    by_header = fields.header is not None
    if (fields.kind is not None) == by_header:
        raise BadSideRules(rule=fields.name, field="kind", problem="a rule has either `kind`, or `header` and `kinds`")
    if by_header != bool(fields.kinds):
        raise BadSideRules(rule=fields.name, field="kinds", problem="`header` and `kinds` come together")
    if not by_header and fields.when == WhenFields():
        raise BadSideRules(rule=fields.name, field="when", problem="there is no condition, so it would always hold")


def _json_globs(given: Mapping[str, Mapping[str, str]], rule: str) -> Iterator[tuple[str, str, re.Pattern[str]]]:
    for header, fields in given.items():
        if not fields:
            raise BadSideRules(rule=rule, field=f"when.json.{header}", problem="it names no field")
        for field, text in fields.items():
            yield header.lower(), field, _glob(text, rule, f"when.json.{header}.{field}")


def _glob(text: str, rule: str, field: str) -> re.Pattern[str]:
    return regex_of(fnmatch.translate(text), rule, field)


def regex_of(text: str, rule: str, field: str) -> re.Pattern[str]:
    """A compiled expression. Raises BadSideRules, also for one with a meaning due to change in Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise BadSideRules(rule=rule, field=field, problem=f"no regular expression: {error}") from error
