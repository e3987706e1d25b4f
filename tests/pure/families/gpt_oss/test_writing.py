"""What gpt-oss is given is what openai-harmony writes; and a session goes on with the ids of a full render."""

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai_harmony
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.day import STRFTIME_NOW, Day
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.families import family_for
from stenograph.families.gpt_oss.types import typescript
from stenograph.families.load import load_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.conversations import WEATHER, ExampleExchange, appended, call, exchanges, result, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import sampled_as, verify

BARE = Tool(name="stop_zq", json='{"type": "function", "function": {"name": "stop_zq"}}')


def test_the_family_is_recognized_with_a_template_in_the_files_and_without(files: ModelFiles) -> None:
    assert family_for(files).name == "gpt-oss"
    assert family_for(replace(files, chat_template="{{ '<|start|>' }}")).name == "gpt-oss"


def test_files_that_do_not_end_a_turn_at_a_call_are_told_in_the_log(files: ModelFiles, renderer: Renderer) -> None:
    (note,) = load_renderer(files).notes
    assert "<|call|>" in note
    assert load_renderer(replace(files, eos_token_ids=(renderer.tokenizer.added_tokens["<|call|>"],))).notes == ()


def test_every_session_is_bridged_and_parsed(renderer: Renderer) -> None:
    found = verify(renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > 200


@pytest.mark.families
@pytest.mark.timeout(600)  # its tokenizer has two hundred thousand pieces
def test_every_session_is_bridged_and_parsed_with_the_real_vocabulary(real_renderer: Renderer) -> None:
    found = verify(real_renderer)
    assert found.holds, found.failures
    assert (found.num_refused, found.num_tolerated) == (0, 0)


# -- what is written


def their_conversation(messages: Sequence[Message], tools: Sequence[Tool]) -> openai_harmony.Conversation:
    """Our messages as openai-harmony has them: its own types, put together as its documentation does."""
    theirs = openai_harmony
    system = theirs.SystemContent.new().with_reasoning_effort(theirs.ReasoningEffort.MEDIUM)
    found = [theirs.Message.from_role_and_content(theirs.Role.SYSTEM, system)]
    developer = theirs.DeveloperContent.new()
    is_instructed = messages[0].role in (Role.SYSTEM, Role.DEVELOPER)
    if is_instructed:
        developer = developer.with_instructions(messages[0].content or "")
    if tools:
        functions = [json.loads(tool.json)["function"] for tool in tools]
        developer = developer.with_function_tools(
            [theirs.ToolDescription.new(f["name"], f.get("description", ""), f.get("parameters")) for f in functions]
        )
    if is_instructed or tools:
        found.append(theirs.Message.from_role_and_content(theirs.Role.DEVELOPER, developer))
    names: dict[str | None, str] = {}
    for message in messages[is_instructed:]:
        names.update((one.id, one.name) for one in message.tool_calls)
        found.extend(their_messages(message, names))
    return theirs.Conversation.from_messages(found)


def their_messages(message: Message, names: dict[str | None, str]) -> Iterator[openai_harmony.Message]:
    theirs = openai_harmony
    content = message.content or ""

    def from_assistant(text: str, channel: str) -> openai_harmony.Message:
        return theirs.Message.from_role_and_content(theirs.Role.ASSISTANT, text).with_channel(channel)

    match message.role:
        case Role.USER:
            yield theirs.Message.from_role_and_content(theirs.Role.USER, content)
        case Role.SYSTEM | Role.DEVELOPER:
            late = theirs.DeveloperContent.new().with_instructions(content)
            yield theirs.Message.from_role_and_content(theirs.Role.DEVELOPER, late)
        case Role.TOOL:
            author = theirs.Author.new(theirs.Role.TOOL, f"functions.{names[message.tool_call_id]}")
            answer = theirs.Message.from_author_and_content(author, content)
            yield answer.with_recipient("assistant").with_channel("commentary")
        case Role.ASSISTANT:
            if message.reasoning:
                yield from_assistant(message.reasoning, "analysis")
            if content or not message.tool_calls:
                yield from_assistant(content, "commentary" if message.tool_calls else "final")
            for one in message.tool_calls:
                asked = from_assistant(one.arguments, "commentary").with_recipient(f"functions.{one.name}")
                yield asked.with_content_type("<|constrain|>json")


def their_ids(
    oracle: openai_harmony.HarmonyEncoding, messages: Sequence[Message], tools: Sequence[Tool]
) -> Sequence[int]:
    """With the reasoning of earlier turns, which the library leaves out unless it is told not to."""
    config = openai_harmony.RenderConversationConfig(auto_drop_analysis=False)
    conversation = their_conversation(messages, tools)
    return oracle.render_conversation_for_completion(conversation, openai_harmony.Role.ASSISTANT, config=config)


def our_text(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    return renderer.tokenizer.decode(renderer.render(messages, tools, {}))


def conversations() -> Iterator[tuple[tuple[Message, ...], tuple[Tool, ...]]]:
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            yield (*exchange.opening, exchange.reply, *new), exchange.tools


def test_every_conversation_is_written_as_openai_harmony_writes_it(
    renderer: Renderer, oracle: openai_harmony.HarmonyEncoding
) -> None:
    for messages, tools in conversations():
        assert our_text(renderer, messages, tools) == oracle.decode(their_ids(oracle, messages, tools))


@pytest.mark.families
@pytest.mark.timeout(600)  # its tokenizer has two hundred thousand pieces
def test_every_conversation_has_the_ids_of_openai_harmony(
    real_renderer: Renderer, oracle: openai_harmony.HarmonyEncoding
) -> None:
    for messages, tools in conversations():
        assert list(real_renderer.render(messages, tools, {})) == list(their_ids(oracle, messages, tools))


WORDS = st.sampled_from(["a", "two words", "line\nbreak", "x\r\n", "", "é𝄞", 'q"uote', "// c", "<b>", "null"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | WORDS
# Its JSON reader is off by a bit in the last place of some long numbers: none of those.
NUMBERS = st.integers(-(2**63), 2**63) | st.sampled_from([0.5, -1.0, 2.0, 1e16, 1e20, 1e-7, 0.0001, 2**70])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
NOTES = {
    "description": WORDS | st.integers(0, 1),
    "title": WORDS,
    "default": VALUES,
    "nullable": st.booleans(),
    "enum": st.lists(WORDS | st.integers(0, 3), max_size=3),
    "examples": st.lists(WORDS | st.integers(0, 3), max_size=2) | WORDS,
}
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object", "other"])
LEAVES = st.fixed_dictionaries({}, optional={"type": TYPES | st.lists(TYPES, max_size=3), **NOTES})


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(WORDS, inner | st.booleans(), max_size=3)
    required = st.lists(WORDS, max_size=2)
    objects = st.fixed_dictionaries(
        {"type": st.just("object")}, optional={"properties": properties, "required": required, **NOTES}
    )
    arrays = st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional=NOTES)
    variants = st.fixed_dictionaries({"oneOf": st.lists(inner, max_size=3)}, optional={"type": TYPES, **NOTES})
    return objects | arrays | variants


SCHEMAS = st.recursive(LEAVES, deeper, max_leaves=6)


LISTED = {"oneOf": [{"type": "string", "enum": ["a"], "default": "a"}]}


@given(schema=SCHEMAS, name=WORDS.filter(bool), description=WORDS)
@example(schema={"type": "array", "items": LISTED}, name="a", description="a")
@example(schema={"oneOf": [LISTED]}, name="a", description="a")
def test_any_schema_is_written_as_openai_harmony_writes_it(
    oracle: openai_harmony.HarmonyEncoding, schema: dict[str, Any], name: str, description: str
) -> None:
    theirs = openai_harmony
    tool = theirs.ToolDescription.new("f", "zq", {"type": "object", "properties": {"zq": schema, "other": {}}})
    developer = theirs.DeveloperContent.new().with_function_tools([tool])
    message = theirs.Message.from_role_and_content(theirs.Role.DEVELOPER, developer)
    written = oracle.decode(oracle.render_conversation(theirs.Conversation.from_messages([message])))
    expected = written.partition("(_: ")[2].removesuffix(") => any;\n\n} // namespace functions<|end|>")
    assert typescript({"type": "object", "properties": {"zq": schema, "other": {}}}) == expected


REASONING = st.none() | TEXT.filter(bool)
REPLIES = st.builds(said, TEXT, reasoning=REASONING) | st.builds(said, TEXT, st.just(call(1)), reasoning=REASONING)
OTHERS = st.builds(Message, role=st.sampled_from([Role.USER, Role.SYSTEM, Role.DEVELOPER]), content=TEXT)


@given(
    messages=st.lists(REPLIES | OTHERS, min_size=1, max_size=5),
    tools=st.sampled_from([(), (WEATHER,), (BARE, WEATHER)]),
)
def test_any_conversation_is_written_as_openai_harmony_writes_it(
    renderer: Renderer, oracle: openai_harmony.HarmonyEncoding, messages: list[Message], tools: tuple[Tool, ...]
) -> None:
    assert our_text(renderer, messages, tools) == oracle.decode(their_ids(oracle, messages, tools))


def test_the_template_arguments_are_those_of_the_system_message(
    renderer: Renderer, oracle: openai_harmony.HarmonyEncoding
) -> None:
    theirs = openai_harmony
    system = theirs.SystemContent.new().with_reasoning_effort(theirs.ReasoningEffort.HIGH)
    system = system.with_model_identity("I am <zq>.").with_knowledge_cutoff("2020-02")
    system = system.with_conversation_start_date("2031-01-02")
    kwargs = {
        "reasoning_effort": "high",
        "model_identity": "I am <zq>.",
        "knowledge_cutoff": "2020-02",
        "conversation_start_date": "2031-01-02",
    }
    messages = [
        theirs.Message.from_role_and_content(theirs.Role.SYSTEM, system),
        theirs.Message.from_role_and_content(theirs.Role.USER, "a"),
    ]
    conversation = theirs.Conversation.from_messages(messages)
    expected = oracle.decode(oracle.render_conversation_for_completion(conversation, theirs.Role.ASSISTANT))
    assert renderer.tokenizer.decode(renderer.render([user("a")], [], kwargs)) == expected


UNSHOWN: list[tuple[str, object, str]] = [
    ("reasoning_effort", "x-high", "must be low, medium or high"),
    ("model_identity", 3, "must be a string"),
    ("conversation_start_date", None, "must be a string"),
    ("builtin_tools", ["browser"], "not served"),
]


def test_the_date_is_the_sessions_unless_an_argument_names_another_or_none(renderer: Renderer) -> None:
    day = {STRFTIME_NOW: Day(date=datetime.date(2031, 1, 2))}

    def written(**kwargs: object) -> str:
        return renderer.tokenizer.decode(renderer.render([user("a")], [], kwargs))

    assert renderer.writer.reads_date
    assert written(**day) == written(conversation_start_date="2031-01-02")
    assert "\nCurrent date: 2031-01-02\n" in written(**day)
    assert written(**day, conversation_start_date="2030-12-31") == written(conversation_start_date="2030-12-31")
    assert written(**day, conversation_start_date="") == written()
    assert "Current date" not in written()


@pytest.mark.parametrize(("name", "value", "why"), UNSHOWN)
def test_an_argument_that_the_system_message_cannot_show_is_refused(
    renderer: Renderer, name: str, value: object, why: str
) -> None:
    with pytest.raises(UnrenderableMessage, match=why) as caught:
        renderer.render([user("a")], [], {name: value})
    assert caught.value.blame == Blame(RequestPart.TEMPLATE_KWARGS)


def test_a_result_that_answers_no_call_is_refused_unless_it_names_its_function(renderer: Renderer) -> None:
    lost = Message(role=Role.TOOL, content="Found.", tool_call_id="other")
    past = [user("a"), said(None, call(1))]
    with pytest.raises(UnrenderableMessage, match="must answer a call"):
        renderer.render([*past, lost], [WEATHER], {})
    assert "<|start|>functions.by_name to=assistant" in our_text(
        renderer, [*past, structs.replace(lost, name="by_name")], [WEATHER]
    )
    late = Message(role=Role.TOOL, content="Found.", tool_call_id=call(1).id)
    assert "<|start|>functions.look_up_zq to=assistant" in our_text(renderer, [*past, said("So."), late], [WEATHER])


# -- what is sampled stays, but for the stop token that only ends a reply


SPELLED = st.sampled_from(["<|end|>", "a<|call|>", "<|start|>user<|message|>"]) | TEXT
SPOKEN = st.builds(Message, role=st.sampled_from([Role.USER, Role.SYSTEM, Role.DEVELOPER]), content=SPELLED)
ANSWERS = st.builds(said, SPELLED, reasoning=st.none() | SPELLED.filter(bool)) | st.builds(
    said, SPELLED, st.just(call(1)), st.just(call(2, "{}")), reasoning=st.none() | SPELLED.filter(bool)
)


@given(
    opening=st.lists(SPOKEN | ANSWERS, min_size=1, max_size=4),
    reply=ANSWERS,
    num_results=st.integers(0, 2),
    more=st.lists(SPOKEN | ANSWERS, max_size=3),
    tools=st.sampled_from([(), (WEATHER,)]),
)
def test_any_session_goes_on_with_the_ids_of_a_full_render(
    renderer: Renderer,
    opening: list[Message],
    reply: Message,
    num_results: int,
    more: list[Message],
    tools: tuple[Tool, ...],
) -> None:
    new = [*(result(one, "<|return|> r") for one in reply.tool_calls[:num_results]), *more]
    prompt = renderer.render(opening, tools, {})
    expected = renderer.render([*opening, reply, *new], tools, {})
    for sampled in sampled_as(renderer, ExampleExchange(opening=tuple(opening), reply=reply, tools=tools)):
        bridge = renderer.bridge(sampled, reply, new, tools, {})
        assert bridge.num_trimmed <= renderer.max_trim_tokens
        assert prompt + sampled[: len(sampled) - bridge.num_trimmed] + bridge.ids == expected


def test_the_stop_token_of_an_answer_gives_way_to_its_end_and_that_of_a_call_stays(renderer: Renderer) -> None:
    encode, added = renderer.tokenizer.encode, renderer.tokenizer.added_tokens
    answer = encode("<|channel|>final<|message|>b<|return|>")
    bridge = renderer.bridge(answer, said("b"), [user("c")], [], {})
    assert bridge.num_trimmed == 1
    assert renderer.tokenizer.decode(bridge.ids) == "<|end|><|start|>user<|message|>c<|end|><|start|>assistant"
    asked = call(1, "{}")
    calling = encode(" to=functions.look_up_zq<|channel|>commentary <|constrain|>json<|message|>{}<|call|>")
    answered = "<|start|>functions.look_up_zq to=assistant<|channel|>commentary<|message|>r<|end|><|start|>assistant"
    bridge = renderer.bridge(calling, said(None, asked), [result(asked, "r")], [WEATHER], {})
    assert (bridge.num_trimmed, renderer.tokenizer.decode(bridge.ids)) == (0, answered)
    assert renderer.bridge(list(calling), said(None, asked), [result(asked, "r")], [WEATHER], {}) == bridge
    cut = renderer.bridge(calling[:-1], said(None, asked), [result(asked, "r")], [WEATHER], {})
    assert (cut.num_trimmed, cut.ids[0]) == (0, added["<|call|>"])
    assert cut.ids[1:] == bridge.ids
    text = renderer.bridge(calling, said("no call"), [user("c")], [], {})
    assert (text.num_trimmed, text.ids[0]) == (1, added["<|end|>"])
