"""Sessions of any messages, hostile ones too, with the models' own files: a bridge writes what a full render does."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.messages import Message, Role, ToolCall
from stenograph.text.conversations import ARGUMENTS, ODD_ARGUMENTS, ODD_TEXT, WEATHER, result, said, user
from stenograph.text.renderer import Renderer

LoadReal = Callable[..., Any]
DEFAULT: dict[str, object] = {}
CASES = [
    ("qwen3", DEFAULT),
    ("qwen3", {"enable_thinking": False}),
    ("deepseek-v4", {"thinking": True}),
    *(
        pytest.param(name, kwargs, marks=pytest.mark.families)
        for name, kwargs in [
            ("qwen2.5", DEFAULT),
            ("qwq", DEFAULT),
            ("qwen3.5", DEFAULT),
            ("qwen3.5", {"enable_thinking": False}),
            ("qwen3.8", DEFAULT),
            ("qwen3-instruct-2507", DEFAULT),
            ("nemotron-3-nano", DEFAULT),
            ("nemotron-3-nano", {"enable_thinking": False}),
            ("deepseek-v3", DEFAULT),
            ("deepseek-v3.1", DEFAULT),
            ("deepseek-v3.1", {"thinking": True}),
            ("deepseek-v3.2", DEFAULT),
            ("deepseek-v3.2", {"thinking": True}),
            ("deepseek-v4", DEFAULT),
            ("deepseek-r1", DEFAULT),
            ("deepseek-r1-distill-llama", DEFAULT),
            ("deepseek-r1-0528", DEFAULT),
        ]
    ),
]
SPELLED = [
    "<|im_end|>\n<|im_start|>system\n",
    "<|im_start|>assistant\n<think>\n",
    "<think>",
    "</think>\n\n",
    "<tool_call>",
    "<tool_response>\n",
    "\n</tool_response>",
    "\n</｜DSML｜parameter>\n</｜DSML｜invoke>",
    "</tool_result>",
    "<｜User｜>",
    "<｜Assistant｜></think>",
    "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "{{ messages }}{% raw %}",
    "\ufdd0",
    "\ufdd01\ufdd0",
    "\x00\ufeff",
    "\n\n",
    ODD_TEXT,
]
TEXT = st.lists(
    st.sampled_from(SPELLED) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=3
).map("".join)
OBJECTS = [ARGUMENTS, ODD_ARGUMENTS, "{}", '{"a": "</tool_call>\\n<|im_end|>"}']
ONLY_OBJECTS = ("qwen3.5", "nemotron3")
"""Families whose templates raise at arguments that are no object."""
NAMES = st.sampled_from([WEATHER.name, "other", "a\n", "<tool_call>", '"', "<｜DSML｜"])
SYSTEM = st.builds(Message, role=st.sampled_from([Role.SYSTEM, Role.DEVELOPER]), content=TEXT)


@st.composite
def turns(
    draw: st.DrawFn, *, has_tools: bool, may_reason: bool, may_be_late: bool, arguments: Sequence[str]
) -> tuple[Message, list[Message]]:
    """A reply, and what is said until the next."""
    reasoning = draw(st.none() | TEXT.filter(bool)) if may_reason else None
    numbers = draw(st.lists(st.integers(1, 3), max_size=3)) if has_tools else []
    texts = st.sampled_from(arguments)
    calls = [ToolCall(id=f"callzq{number:03d}", name=draw(NAMES), arguments=draw(texts)) for number in numbers]
    others = st.builds(user, TEXT)
    if may_be_late:
        others |= SYSTEM
    if calls:
        others |= st.builds(result, st.sampled_from(calls), TEXT)
    others |= st.builds(said, TEXT)
    return said(draw(TEXT), *calls, reasoning=reasoning), draw(st.lists(others, min_size=1, max_size=3))


def written(
    renderer: Renderer, messages: Sequence[Message], has_tools: bool, kwargs: dict[str, object]
) -> "array[int]":
    """The ids of a conversation without a prompt after it."""
    tools = [WEATHER] if has_tools else []
    sealer = renderer.writer.sealer(messages, tools, kwargs)
    text = renderer.writer.text(sealer, messages, tools, kwargs, prompt=False)
    return renderer.tokenizer.encode_spans(sealer.open(text))


@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=str)
@given(data=st.data())
def test_a_session_of_any_messages_goes_on_as_a_full_render_of_them(
    real: LoadReal, name: str, kwargs: dict[str, object], data: st.DataObject
) -> None:
    renderer: Renderer = real(name).renderer
    family = renderer.family
    has_tools = bool(family.shows_tools) and data.draw(st.booleans())
    tools = [WEATHER] if has_tools else []
    may_be_late = Role.SYSTEM in (family.late_roles or ())
    arguments = OBJECTS if family.name in ONLY_OBJECTS else [*OBJECTS, "no JSON", '["a"]']
    messages = [*data.draw(st.lists(SYSTEM, max_size=1)), user(data.draw(TEXT))]
    line = renderer.render(messages, tools, kwargs)
    for _ in range(data.draw(st.integers(1, 3))):
        may_reason = kwargs != {"enable_thinking": False} and family.syntax.reasoning is not None
        may_reason = may_reason and (not name.startswith("deepseek-v") or bool(kwargs))
        reply, new = data.draw(
            turns(has_tools=has_tools, may_reason=may_reason, may_be_late=may_be_late, arguments=arguments)
        )
        whole = written(renderer, [*messages, reply], has_tools, kwargs)
        # By text: a reply's first token may have the prompt's last line break in it, as Qwen3's and R1's have.
        assert renderer.tokenizer.decode(whole).startswith(renderer.tokenizer.decode(line))
        bridge = renderer.bridge(whole[-8:], reply, new, tools, kwargs).ids
        messages += [reply, *new]
        line = renderer.render(messages, tools, kwargs)
        assert line == whole + bridge
