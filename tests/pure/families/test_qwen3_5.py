"""Qwen3.5 to 3.8, held to their own files and to what transformers makes of them; Qwen3-Coder, to a template of these.

Qwen3.6 and 3.8 have the tokenizer of Qwen3.5 here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.embedded.grammar.llguidance import LlguidanceBackend
from stenograph.families.load import check_renderer, load_renderer
from stenograph.text.append_proof import Law
from stenograph.text.conversations import ARGUMENTS, WEATHER, appended, call, exchanges, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

pytestmark = pytest.mark.families

NAMES = ["qwen3.5", "qwen3.6", "qwen3.8"]
LoadReal = Callable[..., Any]
STOP = Finish(reason=FinishReason.STOP)
NOT_THINKING = {"enable_thinking": False}
BLOCK = "'\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content"
PROMPT = "    {%- if enable_thinking is defined"


@pytest.fixture(scope="module")
def coder(real: LoadReal) -> Renderer:
    """Qwen3.5's template without its reasoning: what is published of Qwen3-Coder's, whose files no package has."""
    source = real("qwen3.5").files.chat_template
    source = source.replace(BLOCK, "'\\n' + content")
    source = source[: source.index(PROMPT)].replace("<think>", "<no>") + "{%- endif %}"
    files = replace(real("qwen3.5").files, chat_template=source)
    return load_renderer(files, tokenizer=real("qwen3.5").renderer.tokenizer).renderer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    found = verify(real(name).renderer, kwargs)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert found.num_tolerated == 0
    assert len(found.findings) > 100


def test_the_family_is_recognized_from_its_files(real: LoadReal, coder: Renderer) -> None:
    assert {real(name).renderer.family.name for name in NAMES} == {"qwen3.5"}
    assert coder.family.name == "qwen3-coder"


def written_by_both(
    model: Any, messages: Sequence[Message], tools: Sequence[Tool], **kwargs: object
) -> tuple[object, object]:
    """Ids by the renderer and ids of what transformers writes; None where the template refuses."""
    try:
        expected = model.renderer.tokenizer.encode(model.oracle(messages, tools, **kwargs))
    except jinja2.TemplateError:
        expected = None
    try:
        return model.renderer.render(messages, tools, kwargs), expected
    except UnrenderableMessage:
        return None, expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_every_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    num_written = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            ours, theirs = written_by_both(real(name), messages, exchange.tools, **kwargs)
            assert ours == theirs
            num_written += ours is not None
    assert num_written > 150


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\n\n", " zq\n", "<b>", "é𝄞"])
REASONING = st.none() | TEXT.filter(bool)
REPLIES = st.builds(said, TEXT, reasoning=REASONING) | st.builds(said, TEXT, st.just(call(1)), reasoning=REASONING)
OTHERS = st.builds(Message, role=st.sampled_from([Role.USER, Role.TOOL]), content=TEXT)
SYSTEM = st.builds(Message, role=st.just(Role.SYSTEM), content=TEXT)


@given(
    first=SYSTEM | OTHERS,
    messages=st.lists(REPLIES | OTHERS, min_size=1, max_size=5),
    has_tools=st.booleans(),
    thinks=st.booleans(),
)
def test_any_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, first: Message, messages: list[Message], has_tools: bool, thinks: bool
) -> None:
    tools, kwargs = [WEATHER] if has_tools else [], {} if thinks else NOT_THINKING
    ours, theirs = written_by_both(real("qwen3.5"), [first, *messages], tools, **kwargs)
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_replies_after_the_last_user_are_written_as_by_the_stock_template(real: LoadReal, name: str) -> None:
    model = real(name)
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        messages = (*exchange.opening, exchange.reply)
        roles = [message.role for message in messages]
        if Role.ASSISTANT not in roles[: max(i for i, role in enumerate(roles) if role is Role.USER)]:
            stock = model.oracle(messages, exchange.tools, stock=True)
            assert model.renderer.render(messages, exchange.tools, {}) == model.renderer.tokenizer.encode(stock)
            num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.6"])
def test_the_stock_template_is_refused_because_it_drops_reasoning(real: LoadReal, name: str) -> None:
    stock = real(name, "chatml")
    assert stock.renderer.prove().rewrites[0].law is Law.HISTORY
    with pytest.raises(StartupError, match="drops the reasoning of an earlier reply") as caught:
        check_renderer(stock.files, stock.renderer)
    assert "--family qwen3.5 is made for it" in str(caught.value)


def test_calls_without_reasoning_are_bridged_and_parsed(coder: Renderer) -> None:
    found = verify(coder)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert len(found.findings) > 100


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_a_forced_call_is_what_the_template_writes_after_its_prompt(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    renderer: Renderer = real(name).renderer
    tokenizer = renderer.tokenizer
    reply = said(None, call(1, ARGUMENTS), reasoning=None if kwargs else "It is </tool_call> that.")
    prompt = renderer.render([user("a")], [WEATHER], kwargs)
    whole = renderer.render([user("a"), reply, user("b")], [WEATHER], kwargs)
    end = tokenizer.added_tokens["<|im_end|>"]
    sampled = whole[len(prompt) :][: whole[len(prompt) :].index(end)]
    grammar = renderer.tool_grammar(
        [WEATHER], ToolChoice(mode=ToolMode.REQUIRED), False, prompt_end=renderer.prompt_end(prompt)
    )
    assert grammar is not None
    state = LlguidanceBackend(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=(end,)).compile(grammar).start()
    for token_id in sampled:
        assert state.allowed()[token_id], tokenizer.decode(sampled)
        state.accept(token_id)
    assert state.allowed()[end]
    parsed = renderer.parse([*sampled, end], STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt))
    assert not parsed.faults
    assert parsed.message.reasoning == reply.reasoning
    assert [one.name for one in parsed.message.tool_calls] == [WEATHER.name]


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=look_up_zq>", "</function>"),
        *("<parameter=city>", "</parameter>", "\n", "x"),
    ]
)


@given(text=st.lists(PIECES, max_size=12).map("".join), data=st.data(), opened=st.booleans())
def test_any_ids_parse_and_their_parts_are_all_of_them(
    real: LoadReal, text: str, data: st.DataObject, opened: bool
) -> None:
    renderer: Renderer = real("qwen3.5").renderer
    ids = list(renderer.tokenizer.encode(text))
    ids += data.draw(st.lists(st.integers(-1, renderer.tokenizer.vocab_size + 9), max_size=6))
    prompt = renderer.tokenizer.encode("<think>\n") if opened else ()
    parsed, parts = renderer.parse_tokens(
        ids, STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
    )
    parser = renderer.parser(SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt))
    for token_id in ids:
        parser.feed([token_id])
    assert parser.finish(STOP)[1] == parsed
    assert parser.parts() == parts
    ends = [0, *(part.end for part in parts)]
    assert ends[-1] == len(ids)
    assert all(start - 1 <= part.start <= start for start, part in zip(ends, parts, strict=False))
    assert all(0 <= fault.start <= fault.end <= len(ids) for fault in parsed.faults)
