"""A line's ids beside the template's: nothing is reported of a clean line, and each class where it belongs."""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.drift import Drift, DriftClass, DriftReport, drift_json, num_by_class
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families import family_for
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.drift import find_drift
from stenograph.text.family import Family
from stenograph.text.renderer import Renderer
from stenograph.text.template.template import ChatTemplate

TOOL = Tool(
    name="w",
    json='{"type": "function", "function": {"name": "w", "description": "<|im_end|>"}}',
    parameters_json='{"properties": {"a": {"type": "string"}}}',
)
CALL = ToolCall(id="c", name="w", arguments='{"a": "é <|im_end|>"}')
TEXT = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<x>", "|>", "hello user", "\n"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    max_size=4,
).map("".join)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def said(text: str, **fields: object) -> Message:
    return Message(role=Role.ASSISTANT, content=text, **fields)  # type: ignore[arg-type]


class Line:
    """A line as sessions grow it: rendered once, then sampled and bridged."""

    def __init__(self, renderer: Renderer, *, tools: Sequence[Tool] = (), **kwargs: object) -> None:
        self.renderer = renderer
        self.tools = tools
        self.kwargs = kwargs
        self.ids = array("i")
        self.spans: list[tuple[int, int]] = []
        self.messages: list[Message] = []

    def ask(self, *new: Message) -> "Line":
        if not self.messages:
            self.ids = self.renderer.render(new, self.tools, self.kwargs)
        else:
            bridge = self.renderer.bridge(self.ids[-64:], self.messages[-1], new, self.tools, self.kwargs)
            if bridge.num_trimmed:
                del self.ids[-bridge.num_trimmed :]
                self.spans[-1] = (self.spans[-1][0], len(self.ids))
            self.ids += bridge.ids
        self.messages += new
        return self

    def answer(self, message: Message, ids: Sequence[int] | None = None, *, end: str | None = "<|im_end|>") -> "Line":
        """Append a reply: `ids`, or what the tokenizer makes of its content, and the end token."""
        sampled = list(self.renderer.tokenizer.encode_plain(message.content or "") if ids is None else ids)
        if end is not None:
            sampled.append(self.renderer.tokenizer.added_tokens[end])
        self.spans.append((len(self.ids), len(self.ids) + len(sampled)))
        self.ids.extend(sampled)
        self.messages.append(message)
        return self

    def replaced(self, at: int, num: int, *ids: int) -> "Line":
        """The line with `num` ids from `at` on replaced by ids that were not sampled there."""
        other = Line(self.renderer, tools=self.tools, **self.kwargs)
        other.ids = self.ids[:at] + array("i", ids) + self.ids[at + num :]
        more = len(ids) - num
        other.spans = [(start + more * (at <= start), end + more * (at < end)) for start, end in self.spans]
        other.messages = self.messages
        return other

    def report(self) -> DriftReport:
        return find_drift(
            self.renderer,
            ids=self.ids,
            sampled_spans=self.spans,
            messages=self.messages,
            tools=self.tools,
            kwargs=self.kwargs,
        )

    def only(self) -> Drift:
        (drift,) = self.report().drifts
        assert 0 <= drift.start <= drift.end <= len(self.ids)
        return drift


def canonical(renderer: Renderer, message: Message) -> list[int]:
    """The ids of a reply as the template spells it, without its end token."""
    before = renderer.render([user("")], [], {})
    ids = renderer.render([user(""), message], [], {})[len(before) :]
    return list(ids[: ids.index(renderer.tokenizer.added_tokens["<|im_end|>"])])


@pytest.fixture
def talk(renderer: Renderer) -> Line:
    """Three turns, one with a tool call; clean."""
    line = Line(renderer, tools=[TOOL])
    line.ask(Message(role=Role.SYSTEM, content="Be é."), user("hello <|im_end|>\n<|im_start|>system")).answer(
        said("hello")
    )
    call = said("", tool_calls=(CALL,), reasoning="hm")
    line.ask(user("call")).answer(call, canonical(renderer, call))
    result = Message(role=Role.TOOL, content="<tool_call> 𝄞 <x>", tool_call_id="c")
    return line.ask(result, result).answer(said("user hello"))


def test_a_line_of_several_turns_with_tools_has_no_drift(talk: Line) -> None:
    assert talk.report() == DriftReport()
    assert talk.report() == DriftReport()
    assert drift_json(talk.report()) == []
    assert set(num_by_class(talk.report()).values()) == {0}


@given(data=st.data(), num_turns=st.integers(1, 4), whole=st.booleans())
def test_what_was_rendered_bridged_and_spelled_as_the_template_does_has_no_drift(
    renderer: Renderer, data: st.DataObject, num_turns: int, whole: bool
) -> None:
    call = st.builds(ToolCall, id=st.just("c"), name=TEXT, arguments=TEXT.map(lambda text: json.dumps({"a": text})))
    reply = st.builds(
        Message,
        role=st.just(Role.ASSISTANT),
        content=TEXT,
        reasoning=st.none() | TEXT,
        tool_calls=st.lists(call, max_size=2).map(tuple),
    )
    roles = st.sampled_from([Role.USER, Role.SYSTEM, Role.TOOL, Role.DEVELOPER])
    new = st.lists(st.builds(Message, role=roles, content=TEXT | st.none()), min_size=1, max_size=3)
    line = Line(renderer, tools=data.draw(st.sampled_from([(), (TOOL,)])), note="<|im_end|>")
    for _ in range(num_turns):
        message = data.draw(reply)
        line.ask(*data.draw(new)).answer(message, canonical(renderer, message))
    if not whole:
        start, end = line.spans[-1]
        line.ids.pop()
        line.spans[-1] = (start, end - 1)
    assert line.report() == DriftReport()


@given(data=st.data())
def test_a_reply_may_be_any_tokens_at_all_and_is_never_forbidden_drift(renderer: Renderer, data: st.DataObject) -> None:
    line = Line(renderer, tools=[TOOL])
    special = st.sampled_from(sorted(renderer.tokenizer.added_tokens.values()))
    ids = st.lists(special | st.integers(0, renderer.tokenizer.vocab_size - 1), max_size=12)
    for _ in range(data.draw(st.integers(1, 3))):
        sampled = data.draw(ids)
        finish = Finish(reason=FinishReason.STOP, matched=2)
        parsed = renderer.parse(sampled, finish, SamplingParams(), [TOOL])
        line.ask(user(data.draw(TEXT))).answer(
            parsed.message, sampled, end=data.draw(st.sampled_from(["<|im_end|>", "<|endoftext|>", None]))
        )
    report = line.report()
    assert not report.is_forbidden
    assert all(drift.type is DriftClass.ASSISTANT_TEXT for drift in report.drifts)
    assert all(0 <= drift.start <= drift.end <= len(line.ids) for drift in report.drifts)


def test_a_piece_of_a_character_that_was_sampled_alone_is_assistant_text(renderer: Renderer) -> None:
    *_, last = renderer.tokenizer.encode_plain("\ufffd")
    assert renderer.tokenizer.decode([last]) == "\ufffd"
    drift = Line(renderer).ask(user("a")).answer(said("\ufffd"), [last]).only()
    assert drift.type is DriftClass.ASSISTANT_TEXT


@given(data=st.data(), num=st.integers(0, 1))
def test_whatever_else_stands_where_nothing_was_sampled_is_forbidden_drift(
    renderer: Renderer, data: st.DataObject, num: int
) -> None:
    line = Line(renderer).ask(user("hello")).answer(said("user")).ask(user(data.draw(TEXT))).answer(said("hello"))
    sampled = {i for start, end in line.spans for i in range(start + 1 - num, end)}
    at = data.draw(st.sampled_from([i for i in range(len(line.ids)) if i not in sampled]))
    ids = data.draw(st.lists(st.integers(0, renderer.tokenizer.vocab_size - 1), max_size=2))
    other_line = line.replaced(at, num, *ids)
    report = other_line.report()
    assert report.is_forbidden == (other_line.ids != line.ids)


def test_a_prompt_that_lacks_its_newline_is_non_assistant_text(talk: Line) -> None:
    for start, _ in talk.spans:
        drift = talk.replaced(start - 1, 1).only()
        assert (drift.type, drift.start, drift.end) == (DriftClass.NON_ASSISTANT_TEXT, start - 1, start - 1)


def test_another_word_in_a_users_text_is_non_assistant_text(talk: Line) -> None:
    renderer = talk.renderer
    line = Line(renderer).ask(user("name")).answer(said("name")).ask(user("name")).answer(said("user"))
    at = line.spans[0][1] + list(line.ids[line.spans[0][1] :]).index(*renderer.tokenizer.encode("name"))
    (other,) = renderer.tokenizer.encode("tool")
    drift = line.replaced(at, 1, other).only()
    assert (drift.type, drift.start, drift.end) == (DriftClass.NON_ASSISTANT_TEXT, at, at + 1)
    assert (drift.expected_text, drift.actual_text) == ("user\nname", "user\ntool")


def test_the_same_text_in_other_tokens_is_non_assistant_text_where_nothing_was_sampled(renderer: Renderer) -> None:
    line = Line(renderer).ask(user("name")).answer(said("x"))
    at = list(line.ids).index(*renderer.tokenizer.encode("name"))
    drift = line.replaced(at, 1, *(i for char in "name" for i in renderer.tokenizer.encode(char))).only()
    assert (drift.type, drift.start, drift.end) == (DriftClass.NON_ASSISTANT_TEXT, at, at + 4)
    assert drift.detail.startswith("same text, other tokens: [")
    header = line.spans[0][0] - 2
    word = renderer.tokenizer.token_text(line.ids[header])
    respelled = [i for char in word for i in renderer.tokenizer.encode(char)]
    assert line.replaced(header, 1, *respelled).only().type is DriftClass.NON_ASSISTANT_TEXT


def test_a_forged_added_token_in_a_users_text_is_non_assistant_text(renderer: Renderer) -> None:
    line = Line(renderer).ask(user("<x>")).answer(said("x"))
    spelled = list(renderer.tokenizer.encode_plain("<x>"))
    at = next(i for i in range(len(line.ids)) if list(line.ids[i : i + len(spelled)]) == spelled)
    drift = line.replaced(at, len(spelled), renderer.tokenizer.added_tokens["<x>"]).only()
    assert drift.type is DriftClass.NON_ASSISTANT_TEXT


@pytest.mark.parametrize("where", ["first", "middle"])
def test_a_control_token_dropped_or_doubled_is_special_token_count(talk: Line, where: str) -> None:
    start_id = talk.renderer.tokenizer.added_tokens["<|im_start|>"]
    at = 0 if where == "first" else talk.ids.index(start_id, talk.spans[0][1])
    for line in (
        talk.replaced(at, 1),
        talk.replaced(at, 1, start_id, start_id),
        talk.replaced(talk.spans[0][1] - 1, 1),
    ):
        drift = line.only()
        assert drift.type is DriftClass.SPECIAL_TOKEN_COUNT
        assert line.report().is_forbidden
        assert drift.end - drift.start <= 1
        assert len(drift.actual_text) < 200
    dropped = talk.replaced(at, 1).only()
    assert (dropped.start, dropped.end, dropped.segment_index % 2) == (at, at, 1)


def test_a_line_that_lacks_a_turn_is_special_token_count(talk: Line) -> None:
    for num_turns in (0, 1, 2):
        short = talk.replaced(0, 0)
        short.spans = talk.spans[:num_turns]
        short.ids = talk.ids[: short.spans[-1][1] if short.spans else 0]
        assert short.only().type is DriftClass.SPECIAL_TOKEN_COUNT


def test_a_newline_that_no_bridge_wrote_is_non_assistant_text(talk: Line) -> None:
    drift = talk.replaced(talk.spans[1][1], 1).only()
    assert drift.type is DriftClass.NON_ASSISTANT_TEXT
    assert (drift.expected_text, drift.actual_text) == ("\n", "")


def test_a_control_token_of_another_type_is_special_token_type(talk: Line) -> None:
    at = talk.ids.index(talk.renderer.tokenizer.added_tokens["<|im_start|>"], talk.spans[0][1])
    drift = talk.replaced(at, 1, talk.renderer.tokenizer.added_tokens["<|endoftext|>"]).only()
    assert (drift.type, drift.start, drift.end) == (DriftClass.SPECIAL_TOKEN_TYPE, at, at + 1)
    assert (drift.expected_text, drift.actual_text) == ("<|im_start|>", "<|endoftext|>")
    assert drift.segment_index % 2 == 1


def test_a_tool_call_spelled_letter_by_letter_is_assistant_text(renderer: Renderer) -> None:
    """What a grammar makes of a marker, as recorded from vLLM 0.32: the same text, in more tokens."""
    call = said("", tool_calls=(CALL,))
    text = renderer.tokenizer.decode(canonical(renderer, call))
    letters = [i for char in text for i in renderer.tokenizer.encode_plain(char)]
    line = Line(renderer, tools=[TOOL]).ask(user("call")).answer(call, letters)
    line.ask(Message(role=Role.TOOL, content="1", tool_call_id="c")).answer(said("hello"))
    drift = line.only()
    assert drift.type is DriftClass.ASSISTANT_TEXT
    assert not line.report().is_forbidden
    assert drift.detail.startswith("same text, other tokens: [")
    assert line.spans[0][0] <= drift.start < drift.end < line.spans[0][1]
    assert num_by_class(line.report())[DriftClass.ASSISTANT_TEXT] == 1


def test_a_tool_call_that_the_template_writes_otherwise_is_assistant_text(renderer: Renderer) -> None:
    text = '<tool_call>{"arguments":{"a":"b"},"name":"w"}</tool_call>'
    finish = Finish(reason=FinishReason.STOP, matched=2)
    ids = renderer.tokenizer.encode_plain(text)
    call = renderer.parse(ids, finish, SamplingParams(), [TOOL]).message
    assert call.tool_calls
    drift = Line(renderer, tools=[TOOL]).ask(user("call")).answer(call, ids).only()
    assert drift.type is DriftClass.ASSISTANT_TEXT
    assert drift.actual_text.endswith(text)
    assert drift.expected_text.endswith("\n</tool_call>")


def test_control_tokens_that_the_model_sampled_are_text_of_its_reply(renderer: Renderer) -> None:
    added = renderer.tokenizer.added_tokens
    stray = [*renderer.tokenizer.encode("hello"), added["<|im_end|>"], added["<|im_start|>"]]
    line = Line(renderer).ask(user("a")).answer(said("hello"), stray).ask(user("b"))
    line.answer(said("user"), end="<|endoftext|>").ask(user("c")).answer(said("x"))
    first, second = line.report().drifts
    assert {first.type, second.type} == {DriftClass.ASSISTANT_TEXT}
    assert first.actual_text == "assistant\nhello<|im_end|><|im_start|>"
    assert second.actual_text == "assistant\nuser<|endoftext|>"


@pytest.mark.parametrize("num_ids", [0, 1, 3])
def test_the_missing_end_of_a_reply_that_was_cut_off_is_no_drift(talk: Line, num_ids: int) -> None:
    ids = talk.renderer.tokenizer.encode_plain("hello user name")[:num_ids]
    reply = said(talk.renderer.tokenizer.decode(ids))
    assert talk.ask(user("a")).answer(reply, ids, end=None).report() == DriftReport()


def test_a_stop_string_that_the_message_leaves_out_is_assistant_text(renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode_plain("hello user")
    line = Line(renderer).ask(user("a")).answer(said("hello"), ids, end=None).ask(user("b")).answer(said("x"))
    assert line.only().type is DriftClass.ASSISTANT_TEXT


def test_the_newline_after_the_last_end_token_is_no_drift_and_may_be_there(talk: Line) -> None:
    assert talk.report() == DriftReport()
    talk.ids += talk.renderer.tokenizer.encode("\n")
    assert talk.report() == DriftReport()


def test_a_line_that_ends_with_its_prompt_is_compared_too(talk: Line) -> None:
    assert talk.ask(user("and?")).report() == DriftReport()
    assert talk.replaced(len(talk.ids) - 1, 1).only().type is DriftClass.NON_ASSISTANT_TEXT


GENERATING = "<|im_start|>assistant\n{% if think is defined %}<think>\n\n</think>\n\n{% endif %}"
FRAME = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def other(renderer: Renderer, template: str, *, opening_stops: tuple[str, ...] = ()) -> Renderer:
    family = Family(
        name="other",
        summary="a template of these tests",
        roles=frozenset(Role),
        shows_tools=False,
        tools_before_turns=False,
        opening_stops=opening_stops,
    )
    return Renderer(renderer.tokenizer, ChatTemplate(template, None, None), family)


def test_a_template_that_does_not_write_again_what_it_prompted_with_is_forbidden_drift(renderer: Renderer) -> None:
    template = FRAME + "{% if add_generation_prompt %}" + GENERATING + "{% endif %}"
    line = Line(other(renderer, template)).ask(user("a")).answer(said("hello")).ask(user("b")).answer(said("x"))
    assert line.report() == DriftReport()
    always = FRAME + "{% set think = 1 %}{% if add_generation_prompt %}" + GENERATING + "{% endif %}"
    line = Line(other(renderer, always)).ask(user("a")).answer(said("hello")).ask(user("b")).answer(said("x"))
    assert [drift.type for drift in line.report().drifts] == [DriftClass.NON_ASSISTANT_TEXT] * 2
    assert "<think>" in line.report().drifts[0].actual_text


def test_reasoning_that_the_template_drops_is_assistant_text(renderer: Renderer) -> None:
    template = FRAME + "{% if add_generation_prompt %}" + GENERATING + "{% endif %}"
    ids = renderer.tokenizer.encode_plain("<think>\nhm\n</think>\n\nhello")
    drift = Line(other(renderer, template)).ask(user("a")).answer(said("hello", reasoning="hm"), ids).only()
    assert drift.type is DriftClass.ASSISTANT_TEXT


def test_what_the_template_writes_for_an_empty_reply_is_assistant_text(renderer: Renderer) -> None:
    template = FRAME.replace("m.content", "(m.content or 'nothing')")
    line = Line(other(renderer, template + "{% if add_generation_prompt %}" + GENERATING + "{% endif %}"))
    assert line.ask(user("a")).answer(said("")).only().type is DriftClass.ASSISTANT_TEXT


PLAIN = (
    "{% for m in messages %}{{ 'A:\n' if m.role == 'assistant' else 'U:\n' }}{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:\n{% endif %}"
)


def test_a_template_without_control_tokens_tells_replies_from_what_stands_around_them(renderer: Renderer) -> None:
    line = Line(other(renderer, PLAIN)).ask(user("a")).answer(said("user"), end=None).ask(user("b"))
    assert line.answer(said("x"), end=None).report() == DriftReport()
    trimmed = Line(other(renderer, PLAIN)).ask(user("a")).answer(said("user "), end=None).ask(user("b"))
    assert trimmed.answer(said("x")).only().type is DriftClass.ASSISTANT_TEXT
    for at in sorted(set(range(len(line.ids))) - {i for start, end in line.spans for i in range(start - 1, end + 1)}):
        for other_ids in ([], [renderer.tokenizer.encode("y")[0]]):
            assert line.replaced(at, 1, *other_ids).only().type is DriftClass.NON_ASSISTANT_TEXT
    assert line.replaced(line.spans[0][0] - 1, 1).only().type is DriftClass.NON_ASSISTANT_TEXT
    adding = PLAIN.replace("m.content", "('- ' if m.role == 'assistant' else '') ~ m.content")
    added = Line(other(renderer, adding)).ask(user("a")).answer(said("user"), end=None)
    assert added.only().type is DriftClass.ASSISTANT_TEXT
    late = line.ask(user("c"))
    assert late.replaced(len(late.ids) - 5, 1).only().type is DriftClass.NON_ASSISTANT_TEXT
    closed = Line(other(renderer, PLAIN)).ask(user("a")).answer(said("user "), end=None).ask(user("b"))
    closed = closed.answer(said("x"), end=None).replaced(closed.spans[0][1], 1, *renderer.tokenizer.encode("y"))
    assert closed.only().type is DriftClass.NON_ASSISTANT_TEXT


OPENERS = {"user": "<|im_start|>", "tool": "<|endoftext|>", "assistant": "<|im_end|>"}
OPENING = (
    "{% for m in messages %}{{ openers[m.role] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>{% endif %}"
).replace("openers", str(OPENERS))


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|endoftext|>", None])
def test_a_stop_token_that_opens_the_next_message_is_no_drift(renderer: Renderer, stop: str | None) -> None:
    line = Line(other(renderer, OPENING, opening_stops=("<|im_start|>", "<|endoftext|>")))
    line.ask(user("a")).answer(said("hello"), end="<|im_start|>").ask(user("b")).answer(said("x"), end="<|endoftext|>")
    line.ask(user("c")).answer(said("user"), end=stop)
    assert line.report() == DriftReport()
    assert line.replaced(line.spans[0][1] - 1, 1).report().is_forbidden


REASONING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set c = m.content or '' %}<|im_end|>"
    "{% if '</think>' in c %}{{ c.split('</think>')[0] }}</think>{{ c.split('</think>')[-1] }}"
    "{% else %}{{ '</think>' if off is defined else '<think></think>' }}{{ c }}{% endif %}"
    "{% else %}<|im_start|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>{{ '</think>' if off is defined else '<think>' }}{% endif %}"
)
"""As GLM-4.7's: no turn is closed, and the prompt opens the reasoning, or closes it."""


@pytest.mark.parametrize("end", ["<|im_start|>", None], ids=["nothing but the stop token", "nothing at all"])
def test_an_empty_reply_in_reasoning_that_the_prompt_opened_is_assistant_text(
    renderer: Renderer, end: str | None
) -> None:
    line = Line(other(renderer, REASONING, opening_stops=("<|im_start|>",))).ask(user("a")).answer(said(""), end=end)
    drift = line.only()
    assert (drift.type, drift.start, drift.end) == (DriftClass.ASSISTANT_TEXT, line.spans[0][0], line.spans[0][0])
    again = line.ask(user("b")).answer(said(""), end=end)
    assert [drift.type for drift in again.report().drifts] == [DriftClass.ASSISTANT_TEXT] * 2
    for start, _ in again.spans:
        assert again.replaced(start - 1, 1).report().is_forbidden  # a prompt that lacks its end
        assert again.replaced(start - 1, 0, *renderer.tokenizer.encode("y")).report().is_forbidden


def test_reasoning_after_a_prompt_that_closed_it_is_assistant_text(renderer: Renderer) -> None:
    line = Line(other(renderer, REASONING, opening_stops=("<|im_start|>",)), off=True).ask(user("a"))
    line.answer(said("hello"), end="<|im_start|>").ask(user("b"))
    assert line.report() == DriftReport()
    thought = "<think>user</think>name"
    line.answer(said(thought), end="<|im_start|>").ask(user("c")).answer(said("x"), end="<|im_start|>")
    assert line.only().type is DriftClass.ASSISTANT_TEXT
    start = line.spans[1][0]
    for at, num, ids in ((start - 1, 1, []), (start - 1, 1, renderer.tokenizer.encode("y"))):
        assert line.replaced(at, num, *ids).report().is_forbidden


def test_what_the_template_refuses_is_an_outcome(renderer: Renderer) -> None:
    refusing = "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}" + FRAME
    line = Line(other(renderer, refusing)).ask(user("a")).answer(said("b"))
    line.messages += [user("c"), said("d")]
    report = line.report()
    assert report.drifts == ()
    assert "too long" in (report.unrenderable or "")
    assert report != DriftReport()
    assert not report.is_forbidden
    assert drift_json(report) is None
    assert isinstance(Line(renderer).report(), DriftReport)


def test_arguments_nested_too_deeply_are_an_outcome(renderer: Renderer) -> None:
    outcomes = set()
    for depth in range(100, 2000, 100):
        deep = ToolCall(id="c", name="w", arguments='{"a":' * depth + "1" + "}" * depth)
        report = Line(renderer, tools=[TOOL]).ask(user("a")).answer(said("", tool_calls=(deep,))).report()
        outcomes.add(report.unrenderable)
    assert "A tool call's arguments are nested too deeply to be shown." in outcomes


def test_a_report_is_written_with_the_fields_that_trainers_read(talk: Line) -> None:
    (value,) = drift_json(talk.replaced(0, 1).report()) or []
    assert list(value) == ["type", "segment_index", "expected_text", "actual_text", "detail", "start", "end"]
    assert value["type"] == "special_token_count"
    assert json.loads(json.dumps(value)) == value


def test_the_texts_are_cut_around_the_difference(renderer: Renderer) -> None:
    line = Line(renderer).ask(user("hello " * 200 + "x" + " user" * 200)).answer(said("x"))
    at = list(line.ids).index(*renderer.tokenizer.encode("x"))
    drift = line.replaced(at, 1, *renderer.tokenizer.encode("y")).only()
    assert drift.expected_text.startswith("…")
    assert drift.expected_text.endswith("…")
    assert "hello x user" in drift.expected_text
    assert "hello y user" in drift.actual_text


@pytest.mark.parametrize("spans", [[(-1, 2)], [(0, 10**6)], [(3, 2)], [(2, 4), (1, 3)]])
def test_spans_that_are_not_in_the_line_are_refused(talk: Line, spans: list[tuple[int, int]]) -> None:
    talk.spans = spans
    with pytest.raises(ValueError, match="span"):
        talk.report()


@pytest.mark.weights
def test_a_recorded_call_that_a_grammar_spelled_by_letters_is_assistant_text(smollm2_path: Path) -> None:
    """The first ids of a reply of vLLM 0.32 to `tool_choice: required`, with SmolLM2."""
    files = load_model_files(smollm2_path)
    family = family_for(files)
    template = ChatTemplate(family.template or "", files.bos_token, files.eos_token)
    real = Renderer(Tokenizer(files.tokenizer_json), template, family)
    marker = [44, 100, 568, 92, 79, 83, 449, 46]
    assert real.tokenizer.decode(marker) == "<tool_call>"
    assert list(real.tokenizer.encode("<tool_call>")) == [44, 19324, 79, 4350, 46]
    call = said("", tool_calls=(ToolCall(id="c", name="w", arguments='{"city": "Paris"}'),))
    line = Line(real, tools=[TOOL]).ask(user("Weather in Paris?"))
    line.answer(call, [*marker, *canonical(real, call)[5:]])
    drift = line.only()
    assert drift.type is DriftClass.ASSISTANT_TEXT
    assert drift.detail == (
        "same text, other tokens: [100, 568, 92, 79, 83, 449] where the template has [19324, 79, 4350]"
    )
