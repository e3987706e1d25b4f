"""The kinds of requests and strands: rules label each request with one.

A rule only labels; it never decides whether a request is served. Knows no session and no dialect: a request is seen as
core's values, with the few headers named by a rule or an agent id. Rules are read from a file (side_rules.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import msgspec
from msgspec import Struct

from stenograph.core.chat import ChatRequest, CompletionRequest
from stenograph.core.kinds import UNLABELLED, Label
from stenograph.core.messages import Message, Role
from stenograph.core.types import GrammarKind

SEARCHED_CHARS = 4096
"""The part of a text shown to a regular expression, and the longest text matched by a glob."""

MAX_JSON_CHARS = 16384
"""The longest header read as JSON."""

SEARCHED_MESSAGES = 1024
"""Number of messages at either end, searched for the first and the last user message."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Sighting(Struct, frozen=True, kw_only=True, gc=False):
    """The parts of a request open to rules. `headers` has at least those of `KindRules.headers` in the request.

    Header names are in lower case. The request is the client's, before any rewrite.
    """

    headers: Mapping[str, str]
    path: str
    request: ChatRequest | CompletionRequest


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


class AgentIdFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The place of a client's agent id, as it stands in a file: a `header` with a value other than that of `unlike`."""

    client: Name
    header: Name
    unlike: Name | None = None
    seen: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRule:
    """A rule ready to be asked. `needs` has the headers necessary for it to hold.

    `texts` pairs an index (0 system, 1 first user, 2 last user message) with the pattern searched there; `globs` are of
    header values, `fields` of fields in a header's JSON. `labels` are by the value of `header`, where `header` is not
    None.
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
        """Whether the rarer conditions hold: all but texts, tools, stop strings and message counts."""
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
    """All rules in their order, and the places of agent ids. `headers` are the names looked at by any of them."""

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
        """By whether a request has a header of some rule, shows tools, and has a system text."""

    def __repr__(self) -> str:
        return f"<KindRules {len(self.rules)} rules, {len(self.agent_ids)} agent ids>"

    def label(self, sighting: Sighting) -> Label:
        """The label by the first rule to hold. Raises nothing, whatever came."""
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
        """The client's own id of the asking agent: a part of its conversation's opening; "" if it names none."""
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
    """A text in a header's JSON object; None if the header is none, or has no such text."""
    if len(value) > MAX_JSON_CHARS:
        return None
    try:
        decoded = msgspec.json.decode(value, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    found = decoded.get(field)
    return found if isinstance(found, str) else None
