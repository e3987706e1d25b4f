"""The kinds of requests and strands, and the rules that say which kind a request is of.

The rules are data: `side.toml` is shipped, and an operator's own file stands in front of it. A rule only labels; it
never decides whether a request is served. Knows no session and no dialect: a request is seen as core's values, with
the few headers that a rule or an agent id names.

A file has `[[rules]]` and `[[agent_ids]]`, and `[[drop]]` and `[[pin]]` (rewrite_rules.py). A rule has `name`,
`client`, `seen` (versions of the client), and either a `kind`, or a `header` with `kinds` (glob of its value → kind,
the first that matches). All conditions of `when` must hold:

- `header`: header name → glob; `json`: header name → (field of its JSON object → glob); `path`, `model`: globs
- `has_tools`, `schema`: whether tools are shown, whether a response schema is asked for
- `max_tokens`: the request's is at most this; `num_messages`: it has exactly as many; `stop`: one of its stop strings
- `system`, `first_user`, `last_user`: regular expressions, searched in the first 4,096 characters of the text

The system text is that of the messages before the first one that is neither a system's nor a developer's, joined by
a blank line. A condition on what a request does not have does not hold.
"""

import fnmatch
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Struct

from stenograph.core.chat import ChatRequest, CompletionRequest
from stenograph.core.kinds import UNLABELLED, Label, StrandKind
from stenograph.core.messages import Message, Role
from stenograph.core.types import GrammarKind

SHIPPED_RULES = Path(__file__).with_name("side.toml").read_text(encoding="utf-8")
"""The rules that come with the product, as TOML."""

SEARCHED_CHARS = 4096
"""The part of a text that a regular expression sees, and the longest text that a glob matches."""

MAX_JSON_CHARS = 16384
"""The longest header that is read as JSON."""

SEARCHED_MESSAGES = 1024
"""Number of messages at either end among which the first and the last user message are looked for."""

_TEXTS = ("when.system", "when.first_user", "when.last_user")
"""The conditions on texts, in the order of `_texts_of`."""

_Fields = TypeVar("_Fields")


class Sighting(Struct, frozen=True, kw_only=True, gc=False):
    """The parts of a request that a rule may look at. `headers` has at least those of `KindRules.headers` that came.

    Header names are in lower case. The request is the one that the client sent, before any rewrite.
    """

    headers: Mapping[str, str]
    path: str
    request: ChatRequest | CompletionRequest


class BadSideRules(ValueError):
    """A file of rules is wrong: in which rule (None: outside of all rules), in which field, and the problem."""

    def __init__(self, *, rule: str | None, field: str, problem: str) -> None:
        super().__init__(f"side rules: {'' if rule is None else f'rule {rule!r}, '}{field}: {problem}")
        self.rule = rule
        self.field = field
        self.problem = problem


class WhenFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The `when` of a rule, as it stands in a file."""

    header: dict[str, str] = {}
    json: dict[str, dict[str, str]] = {}
    path: str | None = None
    model: str | None = None
    has_tools: bool | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    num_messages: Annotated[int, msgspec.Meta(ge=1)] | None = None
    system: str | None = None
    first_user: str | None = None
    last_user: str | None = None
    stop: str | None = None
    schema: bool | None = None


Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


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


class AgentIdFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The place of a client's agent id, as it stands in a file: a `header` whose value is not that of `unlike`."""

    client: Name
    header: Name
    unlike: Name | None = None
    seen: list[str] = []


class SideFileFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A file of rules. `drop` and `pin` are rewrite_rules.py's."""

    rules: list[dict[str, object]] = []
    agent_ids: list[dict[str, object]] = []
    drop: list[dict[str, object]] = []
    pin: list[dict[str, object]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRule:
    """A rule that is ready to be asked. `needs` has the headers without which it does not hold.

    `texts` pairs an index (0 system, 1 first user, 2 last user message) with what is searched there; `globs` are of
    header values, `fields` of fields in a header's JSON. `labels` are by the value of `header`, where that is not None.
    """

    name: str
    client: str
    seen: tuple[str, ...]
    unshown: bool
    needs: frozenset[str]
    texts: tuple[tuple[int, re.Pattern[str]], ...]
    globs: tuple[tuple[str, re.Pattern[str]], ...]
    fields: tuple[tuple[str, str, re.Pattern[str]], ...]
    path: re.Pattern[str] | None
    model: re.Pattern[str] | None
    when: WhenFields
    has_more: bool
    header: str | None
    labels: tuple[tuple[re.Pattern[str], Label], ...]
    label: Label | None

    def more_holds(self, sighting: Sighting) -> bool:
        """Whether the conditions hold that few rules have: all but texts, tools, stop strings and message counts."""
        request, headers, when = sighting.request, sighting.headers, self.when
        limit, grammar = request.params.max_tokens, request.params.grammar
        asks_schema = grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
        return (
            (when.max_tokens is None or (limit is not None and limit <= when.max_tokens))
            and (when.schema is None or when.schema is asks_schema)
            and (self.path is None or _matches(self.path, sighting.path))
            and (self.model is None or (request.model is not None and _matches(self.model, request.model)))
            and all(_matches(glob, headers[name]) for name, glob in self.globs)
            and all(_matches(glob, _field_of(headers[name], field)) for name, field, glob in self.fields)
        )

    def label_by(self, value: str) -> Label | None:
        """The label for a value of the rule's header."""
        return next((label for glob, label in self.labels if _matches(glob, value)), None)


class KindRules:
    """All rules in their order, and the places of agent ids. `headers` are the names that any of them looks at."""

    def __init__(self, rules: Sequence[KindRule], agent_ids: Sequence[AgentIdFields]) -> None:
        self.rules = tuple(rules)
        self.agent_ids = tuple(agent_ids)
        ids = {name for place in agent_ids for name in (place.header, place.unlike) if name is not None}
        self.headers: frozenset[str] = frozenset(ids).union(*(rule.needs for rule in rules))
        self._candidates = {
            (headers, tools, system): tuple(
                rule
                for rule in rules
                if (headers or not rule.needs)
                and (rule.when.has_tools in (None, tools))
                and (system or rule.when.system is None)
            )
            for headers, tools, system in product((False, True), repeat=3)
        }
        """By whether a request has a header that a rule looks at, shows tools, and has a system text."""

    def __repr__(self) -> str:
        return f"<KindRules {len(self.rules)} rules, {len(self.agent_ids)} agent ids>"

    @classmethod
    def read(cls, *texts: str) -> "KindRules":
        """Read TOML files, those that come first in front. A rule replaces those of its name in later files.

        Raises BadSideRules for anything that is wrong in any of them.
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
        return cls(tuple(rules.values()), agent_ids)

    def label(self, sighting: Sighting) -> Label:
        """The label by the first rule that holds. Raises nothing, whatever came."""
        request, headers = sighting.request, sighting.headers
        messages = request.messages if isinstance(request, ChatRequest) else ()
        has_tools = isinstance(request, ChatRequest) and bool(request.tools)
        texts = _texts_of(messages)
        for rule in self._candidates[bool(headers), has_tools, texts[0] is not None]:
            when = rule.when
            if (
                (when.num_messages is not None and when.num_messages != len(messages))
                or (when.stop is not None and when.stop not in request.params.stop)
                or (rule.needs and not rule.needs <= headers.keys())
                or (rule.has_more and not rule.more_holds(sighting))
            ):
                continue
            for place, pattern in rule.texts:
                text = texts[place]
                if text is None or pattern.search(text, 0, SEARCHED_CHARS) is None:
                    break
            else:
                label = rule.label if rule.header is None else rule.label_by(headers[rule.header])
                if label is not None:
                    return label
        return UNLABELLED

    def agent_id(self, headers: Mapping[str, str]) -> str:
        """The client's own id of the agent that asks: a part of its conversation's opening; "" if it names none."""
        for place in self.agent_ids:
            value = headers.get(place.header, "")
            if value and (place.unlike is None or headers.get(place.unlike, value) != value):
                return value
        return ""


def _texts_of(messages: Sequence[Message]) -> tuple[str | None, str | None, str | None]:
    """The system text and those of the first and last user message; None where there is no such message."""
    system: list[str] = []
    num_chars = 0
    for message in messages:
        if message.role not in (Role.SYSTEM, Role.DEVELOPER) or num_chars > SEARCHED_CHARS:
            break
        system.append(message.content or "")
        num_chars += len(system[-1]) + 2
    first = last = None
    for message in messages[:SEARCHED_MESSAGES]:
        if message.role is Role.USER:
            first = message.content or ""
            break
    for message in reversed(messages[-SEARCHED_MESSAGES:]):
        if message.role is Role.USER:
            last = message.content or ""
            break
    return system[0] if len(system) == 1 else "\n\n".join(system) if system else None, first, last


def _matches(glob: re.Pattern[str], text: str | None) -> bool:
    return text is not None and len(text) <= SEARCHED_CHARS and glob.match(text) is not None


def _field_of(value: str, field: str) -> str | None:
    """A text in the JSON object that a header is; None if it is none, or has no such text."""
    if len(value) > MAX_JSON_CHARS:
        return None
    try:
        decoded = msgspec.json.decode(value, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    found = decoded.get(field)
    return found if isinstance(found, str) else None


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
    """A rule that is ready to be asked. Raises BadSideRules."""
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
    """Check what belongs together. Raises BadSideRules."""
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
    """A compiled expression. Raises BadSideRules, also for one that Python will read in another way some day."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise BadSideRules(rule=rule, field=field, problem=f"no regular expression: {error}") from error
