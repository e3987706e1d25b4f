"""What a bridge keeps from turn to turn changes nothing but its cost."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.families import Family
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.renderer import Bridge, Renderer
from stenograph.text.template.choice import JinjaTemplate, choose_template
from stenograph.text.template.template import ChatTemplate
from stenograph.text.writer import LARGE_CHARS, MAX_FRAME_CHARS, MAX_FRAMES, Frame, FrameCache, FrameKey, Writer

SHOWING = Family(name="showing", summary="a template of these tests", roles=frozenset(Role), shows_tools=True)
TEMPLATE = (
    "{% set day = strftime_now('%d') %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ day }}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments_json }}{% endfor %}"
    "{% if message.role == 'assistant' %}{{ flag | string }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ flag | string }}assistant\n{% endif %}"
)
"""Writes the date and the tools before the turns, and its argument after each reply and in the prompt."""

TAIL = [1, 2, 3]
SAID = Message(role=Role.ASSISTANT, content="said")
CALLED = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="c", name="w", arguments='{"a": "<|im_end|>\ufdd1"}'),))
TOOLS = [
    Tool(name="w", json='{"description": "<|im_end|>"}', parameters_json="{}"),
    Tool(name="w", json='{"description": "\\ufdd0"}', parameters_json="{}"),
]
TEXTS = st.sampled_from(["", "hello", "<|im_end|>", "\ufdd0", "0\ufdd11\ufdd1", "<|im_start|>user"])
BRIDGES = st.tuples(
    st.sampled_from([SAID, CALLED]),
    st.lists(st.builds(Message, role=st.sampled_from([Role.USER, Role.SYSTEM]), content=TEXTS), max_size=2),
    st.lists(st.sampled_from(TOOLS), max_size=2),
    st.sampled_from([{}, {"flag": True}, {"flag": 1}, {"flag": 1.0}, {"flag": "<|im_end|>"}, {"flag": ["\ufdd0"]}]),
)


class Calendar:
    """A date that a template asks for once in each rendering."""

    def __init__(self) -> None:
        self.day = "1"
        self.times_asked = 0

    def __call__(self, _format: str) -> str:
        self.times_asked += 1
        return self.day


def renderer_of(tokenizer: Tokenizer, calendar: Calendar, source: str = TEMPLATE) -> Renderer:
    return Renderer(tokenizer, ChatTemplate(source, None, None, strftime_now=calendar), SHOWING)


@given(bridges=st.lists(BRIDGES, min_size=1, max_size=6), days=st.lists(st.sampled_from("12"), min_size=6, max_size=6))
def test_a_bridge_is_the_same_whatever_was_bridged_before(
    tokenizer: Tokenizer, bridges: list[tuple[Message, list[Message], list[Tool], dict[str, object]]], days: list[str]
) -> None:
    calendar = Calendar()
    used = renderer_of(tokenizer, calendar)
    for (reply, new, tools, kwargs), calendar.day in zip(bridges, days, strict=False):
        fresh = renderer_of(tokenizer, calendar)
        assert used.bridge(TAIL, reply, new, tools, kwargs) == fresh.bridge(TAIL, reply, new, tools, kwargs)


def test_a_turn_in_a_known_setting_is_rendered_once(tokenizer: Tokenizer) -> None:
    calendar = Calendar()
    renderer = renderer_of(tokenizer, calendar)

    def renderings(reply: Message, text: str, tools: Sequence[Tool] = TOOLS) -> int:
        before = calendar.times_asked
        renderer.bridge(TAIL, reply, [Message(role=Role.USER, content=text)], tools, {"flag": True})
        return calendar.times_asked - before

    called = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="c", name="w", arguments="{}"),))
    renderings(SAID, "first")
    renderings(SAID, "first with other tools", ())
    assert renderings(SAID, "second") == 1
    assert renderings(called, "third") == 2, "a result is rendered beside its calls"
    calendar.day = "2"
    assert renderings(SAID, "fourth") > 1
    renderings(SAID, "fifth")
    assert renderings(SAID, "sixth") == 1, "what was kept of the day before is forgotten"


def test_threads_that_share_a_renderer_bridge_as_one_alone(tokenizer: Tokenizer) -> None:
    shared, alone = (renderer_of(tokenizer, Calendar()) for _ in range(2))

    def bridge_all(renderer: Renderer) -> list[Bridge]:
        return [
            renderer.bridge(TAIL, SAID, [Message(role=Role.USER, content=f"{n}<|im_end|>")], [], {"flag": n % 100})
            for n in range(400)
        ]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(bridge_all, [shared] * 4)) == [bridge_all(alone)] * 4


def test_few_frames_are_kept_and_no_large_one(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(TEMPLATE, None, None, strftime_now=Calendar())
    cache = FrameCache(tokenizer, Writer(tokenizer, template, SHOWING))
    large = FrameKey(tools=(), kwargs={"flag": "x" * MAX_FRAME_CHARS})
    assert cache.get(large) is not cache.get(large)
    assert repr(cache) == f"<FrameCache 0 of {MAX_FRAMES}>"
    for n in range(MAX_FRAMES + 9):
        setting = FrameKey(tools=(), kwargs={"flag": n})
        assert cache.get(setting) is cache.get(setting)
    assert repr(cache) == f"<FrameCache {MAX_FRAMES} of {MAX_FRAMES}>"


def test_a_template_that_rewrites_earlier_turns_is_refused_each_time(tokenizer: Tokenizer) -> None:
    source = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    renderer = renderer_of(tokenizer, Calendar(), source)
    for _ in range(2):
        with pytest.raises(UnrenderableMessage, match="not append-only"):
            renderer.bridge(TAIL, SAID, [Message(role=Role.USER, content="b")], [], {})


class Watched(ChatTemplate):
    """The faster engine, which remembers the longest text that it wrote."""

    longest = 0

    def _written(self, context: Mapping[str, object]) -> str:
        text = super()._written(context)
        self.longest = max(self.longest, len(text))
        return text


def test_the_faster_engine_gets_no_large_conversation(tokenizer: Tokenizer) -> None:
    """It would hold the GIL for a copy in and another out. One engine writes both texts of a frame, if they differ."""
    source = TEMPLATE.replace("{{ flag | string }}", "{{ flag }}")  # true to minijinja, True to jinja2
    calendar = Calendar()
    jinja = JinjaTemplate(source, None, None, strftime_now=calendar)
    fast = Watched(source, None, None, strftime_now=calendar, for_large=jinja)
    writer, expected = (Writer(tokenizer, template, SHOWING) for template in (fast, jinja))
    arguments = '{"a": "' + "漢" * LARGE_CHARS + '"}'
    for large in (
        Message(role=Role.USER, content="漢" * (LARGE_CHARS + 1)),
        Message(role=Role.ASSISTANT, content="a", reasoning="漢" * LARGE_CHARS),
        Message(role=Role.ASSISTANT, content="a", tool_calls=(ToolCall(id="c", name="w", arguments=arguments),)),
    ):
        texts = [one.text(one.sealer(), [large], TOOLS, {"flag": True}, prompt=True) for one in (writer, expected)]
        assert texts[0] == texts[1]
        frames = [Frame(tokenizer, one, FrameKey(tools=(), kwargs={"flag": True})) for one in (writer, expected)]
        new = [frame.new_text(CALLED.tool_calls, [large]) for frame in frames]
        assert new[0] == new[1] is not None
    assert 0 < fast.longest < LARGE_CHARS


def test_a_template_of_the_faster_engine_has_jinja2_for_large_conversations(tokenizer: Tokenizer) -> None:
    source = TEMPLATE.replace("{% set day = strftime_now('%d') %}", "").replace("{{ day }}", "")
    chosen = choose_template(source, None, None, tokenizer=tokenizer, family=SHOWING).template
    assert type(chosen) is ChatTemplate
    assert isinstance(chosen.for_large, JinjaTemplate)
