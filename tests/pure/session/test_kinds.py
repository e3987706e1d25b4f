"""The rules of kinds: what they say of 482 recorded requests of real clients, of any request, and of wrong files."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.core.chat import ChatRequest, CompletionRequest
from stenograph.core.kinds import UNLABELLED, Label, StrandKind
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Grammar, GrammarKind, SamplingParams
from stenograph.session.kinds import SEARCHED_CHARS, Sighting
from stenograph.session.side_rules import SHIPPED_RULES, BadSideRules, read_kind_rules
from stenograph.trajectory.strand_facts import StrandSight, kinds_of

SHIPPED = read_kind_rules(SHIPPED_RULES)
CHAT = "/sessions/a/v1/chat/completions"


def chat(
    *messages: tuple[Role, str],
    headers: Mapping[str, str] | None = None,
    tools: tuple[str, ...] = (),
    model: str | None = None,
    path: str = CHAT,
    params: SamplingParams = SamplingParams(),
) -> Sighting:
    request = ChatRequest(
        messages=tuple(Message(role=role, content=text) for role, text in messages or [(Role.USER, "Hello")]),
        tools=tuple(Tool(name=name, json="{}") for name in tools),
        model=model,
        params=params,
    )
    return Sighting(headers=headers or {}, path=path, request=request)


def rule(when: str, kind: str = 'kind = "probe"', name: str = "own") -> str:
    return f"[[rules]]\nname = '{name}'\nclient = 'ours'\n{kind}\nwhen = {{ {when} }}\n"


def holds(when: str, sighting: Sighting) -> bool:
    return read_kind_rules(rule(when)).label(sighting).rule == "own"


# The recordings: all requests of all recorded clients, trimmed to what rules look at.

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("side_requests.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """`times` requests of a recording that are alike after trimming."""

    recording: str
    client: str
    times: int
    sighting: Sighting


def as_sent(request: Mapping[str, Any]) -> Sighting:
    """A recorded request as its dialect would read it; what stands between the texts is empty replies."""
    texts, num = RECORDED["texts"], request["num_messages"]
    system = [(Role.SYSTEM, texts[request["system"]])] if "system" in request else []
    users = [(Role.USER, texts[request[name]]) for name in ("first_user", "last_user") if name in request]
    head = system + users[:1]
    tail = users[1:] if num > len(head) else []
    between = [(Role.ASSISTANT, "")] * (num - len(head) - len(tail))
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source="{}") if "schema" in request else None
    stop = tuple(request.get("stop", ()))
    return chat(
        *head,
        *between,
        *tail,
        headers=request.get("headers"),
        tools=tuple(RECORDED["tools"][request["tools"]]),
        model=request.get("model"),
        path=request["path"],
        params=SamplingParams(max_tokens=request.get("max_tokens"), stop=stop, grammar=grammar),
    )


def recorded() -> Iterator[Recorded]:
    for recording in RECORDED["recordings"]:
        for request in recording["requests"]:
            yield Recorded(
                recording=recording["name"],
                client=recording["client"],
                times=request["times"],
                sighting=as_sent(request),
            )


ALL = list(recorded())


def test_the_recordings_are_whole() -> None:
    assert len(RECORDED["recordings"]) == 137
    assert sum(one.times for one in ALL) == 482
    for recording in RECORDED["recordings"]:
        for request in recording["requests"]:
            chat_request = as_sent(request).request
            assert isinstance(chat_request, ChatRequest)
            assert len(chat_request.messages) == request["num_messages"]


def test_each_rule_holds_for_its_client_s_requests_and_no_others() -> None:
    said = Counter[tuple[str | None, str | None, str]]()
    for one in ALL:
        label = SHIPPED.label(one.sighting)
        client = "" if label == UNLABELLED else one.client.rpartition(" ")[0]
        said[label.rule, label.kind, client] += one.times
    assert said == {
        ("cc-compact", "compaction", "Claude Code"): 1,
        ("cc-title", "title", "Claude Code"): 2,
        ("oc-title", "title", "opencode"): 12,
        ("oc-summary", "compaction", "opencode"): 9,
        ("gm-router", "router", "Gemini CLI"): 1,
        ("in-probe", "probe", "inspect-ai"): 2,
        ("sm-plan", "planner", "smolagents"): 3,
        (None, None, ""): 452,
    }


def test_a_shipped_rule_was_recorded_or_says_that_it_was_not() -> None:
    held = {SHIPPED.label(one.sighting).rule for one in ALL}
    assert {rule.name for rule in SHIPPED.rules if not rule.unshown} == held - {None}
    assert all(rule.seen for rule in SHIPPED.rules)
    assert all(place.seen for place in SHIPPED.agent_ids)


def test_no_recorded_client_had_an_agent_of_its_own() -> None:
    assert {SHIPPED.agent_id(one.sighting.headers) for one in ALL} == {""}
    assert any("thread-id" in one.sighting.headers for one in ALL)


# The rules that no recording shows.


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-claude-code-request-class": "main"}, ("cc-class", "main")),
        ({"x-claude-code-request-class": "subagent", "x-claude-code-agent-id": "a"}, ("cc-class", "agent")),
        ({"x-claude-code-request-class": "workflow"}, ("cc-class", "agent")),
        ({"x-claude-code-request-class": "compaction"}, ("cc-class", "compaction")),
        ({"x-claude-code-request-class": "auxiliary"}, ("cc-class", "auxiliary")),
        ({"x-claude-code-request-class": "new", "x-claude-code-agent-id": "a"}, ("cc-agent", "agent")),
        ({"x-claude-code-request-class": "new"}, (None, None)),
        ({"x-claude-code-agent-id": "a"}, ("cc-agent", "agent")),
        ({"x-claude-code-agent-id": ""}, (None, None)),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, ("cx-kind", "compaction")),
        ({"x-codex-turn-metadata": '{"request_kind": "turn"}'}, (None, None)),
        ({"x-codex-turn-metadata": '{"request_kind": ["compaction"]}'}, (None, None)),
        ({"x-codex-turn-metadata": '["request_kind"]'}, (None, None)),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"'}, (None, None)),
        ({"x-codex-turn-metadata": "[" * 10_000}, (None, None)),
        ({"x-codex-turn-metadata": '{"a":' * 3_000}, (None, None)),
        ({"x-codex-turn-metadata": "\ud800"}, (None, None)),
        ({"x-openai-subagent": "compact"}, ("cx-agent", "compaction")),
        ({"x-openai-subagent": "memory_consolidation"}, ("cx-agent", "auxiliary")),
        ({"x-openai-subagent": "review"}, ("cx-agent", "agent")),
        ({"x-openai-subagent": ""}, (None, None)),
    ],
)
def test_headers_say_the_kind(headers: dict[str, str], expected: tuple[str | None, str | None]) -> None:
    label = SHIPPED.label(chat(headers=headers))
    assert (label.rule, label.kind) == expected


def test_the_billing_line_of_a_sub_agent_says_so_at_the_beginning_of_the_system_text_alone() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.330.1; cc_is_subagent=true;"
    assert SHIPPED.label(chat((Role.SYSTEM, line), (Role.USER, "a"), tools=("b",))).rule == "cc-agent-billing"
    assert SHIPPED.label(chat((Role.SYSTEM, f"Say {line}"), (Role.USER, "a"))) == UNLABELLED
    assert SHIPPED.label(chat((Role.USER, line))) == UNLABELLED


def test_a_sub_agent_s_compaction_is_a_compaction() -> None:
    asks = (Role.USER, "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.")
    assert SHIPPED.label(chat(asks, headers={"x-claude-code-agent-id": "a"})).kind is StrandKind.COMPACTION


def test_a_client_that_quotes_another_is_not_taken_for_it() -> None:
    for text in ("Why `You are a title generator`?", "Say Please say 'hello, world'", "<end_plan>", "quota"):
        assert SHIPPED.label(chat((Role.SYSTEM, text), (Role.USER, text))) == UNLABELLED


# Agent ids.


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, ""),
        ({"x-claude-code-agent-id": "a1"}, "a1"),
        ({"session-id": "s", "thread-id": "s"}, ""),
        ({"session-id": "s", "thread-id": "t"}, "t"),
        ({"thread-id": "t"}, ""),
        ({"session-id": "s"}, ""),
        ({"session-id": "s", "thread-id": ""}, ""),
    ],
)
def test_an_agent_id_is_the_client_s_own(headers: dict[str, str], expected: str) -> None:
    assert SHIPPED.agent_id(headers) == expected


def test_only_headers_that_rules_or_agent_ids_name_are_wanted() -> None:
    assert SHIPPED.headers == {
        "session-id",
        "thread-id",
        "x-claude-code-agent-id",
        "x-claude-code-request-class",
        "x-codex-turn-metadata",
        "x-openai-subagent",
    }


# Conditions.

SCHEMA = SamplingParams(grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, source="{}"))


@pytest.mark.parametrize(
    ("when", "right", "wrong"),
    [
        ("header = {X-A = 'b*'}", chat(headers={"x-a": "bc"}), chat(headers={"x-a": "cb"})),
        ("header = {x-a = '*'}", chat(headers={"x-a": ""}), chat(headers={"x-b": ""})),
        ("json = {x = {k = 'a?'}}", chat(headers={"x": '{"k":"ab"}'}), chat(headers={"x": '{"k":"a"}'})),
        ("path = '*/chat/*'", chat(), chat(path="/v1/responses")),
        ("model = 'haiku-*'", chat(model="haiku-4"), chat(model="opus")),
        ("model = '*'", chat(model=""), chat()),
        ("model = '*'", chat(model="a" * SEARCHED_CHARS), chat(model="a" * SEARCHED_CHARS + "a")),
        ("has_tools = true", chat(tools=("a",)), chat()),
        ("has_tools = false", chat(), chat(tools=("a",))),
        ("max_tokens = 8", chat(params=SamplingParams(max_tokens=8)), chat(params=SamplingParams(max_tokens=9))),
        ("max_tokens = 8", chat(params=SamplingParams(max_tokens=1)), chat()),
        ("num_messages = 1", chat(), chat((Role.USER, "a"), (Role.USER, "b"))),
        ("stop = 'x'", chat(params=SamplingParams(stop=("y", "x"))), chat(params=SamplingParams(stop=("xx",)))),
        ("schema = true", chat(params=SCHEMA), chat()),
        ("schema = false", chat(), chat(params=SCHEMA)),
        ("system = 'a.c'", chat((Role.DEVELOPER, "xabc")), chat((Role.USER, "abc"))),
        ("system = 'a'", chat((Role.SYSTEM, "b"), (Role.SYSTEM, "a")), chat((Role.USER, "b"), (Role.SYSTEM, "a"))),
        ("system = 'a\\n\\nb'", chat((Role.SYSTEM, "a"), (Role.DEVELOPER, "b")), chat((Role.SYSTEM, "ab"))),
        ("system = 'a'", chat((Role.SYSTEM, "b" * 4095 + "a")), chat((Role.SYSTEM, "b" * 4096 + "a"))),
        ("first_user = 'a'", chat((Role.USER, "a"), (Role.USER, "b")), chat((Role.USER, "b"), (Role.USER, "a"))),
        ("last_user = 'a'", chat((Role.USER, "b"), (Role.USER, "a")), chat((Role.USER, "a"), (Role.USER, "b"))),
        ("last_user = ''", chat(), chat((Role.SYSTEM, "a"))),
        ("model = 'a', has_tools = true", chat(model="a", tools=("b",)), chat(model="a")),
    ],
)
def test_a_rule_holds_where_its_conditions_do(when: str, right: Sighting, wrong: Sighting) -> None:
    assert holds(when, right)
    assert not holds(when, wrong)


def test_a_completion_has_neither_messages_nor_tools() -> None:
    completion = Sighting(headers={}, path="/v1/completions", request=CompletionRequest(prompts=("<end_plan>",)))
    assert holds("has_tools = false", completion)
    assert not any(holds(f"{name} = ''", completion) for name in ("system", "first_user", "last_user"))
    assert SHIPPED.label(completion) == UNLABELLED


def test_the_first_rule_that_holds_says_the_kind() -> None:
    first, second = rule("has_tools = false"), rule("model = 'a'", 'kind = "echo"', name="second")
    assert read_kind_rules(first + second).label(chat(model="a")).rule == "own"
    assert read_kind_rules(second, first).label(chat(model="a")) == Label(
        kind=StrandKind.ECHO, client="ours", rule="second"
    )


def test_an_operator_s_rules_stand_in_front_and_replace_those_of_their_names() -> None:
    title = chat((Role.SYSTEM, "You are a title generator."), (Role.USER, "a"))
    assert SHIPPED.label(title).rule == "oc-title"
    assert read_kind_rules(rule("has_tools = false"), SHIPPED_RULES).label(title).rule == "own"
    replaced = read_kind_rules(rule("model = 'a'", name="oc-title"), SHIPPED_RULES)
    assert replaced.label(title) == UNLABELLED
    assert len(replaced.rules) == len(SHIPPED.rules)


# Files that are wrong.


@pytest.mark.parametrize(
    ("text", "name", "field"),
    [
        ("[[rules", None, "the file"),
        ("a = 1", None, "the file"),
        ("rules = 1", None, "rules"),
        ("rules = [1]", None, "rules[0]"),
        ("[[rules]]\nclient = 'a'", "number 1", "the rule"),
        ("[[rules]]\nname = 'a'", "a", "the rule"),
        ("[[rules]]\nname = 1\nclient = 'a'", "number 1", "name"),
        ("[[agent_ids]]\nclient = 'a'", None, "agent_ids[0]"),
        (rule("hat = 'a'"), "own", "when"),
        (rule("path = 1"), "own", "when.path"),
        (rule("system = '('"), "own", "when.system"),
        (rule("first_user = 'a{99999999999}'"), "own", "when.first_user"),
        (rule("last_user = '[[a]'"), "own", "when.last_user"),
        (rule("max_tokens = 0"), "own", "when.max_tokens"),
        (rule("json = {a = {}}"), "own", "when.json.a"),
        (rule(""), "own", "when"),
        (rule("header = {}"), "own", "when"),
        (rule("path = '*'", "kind = 'boss'"), "own", "kind"),
        (rule("path = '*'", "kind = 'main'\nhat = 1"), "own", "the rule"),
        (rule("path = '*'", ""), "own", "kind"),
        (rule("path = '*'", "kind = 'main'\nheader = 'a'\nkinds = {a = 'main'}"), "own", "kind"),
        (rule("path = '*'", "header = 'a'"), "own", "kinds"),
        (rule("path = '*'", "kind = 'main'\nkinds = {a = 'main'}"), "own", "kinds"),
        (rule("path = 'a'") + rule("path = 'b'"), "own", "name"),
    ],
)
def test_a_wrong_file_says_which_rule_and_field(text: str, name: str | None, field: str) -> None:
    with pytest.raises(BadSideRules, match=re.escape(field)) as caught:
        read_kind_rules(text, SHIPPED_RULES)
    assert (caught.value.rule, caught.value.field) == (name, field)
    assert str(caught.value).startswith("side rules: ")


def test_what_is_not_applied_is_refused() -> None:
    with pytest.raises(BadSideRules, match="rewrite"):
        read_kind_rules("[[rewrite]]\nname = 'a'\n")


# Whatever comes.

texts = st.text(max_size=40) | st.sampled_from(["\ud800", "[", '{"request_kind":', "a" * 5000, "\\", "compact"])
conditions = st.sampled_from(["path", "model", "system", "first_user", "last_user", "stop", "hat", "max_tokens"])
values = texts.map(json.dumps) | st.sampled_from(["1", "-1", "true", "{a = '('}", "[]", "9" * 5000, "1979-05-27"])
own_rules = st.lists(st.tuples(conditions, values), max_size=3).map(lambda w: rule(", ".join(map(" = ".join, w))))


@given(text=texts | own_rules)
@settings(max_examples=300)
def test_any_file_is_read_or_refused(text: str) -> None:
    try:
        rules = read_kind_rules(text, SHIPPED_RULES)
    except BadSideRules:
        return
    assert rules.label(chat()).rule in {None, "own"}


@given(
    headers=st.dictionaries(st.sampled_from(sorted(SHIPPED.headers)), texts),
    messages=st.lists(st.tuples(st.sampled_from(Role), texts), min_size=1, max_size=5),
    tools=st.lists(st.just("a"), max_size=1),
    model=st.none() | texts,
    path=texts,
)
def test_any_request_is_labelled(
    headers: dict[str, str], messages: list[tuple[Role, str]], tools: list[str], model: str | None, path: str
) -> None:
    sighting = chat(*messages, headers=headers, tools=tuple(tools), model=model, path=path)
    label = SHIPPED.label(sighting)
    assert label == UNLABELLED or label.rule in {rule.name for rule in SHIPPED.rules}
    assert SHIPPED.agent_id(headers) in {"", *headers.values()}


# The cost of a request that no rule knows.


def num_python_calls(work: Callable[[], object]) -> int:
    """Number of Python functions that are called within `work`, itself not counted."""
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return len(calls) - 1


@pytest.mark.parametrize("tools", [(), ("bash",)])
def test_a_plain_chat_costs_few_calls(tools: tuple[str, ...]) -> None:
    request = chat((Role.SYSTEM, "Be brief."), (Role.USER, "Hello"), tools=tools).request
    assert num_python_calls(lambda: SHIPPED.label(Sighting(headers={}, path=CHAT, request=request))) == 2
    assert num_python_calls(lambda: SHIPPED.agent_id({})) == 1


# What no rule says.


@pytest.mark.parametrize(
    ("strands", "expected"),
    [
        ([], []),
        ([(None, False, 1)], ["main"]),
        ([(None, True, 1), (None, False, 5)], ["main", "auxiliary"]),
        ([(None, False, 1), (None, True, 0)], ["auxiliary", "main"]),
        ([(None, True, 1), (None, True, 3), (None, True, 2)], ["unknown", "main", "unknown"]),
        ([(None, False, 2), (None, False, 2)], ["main", "unknown"]),
        ([("agent", True, 9), (None, True, 1), (None, True, 1)], ["agent", "main", "unknown"]),
        ([("title", False, 1), (None, False, 1)], ["title", "main"]),
        ([("agent", True, 1), (None, False, 4)], ["agent", "auxiliary"]),
        ([("main", True, 1), (None, True, 9), ("main", True, 1)], ["main", "unknown", "main"]),
        ([("agent", True, 1), ("agent", True, 1)], ["agent", "agent"]),
    ],
)
def test_strands_that_no_rule_names_are_told_apart(
    strands: list[tuple[str | None, bool, int]], expected: list[str]
) -> None:
    seen = [
        StrandSight(kind=None if kind is None else StrandKind(kind), shows_tools=tools, num_turns=turns)
        for kind, tools, turns in strands
    ]
    assert list(kinds_of(seen)) == expected
