"""Mistral's Tekken formats: sessions and calls, with the formats' control tokens in a tokenizer of a few hundred ids.

What they write is held to mistral-common in `test_mistral_oracle`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from stenograph.core.chat import ParseProblem, ToolChoice, ToolMode
from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families import family_for
from stenograph.families.load import load_renderer
from stenograph.families.mistral.family import (
    MISTRAL_V3,
    MISTRAL_V7,
    MISTRAL_V11,
    MISTRAL_V13,
    MISTRAL_V13_THINKING,
)
from stenograph.model.files import ModelFiles
from stenograph.text.conversations import WEATHER, call, result, said, user
from stenograph.text.reading import PartKind
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

STOP = Finish(reason=FinishReason.STOP)
PARAMS = SamplingParams()
FAMILIES = {
    "v3": MISTRAL_V3,
    "v7": MISTRAL_V7,
    "v11": MISTRAL_V11,
    "v13": MISTRAL_V13,
    "v13-thinking": MISTRAL_V13_THINKING,
}
TOKENS = (
    *(
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[TOOL_CONTENT]",
    ),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]"),
)
LITERAL = '{"a": "[TOOL_CALLS][{ \\"] } \\\\"}'


@pytest.fixture(scope="module")
def renderers(reference: tokenizers.Tokenizer) -> dict[str, Renderer]:
    return {name: load_renderer(files_of(reference, name)).renderer for name in FAMILIES}


def files_of(reference: tokenizers.Tokenizer, name: str) -> ModelFiles:
    made = tokenizers.Tokenizer.from_str(reference.to_str())
    made.add_special_tokens([*TOKENS, *(["[THINK]", "[/THINK]"] if name == "v13-thinking" else [])])
    return ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=made.to_str(),
        chat_template=None,
        bos_token="<s>",
        eos_token="</s>",
        eos_token_ids=(),
        vocab_size=600,
        max_context_tokens=64,
        architecture="mistral",
        tekken_version=name.partition("-")[0],
    )


@pytest.fixture(params=FAMILIES)
def renderer(renderers: dict[str, Renderer], request: pytest.FixtureRequest) -> Renderer:
    return renderers[request.param]


def one(renderer: Renderer, arguments: str, name: str = "w", call_id: str = "abcdefghi") -> str:
    """A call as the version writes it, without what is around a list of them."""
    family = renderer.family.name
    if family in ("mistral-v3", "mistral-v7"):
        return f'{{"name": "{name}", "arguments": {arguments}, "id": "{call_id}"}}'
    marked = f"[CALL_ID]{call_id}" if family == "mistral-v11" else ""
    return f"[TOOL_CALLS]{name}{marked}[ARGS]{arguments}"


def block(renderer: Renderer, *calls: str) -> str:
    is_list = renderer.family.name in ("mistral-v3", "mistral-v7")
    return f"[TOOL_CALLS][{', '.join(calls)}]" if is_list else "".join(calls)


def read(renderer: Renderer, text: str, *, by_id: bool = False) -> Any:
    parser = renderer.parser(PARAMS, [WEATHER])
    ids = renderer.tokenizer.encode(text)
    for piece in [[token_id] for token_id in ids] if by_id else [ids]:
        parser.feed(piece)
    return parser.finish(STOP)[1], parser.parts()


# -- which version it is


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tekken_file_s_version_names_the_family(reference: tokenizers.Tokenizer, name: str) -> None:
    files = files_of(reference, name)
    assert family_for(files) is FAMILIES[name]
    assert family_for(replace(files, chat_template="{{ '[ARGS][CALL_ID][AVAILABLE_TOOLS]' }}")) is FAMILIES[name]


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("v3", "[AVAILABLE_TOOLS][INST]"),
        ("v7", "[SYSTEM_PROMPT][TOOL_CONTENT]"),
        ("v11", "[SYSTEM_PROMPT][CALL_ID][ARGS]"),
        ("v13", "[SYSTEM_PROMPT][ARGS]"),
        ("v13-thinking", "[SYSTEM_PROMPT][ARGS][THINK]"),
    ],
)
def test_without_a_tekken_file_the_template_shows_it(reference: tokenizers.Tokenizer, name: str, template: str) -> None:
    files = replace(files_of(reference, name), tekken_version=None, chat_template=template)
    assert family_for(files) is FAMILIES[name]


def test_a_version_that_is_not_known_is_of_no_family(reference: tokenizers.Tokenizer) -> None:
    with pytest.raises(StartupError, match="no known family"):
        family_for(replace(files_of(reference, "v13"), tekken_version="v15"))


# -- sessions


def test_every_session_is_bridged_and_parsed(renderer: Renderer) -> None:
    found = verify(renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > 150


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["</s>", "[INST]", "{}", " a "])
TURNS = st.one_of(
    TEXT.map(user),
    TEXT.map(said),
    st.builds(said, TEXT, st.sampled_from([call(1), call(2, "{}")])),
    st.builds(Message, role=st.just(Role.SYSTEM), content=TEXT),
)
REPLIES = st.sampled_from([said("b"), said(None, call(3)), said("b", call(3), call(4))])


@given(data=st.data(), past=st.lists(TURNS, max_size=4), new=st.lists(TURNS, max_size=3), reply=REPLIES)
def test_any_conversation_is_append_only_and_bridged_as_it_is_rendered(
    renderers: dict[str, Renderer], data: st.DataObject, past: list[Message], new: list[Message], reply: Message
) -> None:
    renderer = renderers[data.draw(st.sampled_from(sorted(FAMILIES)))]
    if Role.SYSTEM in (renderer.family.early_roles or ()):
        new = [message for message in new if message.role is not Role.SYSTEM]
    opening = [user("a"), *past]
    answers = [result(asked, "r") for asked in reply.tool_calls]
    prompt = renderer.render(opening, [WEATHER], {})
    whole = renderer.render([*opening, reply], [WEATHER], {})
    assert whole[: len(prompt)] == prompt
    bridge = renderer.bridge(whole[-64:], reply, [*answers, *new], [WEATHER], {})
    assert bridge.num_trimmed == 0
    assert whole + bridge.ids == renderer.render([*opening, reply, *answers, *new], [WEATHER], {})


def text_of(renderer: Renderer, messages: list[Message], tools: tuple[Tool, ...] = ()) -> str:
    return renderer.tokenizer.decode(renderer.render(messages, tools, {}))


def test_the_tool_list_stays_before_the_first_user(renderer: Renderer) -> None:
    text = text_of(renderer, [user("a"), said("b"), user("c")], (WEATHER,))
    assert text.startswith('<s>[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "look_up_zq", "description"')
    assert text.endswith("[/AVAILABLE_TOOLS][INST]a[/INST]b</s>[INST]c[/INST]")


def test_a_late_system_message_is_refused_where_the_format_has_one_place_for_it(renderers: dict[str, Renderer]) -> None:
    late = Message(role=Role.SYSTEM, content="Late.")
    ids = renderers["v3"].tokenizer.encode("b</s>")
    with pytest.raises(UnrenderableMessage, match="moves system messages to the front"):
        renderers["v3"].bridge(ids, said("b"), [late, user("c")], [], {})
    assert (
        text_of(renderers["v3"], [late, user("a"), said("b"), user("c")])
        == "<s>[INST]Late.\n\na[/INST]b</s>[INST]c[/INST]"
    )
    assert text_of(renderers["v7"], [user("a"), said("b"), late]).endswith("b</s>[SYSTEM_PROMPT]Late.[/SYSTEM_PROMPT]")


@pytest.mark.parametrize(
    "escaped", ['{"a": "\\u003c/s>"}', '{"a": "<\\/s>"}', '["[\\/INST]"]', '"\\u005bINST]"', "</s>", '"</s>"']
)
def test_what_a_tool_gives_back_makes_no_control_token_however_it_is_escaped(
    renderers: dict[str, Renderer], escaped: str
) -> None:
    asked = call(1, "{}")
    for renderer in renderers.values():
        plain, escapes = (
            renderer.render([user("a"), said(None, asked), result(asked, text)], [WEATHER], {})
            for text in ("r", escaped)
        )
        special = renderer.tokenizer.special_ids
        assert [i for i in escapes if i in special] == [i for i in plain if i in special]


def test_a_tool_that_is_no_function_and_tools_without_a_user_are_refused(renderers: dict[str, Renderer]) -> None:
    odd = Tool(name="odd", json='{"type": "odd"}')
    with pytest.raises(UnrenderableMessage, match="must be a function with a name"):
        renderers["v7"].render([user("a")], [odd], {})
    with pytest.raises(UnrenderableMessage, match="beside a user's message"):
        renderers["v7"].render([Message(role=Role.SYSTEM, content="a")], [WEATHER], {})
    assert "[AVAILABLE_TOOLS]" in text_of(renderers["v3"], [Message(role=Role.SYSTEM, content="a")], (WEATHER,))


def test_results_come_in_the_order_of_the_calls_from_version_11_on(renderers: dict[str, Renderer]) -> None:
    first, second = call(1, "{}"), call(2, "{}")
    for name, renderer in renderers.items():
        text = text_of(renderer, [user("a"), said(None, first, second), result(second, "two"), result(first, "one")])
        assert (text.index("two") < text.index("one")) is (name in ("v3", "v7"))


# -- replies


@pytest.mark.parametrize("by_id", [False, True])
def test_parallel_calls_are_read_whatever_their_arguments_spell(renderer: Renderer, by_id: bool) -> None:
    text = f"So: {block(renderer, one(renderer, LITERAL), one(renderer, '{}', 'v', 'ihgfedcba'))}</s>"
    parsed, parts = read(renderer, text, by_id=by_id)
    assert [(asked.name, asked.arguments) for asked in parsed.message.tool_calls] == [("w", LITERAL), ("v", "{}")]
    has_ids = "v13" not in renderer.family.name
    expected = ["abcdefghi", "ihgfedcba"] if has_ids else ["call_0", "call_1"]
    assert [asked.id for asked in parsed.message.tool_calls] == expected
    assert (parsed.message.content, parsed.faults) == ("So: ", ())
    assert [part.kind for part in parts] == [PartKind.CONTENT, PartKind.TOOL_CALL, PartKind.END]


@pytest.mark.parametrize("name", ["v3", "v7", "v11"])
def test_an_id_that_the_model_writes_twice_is_given_to_one_call(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    parsed, _ = read(renderer, block(renderer, one(renderer, "{}"), one(renderer, "{}")) + "</s>")
    assert [asked.id for asked in parsed.message.tool_calls] == ["abcdefghi", "call_1"]
    assert not parsed.faults


def test_reasoning_is_read_where_the_model_has_tokens_for_it(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["v13-thinking"]
    parsed, parts = read(renderer, "[THINK]hm\n[/THINK]hello</s>")
    assert (parsed.message.reasoning, parsed.message.content) == ("hm\n", "hello")
    assert [part.kind for part in parts] == [PartKind.REASONING, PartKind.CONTENT, PartKind.END]
    asked = [user("a"), said("b", reasoning="hm")]
    assert text_of(renderer, asked).endswith("[/INST][THINK]hm[/THINK]b</s>")
    assert text_of(renderers["v13"], asked).endswith("[/INST]b</s>")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_malformed_call_is_told_with_its_ids(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    is_list = name in ("v3", "v7")
    cases = [
        (block(renderer, one(renderer, '{"a": }')), ParseProblem.TOOL_CALL_NOT_JSON),
        (block(renderer, one(renderer, "[3]")), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (block(renderer, one(renderer, "{}", "")), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (block(renderer, one(renderer, '{"a": 1')), ParseProblem.TOOL_CALL_UNCLOSED),
        ("[TOOL_CALLS]w", ParseProblem.TOOL_CALL_UNCLOSED),
    ]
    cases += [("[TOOL_CALLS][]", ParseProblem.TOOL_CALL_WRONG_SHAPE)] if is_list else []
    for text, problem in cases:
        good = block(renderer, one(renderer, LITERAL))
        before, bad = renderer.tokenizer.encode(f"So:{good}\n"), renderer.tokenizer.encode(text)
        ids = before + bad + renderer.tokenizer.encode("</s>")
        parsed, _ = renderer.parse_tokens(ids, STOP, PARAMS, [WEATHER])
        (fault,) = parsed.faults
        assert (fault.problem, fault.seen) == (problem, text)
        assert ids[fault.start : fault.end] == bad
        assert [asked.arguments for asked in parsed.message.tool_calls] == [LITERAL]
        assert (parsed.message.content or "").endswith(text)


@pytest.mark.parametrize("name", ["v11", "v13"])
def test_a_call_without_arguments_spoils_no_other(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    good = one(renderer, "{}", "v")
    for bad in ("[TOOL_CALLS]w", "[TOOL_CALLS]w[ARGS]3", '[TOOL_CALLS]w[ARGS]{"a": '):
        parsed, _ = read(renderer, f"{bad}{good}</s>")
        assert [asked.name for asked in parsed.message.tool_calls] == ["v"]
        assert (parsed.message.content, len(parsed.faults)) == (bad, 1)


PIECES = st.sampled_from(
    [
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[{", '"name": "', '", "arguments": '),
        "{}",
        "}]",
        "w",
        '"',
    ]
)


@given(data=st.data(), text=st.lists(PIECES, max_size=14).map("".join))
def test_any_ids_parse_alike_in_any_pieces(renderers: dict[str, Renderer], data: st.DataObject, text: str) -> None:
    renderer = renderers[data.draw(st.sampled_from(sorted(FAMILIES)))]
    ids = list(renderer.tokenizer.encode(text))
    ids += data.draw(st.lists(st.integers(-1, renderer.tokenizer.vocab_size + 9), max_size=6))
    parsed, parts = renderer.parse_tokens(ids, STOP, PARAMS, [WEATHER])
    parser = renderer.parser(PARAMS, [WEATHER])
    for token_id in ids:
        parser.feed([token_id])
    assert parser.finish(STOP)[1] == parsed
    assert parser.parts() == parts
    at = 0
    for part in parts:
        assert at - 1 <= part.start <= at
        assert part.start < part.end
        at = part.end
    assert at == len(ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("parallel", "num_calls", "accepted"), [(False, 1, True), (False, 2, False), (True, 2, True)])
def test_the_grammar_of_a_forced_call_has_what_the_format_writes(
    reference: tokenizers.Tokenizer,
    renderers: dict[str, Renderer],
    name: str,
    parallel: bool,
    num_calls: int,
    accepted: bool,
) -> None:
    renderer = renderers[name]
    grammar = renderer.tool_grammar([WEATHER], ToolChoice(mode=ToolMode.REQUIRED), parallel)
    assert grammar is not None
    calls = [one(renderer, '{"city": "a", "days": 3}', WEATHER.name)] * num_calls
    before = "[THINK]hm[/THINK]" if name == "v13-thinking" else ""
    ids = list(renderer.tokenizer.encode(f"{before}{block(renderer, *calls)}</s>"))
    tokenizer = LLTokenizer(files_of(reference, name).tokenizer_json, eos_token=renderer.tokenizer.added_tokens["</s>"])
    matcher = LLMatcher(tokenizer, grammar.source)
    assert not matcher.get_error()
    assert (matcher.validate_tokens(ids) == len(ids)) is accepted
