"""Our template engine writes what jinja2 writes, set up as transformers sets it up."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stenograph.core.errors import UnrenderableMessage
from stenograph.families.chatml import DEFAULT_SYSTEM, chatml_template
from stenograph.text.template.template import ChatTemplate
from stenograph.text.template.template import to_json as our_to_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["<b>&'\"</b>", "{{ x }}", "{% if %}", "<|im_end|>", "\r\n", " \n", "\x00", "\u2028", "é𝄞"]
)
KEYS = TEXT | st.sampled_from(["items", "keys", "get", "name"])  # names that a mapping has methods of
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def call_of(name: str, arguments: dict[str, object]) -> dict[str, object]:
    spelled = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": arguments, "arguments_json": spelled}
    return {"id": "c", "type": "function", "function": function}


CALLS = st.lists(st.builds(call_of, TEXT, st.dictionaries(KEYS, JSON, max_size=2)), max_size=3)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user"]), "content": TEXT | st.none()}
) | st.one_of(
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "tool_call_id": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT | st.none()},
        optional={"reasoning_content": TEXT, "tool_calls": CALLS | st.none()},
    ),
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": st.dictionaries(KEYS, JSON, max_size=3)}),
    max_size=2,
)


def raise_exception(message: str) -> None:
    raise UnrenderableMessage(message)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def as_transformers(source: str, **context: object) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source).render(**context)


@pytest.mark.parametrize("default_system", [DEFAULT_SYSTEM, ""])
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=5),
    tools=st.none() | TOOLS,
    prompt=st.booleans(),
)
def test_the_familys_template_reads_alike_in_both_engines(
    default_system: str, messages: list[dict[str, object]], tools: list[object] | None, prompt: bool
) -> None:
    source = chatml_template(default_system)
    expected = as_transformers(source, messages=messages, tools=tools, add_generation_prompt=prompt)
    assert ChatTemplate(source, None, None).render(messages, tools, prompt, {}) == expected


def test_every_part_of_the_familys_template_is_written() -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call_of("f", {"é": [1, None]})]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    source = chatml_template("s")
    text = ChatTemplate(source, None, None).render(messages, [{"<": "é"}], True, {})
    assert text == as_transformers(source, messages=messages, tools=[{"<": "é"}], add_generation_prompt=True)
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\ns\n\n")
    assert '<tools>\n{"<": "é"}\n</tools>' in system
    assert rest == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\nr\n</think>\n\na\n"
        '<tool_call>\n{"name": "f", "arguments": {"é": [1, null]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def is_whole_float(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


@given(
    value=JSON.filter(lambda value: not is_whole_float(value)),
    ensure_ascii=st.booleans(),
    indent=st.none() | st.integers(0, 4),
    separators=st.none() | st.sampled_from([(",", ":"), (", ", ": "), ("|", "=")]),
    sort_keys=st.booleans(),
)
def test_tojson_is_json_dumps_whatever_it_is_told(
    value: object, ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> None:
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    source = (
        "{{ value | tojson(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys) }}"
    )
    text = ChatTemplate(source, None, None).render([], None, False, {"value": value, **options})
    assert text == to_json(value, ensure_ascii, indent, separators, sort_keys)
    assert ChatTemplate("{{ value | tojson }}", None, None).render([], None, False, {"value": value}) == to_json(value)


def test_tojson_of_many_lists_makes_no_text_of_each() -> None:
    value = {"a": [[1]] * 100_000}
    expected = to_json(value)
    tracemalloc.start()
    try:
        assert our_to_json(value) == expected
        assert tracemalloc.get_traced_memory()[1] < 4 * len(expected)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [{"a": [1e16, 1e-7, 1.5]}, ["1e16"], [2**70], {"a": ("b", [])}])
def test_tojson_writes_numbers_as_json_dumps_does(value: object) -> None:
    assert our_to_json(value) == to_json(value)


@pytest.mark.xfail(reason="the template engine hands a bare whole float to a filter as an integer")
def test_tojson_keeps_the_point_of_a_bare_whole_float() -> None:
    assert ChatTemplate("{{ value | tojson }}", None, None).render([], None, False, {"value": 1.0}) == "1.0"


def test_tojson_keeps_the_point_of_a_whole_float_inside_a_value() -> None:
    value = {"a": 1.0, "b": [-0.0, 1e16]}
    assert ChatTemplate("{{ value | tojson }}", None, None).render([], None, False, {"value": value}) == to_json(value)


def test_tojson_takes_options_that_the_template_spells() -> None:
    value = {"b": ["<é>", 1.0], "a": None}
    source = "{{ value | tojson(indent=2, separators=(',', ': '), sort_keys=true) }}{{ value | tojson(true) }}"
    ours = ChatTemplate(source, None, None).render([], None, False, {"value": value})
    assert ours == to_json(value, indent=2, separators=(",", ": "), sort_keys=True) + to_json(value, True)
    assert ours == as_transformers(source, value=value)


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.content[1:] }}{% endfor %}{{ messages[-1]['role'] }}",
        "{% for m in messages %}\n    {% if loop.first %}\n  a\n    {% endif %}\n{{ m.role }}\n{% endfor %}\n",
        "{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}{{ messages[1].content.strip() }}",
        "{{ messages[0].content.startswith('<think>') }}{{ messages[0].content.rstrip('l') }}{{ 'a' ~ 1 ~ 1.0 }}",
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0] | items | list | length }}",
        "{{ tools is defined }}{{ tools is none }}{{ nothing is defined }}{{ messages is iterable }}",
        "{{ messages[0].content is string }}{{ messages[0] is mapping }}",
        "{{ messages | map(attribute='role') | join(',') }}",
        "{{ messages[0].get('none', 'x') }}{{ messages[0].nothing or 'y' }}{{ nothing }}{{ none }}{{ true }}",
        "{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content | replace('l', 'L') | upper }}",
        "{% macro m(x, y='d') %}[{{ x }}{{ y }}]{% endmacro %}{{ m('<b>') }}{{ m(1, y=2) }}{{- ' z' -}} ",
        "{{ 'a' if 'think' in messages[0].content and not tools else 'b' }}{{ '%s-%d' | format('x', 3) }}",
        "{# comment #}\n  {#- another -#}\n  x{{ messages | tojson(indent=4) }}",
    ],
)
def test_what_templates_in_the_wild_write_reads_alike_in_both_engines(source: str) -> None:
    messages = [
        {"role": "user", "content": "<think>\nno</think>\n\nhell"},
        {"role": "assistant", "content": "  b\t"},
        {"role": "tool", "content": "c"},
    ]
    expected = as_transformers(source, messages=messages, tools=None, add_generation_prompt=True)
    assert ChatTemplate(source, None, None).render(messages, None, True, {}) == expected


def test_a_templates_refusal_is_its_own_words_in_both_engines() -> None:
    source = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first, not ' ~ messages[0].role) }}{% endif %}"
    )
    messages = [{"role": "tool"}]
    with pytest.raises(UnrenderableMessage, match="user first, not tool"):
        as_transformers(source, messages=messages)
    with pytest.raises(UnrenderableMessage, match=r"user first, not tool\Z"):
        ChatTemplate(source, None, None).render(messages, None, False, {})
