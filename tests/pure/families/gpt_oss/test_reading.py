"""What gpt-oss says is read as openai-harmony reads it, whatever it is; and a call can be forced."""

import json
from collections.abc import Sequence

import openai_harmony
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import ParsedReply, ParseProblem, ToolChoice, ToolMode
from stenograph.core.messages import Tool
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.embedded.grammar.llguidance import LlguidanceBackend
from stenograph.text.conversations import WEATHER
from stenograph.text.reading import PartKind, ReplyPart
from stenograph.text.renderer import Renderer

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
STOP = Finish(reason=FinishReason.STOP)
LENGTH = Finish(reason=FinishReason.LENGTH)
PARAMS = SamplingParams()


def read(
    renderer: Renderer, text: str, *, finish: Finish = STOP, tools: Sequence[Tool] = (WEATHER,)
) -> tuple[ParsedReply, tuple[ReplyPart, ...]]:
    return renderer.parse_tokens(renderer.tokenizer.encode(text), finish, PARAMS, tools)


def theirs_read(oracle: openai_harmony.HarmonyEncoding, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of the messages that openai-harmony reads."""
    ids = oracle.encode(text, allowed_special="all")
    said: dict[str, list[str]] = {"analysis": [], "final": []}
    calls: list[tuple[str, str]] = []
    for message in oracle.parse_messages_from_completion_tokens(ids, openai_harmony.Role.ASSISTANT):
        body = "".join(getattr(part, "text", "") for part in message.content)
        if message.recipient:
            calls.append((message.recipient.removeprefix("functions."), body))
        elif body:
            said["analysis" if message.channel == "analysis" else "final"].append(body)
    return "\n\n".join(said["analysis"]), "\n\n".join(said["final"]), calls


SPELLINGS = [
    "<|channel|>final<|message|>hello<|return|>",
    "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant<|channel|>final<|message|> hello<|return|>",
    " to=functions.w<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    " to=functions.w<|channel|>commentary json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.w <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.w<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.w <|constrain|>json<|message|>{"a": "é𝄞"}<|call|>',
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.w<|channel|>commentary"
    ' <|constrain|>json<|message|>{"a": 1}<|call|>',
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_reply_is_read_as_openai_harmony_reads_it(
    renderer: Renderer, oracle: openai_harmony.HarmonyEncoding, text: str
) -> None:
    parsed, _ = read(renderer, text)
    calls = [(one.name, one.arguments) for one in parsed.message.tool_calls]
    assert not parsed.faults
    assert (parsed.message.reasoning or "", parsed.message.content or "", calls) == theirs_read(oracle, text)


@pytest.mark.parametrize("mark", ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"])
def test_a_frame_that_was_cut_is_no_end(renderer: Renderer, mark: str) -> None:
    _, parts = read(renderer, f"<|channel|>final<|message|>a<|end|>{mark}", finish=LENGTH)
    assert [part.kind for part in parts] == [PartKind.CONTENT]


def test_the_stop_token_that_ended_a_reply_is_no_text(renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode("<|channel|>final<|message|>one two")
    params = SamplingParams(stop_token_ids=(ids[-1],))
    parsed, parts = renderer.parse_tokens(ids, Finish(reason=FinishReason.STOP, matched=ids[-1]), params, ())
    before, _ = renderer.parse_tokens(ids[:-1], LENGTH, PARAMS, ())
    went_on, _ = renderer.parse_tokens(ids, LENGTH, params, ())
    assert parsed.message.content == before.message.content
    assert (went_on.message.content, parts[-1].end) == ("one two", len(ids))


BODIES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
CALL_HEADERS = (
    " to=functions.w<|channel|>commentary <|constrain|>json",
    " to=functions.w<|channel|>analysis json",
    "<|channel|>commentary to=functions.w <|constrain|>json",
    "<|channel|>commentary to=functions.w",
)
ONES = st.one_of(
    st.builds("<|channel|>analysis<|message|>{}<|end|>".format, BODIES),
    st.builds("<|channel|>commentary<|message|>{}<|end|>".format, BODIES),
    st.builds("<|channel|>final<|message|>{}<|return|>".format, BODIES),
    st.builds(
        "{}<|message|>{}<|call|>".format,
        st.sampled_from(CALL_HEADERS),
        st.dictionaries(BODIES, BODIES, max_size=2).map(json.dumps),
    ),
)


@given(messages=st.lists(ONES, min_size=1, max_size=5))
def test_any_messages_of_a_reply_are_read_as_openai_harmony_reads_them(
    renderer: Renderer, oracle: openai_harmony.HarmonyEncoding, messages: list[str]
) -> None:
    text = "<|start|>assistant".join(messages)
    parsed, parts = read(renderer, text)
    calls = [(one.name, one.arguments) for one in parsed.message.tool_calls]
    assert not parsed.faults
    assert (parsed.message.reasoning or "", parsed.message.content or "", calls) == theirs_read(oracle, text)
    ids = renderer.tokenizer.encode(text)
    thought = "".join(renderer.tokenizer.decode(ids[p.start : p.end]) for p in parts if p.kind is PartKind.REASONING)
    assert thought.count("<|channel|>analysis<|message|>") == sum("analysis<|message|>" in one for one in messages)


def test_parts_are_told_apart_with_their_frames(renderer: Renderer) -> None:
    parsed, parts = read(renderer, SPELLINGS[6])
    assert [part.kind for part in parts] == [
        PartKind.REASONING,
        PartKind.CONTENT,
        PartKind.TOOL_CALL,
        PartKind.END,
    ]
    assert parsed.num_reasoning_tokens == parts[0].end
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", "I look.")


MALFORMED = [
    ("assistant to=functions.w<|channel|>commentary json<|message|>{", ParseProblem.TOOL_CALL_NOT_JSON, STOP),
    ("assistant to=functions.w<|channel|>commentary json<|message|>[1]", ParseProblem.TOOL_CALL_WRONG_SHAPE, STOP),
    ('assistant to=functions.w<|channel|>commentary json<|message|>{"a', ParseProblem.TOOL_CALL_UNCLOSED, LENGTH),
    ("assistant to=functions.w<|channel|>commentary json", ParseProblem.TOOL_CALL_UNCLOSED, LENGTH),
    ("assistant to=functions.w", ParseProblem.TOOL_CALL_UNCLOSED, LENGTH),
    ("assistant<|channel|>commentary to=functions.w", ParseProblem.TOOL_CALL_NOT_JSON, STOP),
    ("assistant<|channel|>analysis<|message|>hm", ParseProblem.REASONING_UNCLOSED, LENGTH),
    ("assistant<|channel|>analysis", ParseProblem.REASONING_UNCLOSED, LENGTH),
]


@pytest.mark.parametrize(("text", "problem", "finish"), MALFORMED)
def test_what_is_malformed_is_told_with_its_ids(
    renderer: Renderer, text: str, problem: ParseProblem, finish: Finish
) -> None:
    encode = renderer.tokenizer.encode
    before = encode("<|channel|>analysis<|message|>so<|end|>")
    bad = encode(f"<|start|>{text}")
    ids = before + bad + (encode("<|call|>") if finish is STOP else encode(""))
    parsed, _ = renderer.parse_tokens(ids, finish, PARAMS, [WEATHER])
    (fault,) = parsed.faults
    assert fault.problem is problem
    assert ids[fault.start : fault.end] == bad
    assert not parsed.message.tool_calls
    if problem is not ParseProblem.REASONING_UNCLOSED:
        assert (parsed.message.content, fault.seen) == (text, text)


@pytest.mark.parametrize("begun", ["<|channel|>", "<|start|>assistant<|channel|>"])
def test_a_message_that_another_cuts_short_is_unclosed(renderer: Renderer, begun: str) -> None:
    encode = renderer.tokenizer.encode
    cut = "<|channel|>analysis<|message|>hm"
    asked = f"{begun}commentary to=functions.w<|message|>{{}}"
    parsed, parts = read(renderer, f"{cut}{asked}{begun}final<|message|>hello<|return|>")
    ends = [len(encode(cut)), len(encode(cut + asked))]
    assert [(fault.problem, fault.start, fault.end) for fault in parsed.faults] == [
        (ParseProblem.REASONING_UNCLOSED, 0, ends[0]),
        (ParseProblem.TOOL_CALL_UNCLOSED, *ends),
    ]
    text = asked.removeprefix("<|start|>")
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", f"{text}\n\nhello")
    assert not parsed.message.tool_calls
    assert [(part.kind, part.start) for part in parts[:2]] == [(PartKind.REASONING, 0), (PartKind.CONTENT, ends[0])]


def test_a_marker_that_is_spelled_out_inside_arguments_is_text(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    arguments = '{"a": "<|call|><|end|><|start|>"}'
    ids = tokenizer.encode(" to=functions.w<|channel|>commentary json<|message|>")
    ids += tokenizer.encode_plain(arguments) + tokenizer.encode("<|call|>")
    parsed = renderer.parse(ids, STOP, PARAMS, [WEATHER])
    assert [one.arguments for one in parsed.message.tool_calls] == [arguments]


FOREIGN = [
    ("hello<|return|>", "hello"),
    ("<|message|>hello<|return|>", "hello"),
    ("<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>", "a\n\nb"),
    ("<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>", "a\n\nuser<|message|>b"),
    (
        "<|channel|>commentary to=python code<|message|>1+1<|call|>",
        "<|channel|>commentary to=python code<|message|>1+1",
    ),
    ("to=me is text<|return|>", "to=me is text"),
    ("<|channel|>fin", ""),
    ("<|channel|>final<|message|>a<|end|><|start|>assist", "a"),
]


@pytest.mark.parametrize(("text", "content"), FOREIGN)
def test_what_is_no_harmony_is_shown_and_a_header_that_was_cut_is_not(
    renderer: Renderer, text: str, content: str
) -> None:
    parsed, _ = read(renderer, text)
    assert (parsed.message.content, parsed.message.tool_calls, parsed.faults) == (content, (), ())


def test_without_tools_a_call_is_text(renderer: Renderer) -> None:
    parsed, _ = read(renderer, SPELLINGS[3], tools=())
    assert not parsed.message.tool_calls
    assert parsed.message.content == SPELLINGS[3].removesuffix("<|call|>")


def test_a_stop_string_ends_what_is_said_and_may_span_tokens(renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode("<|channel|>final<|message|>one stop! two")
    finish = Finish(reason=FinishReason.STOP, matched="stop!")
    parser = renderer.parser(SamplingParams(stop=("stop!",)), [])
    told = "".join(parser.feed([token_id]).content for token_id in ids)
    delta, parsed = parser.finish(finish)
    assert told + delta.content == parsed.message.content == "one "


PIECES = st.sampled_from(
    [*MARKS, "<|endoftext|>", "assistant", "analysis", "commentary", "final", " to=functions.w", "{}", "[", "\n", "x"]
)


@given(text=st.lists(PIECES, max_size=14).map("".join), data=st.data(), has_tools=st.booleans())
def test_any_ids_parse_and_their_parts_are_all_of_them(
    renderer: Renderer, text: str, data: st.DataObject, has_tools: bool
) -> None:
    tools = [WEATHER] if has_tools else []
    finish = data.draw(st.sampled_from([STOP, LENGTH]))
    ids = list(renderer.tokenizer.encode(text))
    ids += data.draw(st.lists(st.integers(-1, renderer.tokenizer.vocab_size + 9), max_size=6))
    parsed, parts = renderer.parse_tokens(ids, finish, PARAMS, tools)
    parser = renderer.parser(PARAMS, tools)
    deltas = [parser.feed([token_id]) for token_id in ids]
    delta, by_id = parser.finish(finish)
    assert by_id == parsed
    assert parser.parts() == parts
    deltas.append(delta)
    assert "".join(one.content for one in deltas) == (parsed.message.content or "")
    assert "".join(one.reasoning for one in deltas) == (parsed.message.reasoning or "")
    assert sum(len(one.tool_calls) for one in deltas) == len(parsed.message.tool_calls)
    at = 0
    for part in parts:
        assert part.start == at
        assert part.start < part.end
        at = part.end
    assert at == len(ids)
    assert all(0 <= fault.start <= fault.end <= len(ids) for fault in parsed.faults)


# -- what is forced


FORCED = [
    (SPELLINGS[2].replace(".w", ".look_up_zq").replace("{}", '{"city": "a"}'), True),
    (SPELLINGS[4].replace(".w", ".look_up_zq").replace("{}", '{"city": "a"}'), True),
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look_up_zq<|channel|>commentary"
        ' <|constrain|>json<|message|>{"city": "a"}<|call|>',
        True,
    ),
    (SPELLINGS[2].replace(".w", ".other"), False),
    (SPELLINGS[2].replace(".w", ".look_up_zq").replace("{}", "[]"), False),
    ("<|channel|>final<|message|>no<|return|>", False),
]


@pytest.mark.parametrize(("text", "is_allowed"), FORCED)
def test_a_forced_call_comes_after_reasoning_if_any_and_ends_the_reply(
    renderer: Renderer, text: str, is_allowed: bool
) -> None:
    grammar = renderer.tool_grammar([WEATHER], ToolChoice(mode=ToolMode.REQUIRED), True)
    assert grammar is not None
    tokenizer = renderer.tokenizer
    eos = tokenizer.added_tokens["<|endoftext|>"]
    state = LlguidanceBackend(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=(eos,)).compile(grammar).start()
    ids = list(tokenizer.encode(text))
    for token_id in ids:
        if not state.allowed()[token_id]:
            assert not is_allowed
            return
        state.accept(token_id)
    assert is_allowed
    assert list(state.allowed().nonzero()[0]) == [eos]
    (one,) = renderer.parse(ids, STOP, PARAMS, [WEATHER]).message.tool_calls
    assert (one.name, one.arguments) == ("look_up_zq", '{"city": "a"}')
