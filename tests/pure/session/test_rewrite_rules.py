"""The rules that drop and pin: what the shipped ones find in their own clients' texts alone, and wrong files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.session.rewrite_rules import RewriteRules, UnknownRewrite
from stenograph.session.side_rules import SHIPPED_RULES, BadSideRules, read_kind_rules
from stenograph.trajectory.canonical import DropRule, PinPlace, PinRule

SHIPPED = RewriteRules.read(SHIPPED_RULES)
NAMES = [one.rule.name for one in SHIPPED.rules]
BY_NAME = {one.rule.name: one.rule for one in SHIPPED.rules}

# A text of each client in the form that it was recorded in, and what a rule finds there.
CLAUDE_USER = (
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# currentDate\n"
    "Today's date is 2026-11-21.\n\n      IMPORTANT: it may not be relevant.\n</system-reminder>\n\nList the files."
)
CLAUDE_SYSTEM = (
    "You are a Claude agent.\n\ngitStatus: This is the git status at the start of the conversation. It will not be"
    " updated.\n\nCurrent branch: main\n\nStatus:\n(clean)\n\nRecent commits:\n1a2b3c4 first"
)
CODEX_USER = (
    "<environment_context>\n  <cwd>/workspace</cwd>\n  <shell>bash</shell>\n"
    "  <current_date>2026-11-21</current_date>\n</environment_context>"
)
GEMINI_USER = (
    "<session_context>\nThis is the Gemini CLI. We are setting up the context for our chat.\nToday's date is Saturday,"
    " November 21, 2026 (formatted according to the user's locale).\nMy operating system is: linux\n"
    "The project's temporary directory is: /home/me/.gemini/tmp/5f\n- **Workspace Directories:**\n</session_context>"
)
FOUND = [
    ("cc-date", CLAUDE_USER, "Today's date is 2026-11-21"),
    ("cc-gitstatus", CLAUDE_SYSTEM, CLAUDE_SYSTEM.partition("\n\n")[2]),
    ("cx-date", CODEX_USER, "<current_date>2026-11-21</current_date>"),
    ("cx-cwd", CODEX_USER, "<cwd>/workspace</cwd>"),
    (
        "gm-date",
        GEMINI_USER,
        "Today's date is Saturday, November 21, 2026 (formatted according to the user's locale)",
    ),
    ("gm-tempdir", GEMINI_USER, "The project's temporary directory is: /home/me/.gemini/tmp/5f"),
]
RECORDED = json.loads(Path(__file__).with_name("side_requests.json").read_text(encoding="utf-8"))
"""What rules look at of 482 recorded requests of 17 clients."""


def found_by(rule: PinRule, text: str) -> list[str]:
    if rule.pattern is None or (rule.begins is not None and rule.begins.match(text) is None):
        return []
    return [match[0] for match in rule.pattern.finditer(text)]


def recorded_texts(place: PinPlace) -> Iterator[tuple[str, str]]:
    """The client and the text of each recorded request that has one at a place."""
    for recording in RECORDED["recordings"]:
        for request in recording["requests"]:
            if place in request:
                yield recording["client"].rpartition(" ")[0], RECORDED["texts"][request[place]]


@pytest.mark.parametrize(("name", "text", "found"), FOUND, ids=[name for name, *_ in FOUND])
def test_a_pin_finds_what_it_is_for_in_its_clients_text_alone(name: str, text: str, found: str) -> None:
    rule = BY_NAME[name]
    assert isinstance(rule, PinRule)
    assert found_by(rule, text) == [found]
    client = name.partition("-")[0]
    others = {text for other, text, _ in FOUND if not other.startswith(client)}
    assert all(found_by(rule, other) == [] for other in others)
    quoted = f"What does this mean?\n{text}"
    assert found_by(rule, quoted) == ([] if rule.begins is not None else [found])


def test_no_pin_finds_anything_in_a_recorded_request_of_another_client() -> None:
    clients: dict[str, set[str]] = {}
    for one in SHIPPED.rules:
        if isinstance(one.rule, PinRule) and one.rule.pattern is not None:
            for client, text in recorded_texts(one.rule.place):
                if found_by(one.rule, text):
                    clients.setdefault(one.rule.name, set()).add(client)
    assert clients == {
        "cc-date": {"Claude Code"},
        "cx-date": {"Codex CLI"},
        "cx-cwd": {"Codex CLI"},
        "gm-date": {"Gemini CLI"},
    }


def test_the_billing_line_is_found_in_every_recorded_request_of_claude_code_and_in_no_others() -> None:
    rule = BY_NAME["cc-billing"]
    assert isinstance(rule, DropRule)
    clients = [(client, rule.block.match(text) is not None) for client, text in recorded_texts(PinPlace.SYSTEM)]
    assert {client for client, is_found in clients if is_found} == {"Claude Code"}
    assert all(is_found for client, is_found in clients if client == "Claude Code")


def test_what_is_on_by_default_drops_and_each_rule_says_whose_it_is() -> None:
    assert [one.rule.name for one in SHIPPED.rules if one.is_default] == ["cc-billing"]
    assert all(one.seen and one.client for one in SHIPPED.rules)
    shown = {name for name, *_ in FOUND} | {"cc-billing", "cc-tool-text"}
    assert set(NAMES) == shown
    assert {one.rule.name for one in SHIPPED.rules if one.unshown} == {"cc-gitstatus"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("default", ["cc-billing"]),
        ("off", []),
        ("cc-date", ["cc-billing", "cc-date"]),
        ("cx-cwd, cc-date", ["cc-billing", "cc-date", "cx-cwd"]),
        ("cc-billing", ["cc-billing"]),
    ],
)
def test_names_add_to_the_default(choice: str, names: list[str]) -> None:
    chosen = SHIPPED.chosen(choice)
    assert [rule.name for rule in (*chosen.drops, *chosen.pins)] == names


@pytest.mark.parametrize("choice", ["cc-dates", "", "off,cc-date", "cc-date,", "x" * 1000])
def test_a_name_that_no_rule_has_is_refused(choice: str) -> None:
    with pytest.raises(UnknownRewrite, match="known are default, off, cc-billing, cc-date") as caught:
        SHIPPED.chosen(choice)
    assert len(str(caught.value)) < 400


def test_an_operators_rule_stands_in_front_and_replaces_one_of_its_name() -> None:
    own = """
    [[drop]]
    name = "cc-billing"
    client = "ours"
    block = "secret"
    num_blocks = 1
    [[pin]]
    name = "ours"
    client = "ours"
    place = "system"
    match = "run \\\\d+"
    default = true
    """
    rules = RewriteRules.read(own, SHIPPED_RULES)
    chosen = rules.chosen("default")
    assert [rule.name for rule in chosen.pins] == ["ours"]
    assert chosen.drops == (), "the rule in its place is not on by default"
    assert [rule.block.pattern for rule in rules.chosen("cc-billing").drops] == ["secret"]


DROP = "[[drop]]\nname = 'a'\nclient = 'ours'\n"
PIN = "[[pin]]\nname = 'a'\nclient = 'ours'\n"


@pytest.mark.parametrize(
    ("text", "name", "field"),
    [
        (DROP, "a", "block"),
        (DROP + "block = 'x'", "a", "num_blocks"),
        (DROP + "block = 'x'\nnum_blocks = 0", "a", "num_blocks"),
        (DROP + "block = '('\nnum_blocks = 1", "a", "block"),
        (DROP + "block = 'x'\nnum_blocks = 1\nhat = 1", "a", "hat"),
        (DROP.replace("'a'", "'off'") + "block = 'x'\nnum_blocks = 1", "off", "name"),
        (DROP.replace("'a'", "'a,b'") + "block = 'x'\nnum_blocks = 1", "a,b", "name"),
        (PIN + "place = 'moon'\nmatch = 'x'", "a", "place"),
        (PIN + "place = 'system'", "a", "match"),
        (PIN + "place = 'tool_text'\nmatch = 'x'", "a", "match"),
        (PIN + "place = 'tool_text'\nbegins = 'x'", "a", "begins"),
        (PIN + "place = 'system'\nmatch = 'x*'", "a", "match"),
        (PIN + "place = 'system'\nmatch = 'x'\nbegins = '['", "a", "begins"),
        ((PIN + "place = 'system'\nmatch = 'x'\n") * 2, "a", "name"),
        (PIN + "place = 'tool_text'\n" + DROP + "block = 'x'\nnum_blocks = 1", "a", "name"),
        ("[[drop]]\nclient = 'ours'", "number 1", "name"),
        ("[[rewrite]]\nname = 'a'", None, "rewrite"),
    ],
)
def test_a_wrong_file_says_which_rule_and_field(text: str, name: str | None, field: str) -> None:
    with pytest.raises(BadSideRules, match=re.escape(field)) as caught:
        RewriteRules.read(text, SHIPPED_RULES)
    assert caught.value.rule == name
    assert str(caught.value).startswith("side rules: ")


def test_rules_of_both_kinds_stand_in_one_file() -> None:
    text = PIN + "place = 'tool_text'\n[[rules]]\nname = 'r'\nclient = 'c'\nkind = 'main'\nwhen = {model = 'm'}\n"
    assert [one.rule.name for one in RewriteRules.read(text).rules] == ["a"]
    assert [rule.name for rule in read_kind_rules(text).rules] == ["r"]


VALUES = st.sampled_from(["'x'", "'('", "1", "-1", "true", "[]", "{}", "'tool_text'", "'system'", "''", "9" * 5000])
FIELDS = st.sampled_from(
    ["name", "client", "block", "num_blocks", "place", "begins", "match", "default", "seen", "hat"]
)


@given(st.sampled_from(["drop", "pin"]), st.dictionaries(FIELDS, VALUES))
def test_any_file_is_read_or_refused(table: str, fields: dict[str, str]) -> None:
    text = f"[[{table}]]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())
    try:
        rules = RewriteRules.read(text, SHIPPED_RULES)
    except BadSideRules:
        return
    assert len(rules.rules) in (len(NAMES), len(NAMES) + 1)
