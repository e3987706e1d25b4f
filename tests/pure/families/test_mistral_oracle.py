"""Mistral's Tekken formats, held to mistral-common: the ids of every conversation, with the tokenizer that it brings.

Its tekken.json is of version 3; for the later versions it is written out with their version and their special tokens.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import StartupError
from stenograph.core.messages import Message, Role, Tool
from stenograph.families.load import load_renderer
from stenograph.model.files import load_model_files
from stenograph.text.conversations import WEATHER, appended, call, exchanges, result, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]

VERSIONS = {"v3": "mistral-v3", "v7": "mistral-v7", "v11": "mistral-v11", "v13": "mistral-v13-thinking"}
NUM_LISTED = 40


@dataclass(frozen=True, kw_only=True)
class Held:
    """A version's renderer, and the format's own library with the same tokenizer."""

    version: str
    renderer: Renderer
    theirs: Any

    def agrees(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Whether the library writes such a conversation, and does not place something by the last user's message."""
        users = [role for role, _ in groupby(messages, key=lambda message: message.role) if role is Role.USER]
        has_system = any(message.role in (Role.SYSTEM, Role.DEVELOPER) for message in messages)
        is_placed_by_last = (tools and self.version != "v13") or (has_system and self.version == "v3")
        replies = [message for message in messages if message.role is Role.ASSISTANT]
        return (
            (len(users) <= 1 or not is_placed_by_last)
            and all(one.content or one.tool_calls or (self.version == "v13" and one.reasoning) for one in replies)
            and (self.version != "v3" or not any(one.content and one.tool_calls for one in replies))
        )

    def ids(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self.theirs(messages, tools)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Held]:
    @cache
    def load(version: str) -> Held:
        folder = tmp_path_factory.mktemp(version)
        write_tekken(folder / "tekken.json", version)
        config = {"vocab_size": 131072, "max_position_embeddings": 1 << 15, "model_type": "mistral"}
        (folder / "config.json").write_text(json.dumps(config))
        files = load_model_files(folder)
        return Held(version=version, renderer=load_renderer(files).renderer, theirs=library(folder, version))

    return load


def write_tekken(path: Path, version: str) -> None:
    base = importlib.import_module("mistral_common.tokens.tokenizers.base")
    found = importlib.import_module("mistral_common")
    tekken = json.loads((Path(found.__file__ or "").parent / "data" / "tekken_240718.json").read_text())
    assert tekken["config"]["version"] == "v3"
    tekken["config"]["version"] = version
    if version in ("v11", "v13"):
        old = importlib.import_module("mistral_common.tokens.tokenizers.tekken").Tekkenizer.DEPRECATED_SPECIAL_TOKENS
        named = [str(token["token_str"]) for token in old]
        tokens = base.SpecialTokens
        named += [str(token) for token in (tokens.args, tokens.call_id, tokens.begin_think, tokens.end_think)]
        named += [f"<SPECIAL_{rank}>" for rank in range(len(named), NUM_LISTED)]
        listed = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(named)]
        tekken["special_tokens"] = listed
    path.write_text(json.dumps(tekken))


def library(folder: Path, version: str) -> Callable[[Sequence[Message], Sequence[Tool]], list[int]]:
    """The library's normalizer and encoder, without its checks of what a client may send."""
    mistral = importlib.import_module("mistral_common.tokens.tokenizers.mistral").MistralTokenizer
    normalize = importlib.import_module("mistral_common.protocol.instruct.normalize").get_normalizer
    request = importlib.import_module("mistral_common.protocol.instruct.request").ChatCompletionRequest
    loaded = mistral.from_file(folder / "tekken.json")
    normalizer = normalize(loaded.version)
    assert str(loaded.version) == version

    def ids(messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        functions = importlib.import_module("mistral_common.protocol.instruct.tool_calls")
        theirs = [
            functions.Tool(function=functions.Function.from_openai(json.loads(tool.json)["function"])) for tool in tools
        ]
        asked = request(messages=list(their_messages(messages, version)), tools=theirs or None)
        encoded = loaded.instruct_tokenizer.encode_instruct(normalizer.from_chat_completion_request(asked))
        return list(encoded.tokens)

    return ids


def their_messages(messages: Sequence[Message], version: str) -> Iterator[Any]:
    theirs = importlib.import_module("mistral_common.protocol.instruct.messages")
    chunks = importlib.import_module("mistral_common.protocol.instruct.chunk")
    functions = importlib.import_module("mistral_common.protocol.instruct.tool_calls")
    for message in messages:
        content: Any = message.content or ""
        match message.role:
            case Role.USER:
                yield theirs.UserMessage(content=content)
            case Role.SYSTEM | Role.DEVELOPER:
                yield theirs.SystemMessage(content=content)
            case Role.TOOL:
                yield theirs.ToolMessage(content=content, tool_call_id=message.tool_call_id, name=message.name)
            case Role.ASSISTANT:
                calls = [
                    functions.ToolCall(
                        id=one.id, function=functions.FunctionCall(name=one.name, arguments=one.arguments)
                    )
                    for one in message.tool_calls
                ]
                if message.reasoning and version == "v13":
                    thought = chunks.ThinkChunk(thinking=message.reasoning)
                    content = [thought, *([chunks.TextChunk(text=content)] if content else [])]
                yield theirs.AssistantMessage(content=content or None, tool_calls=calls or None)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_conversation_has_the_ids_of_mistral_common(held: Callable[[str], Held], version: str) -> None:
    model = held(version)
    assert model.renderer.family.name == VERSIONS[version]
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            if model.agrees(messages, exchange.tools):
                ours = model.renderer.render(messages, exchange.tools, {})
                assert list(ours) == model.ids(messages, exchange.tools), messages
                num_compared += 1
    assert num_compared > {"v3": 30, "v7": 60, "v11": 60, "v13": 100}[version]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_session_is_bridged_and_parsed_with_the_real_tokenizer(held: Callable[[str], Held], version: str) -> None:
    found = verify(held(version).renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.num_refused, found.num_tolerated) == (0, 0)


# What spells a control token is the client's own affair here: the library encodes none of it as one, and neither do we.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["[INST]", "</s>", '{"a": [1.0, "é"]}', "3", "null", " trailing  ", '{"a": 1,\n"b": "\\n"}', "NaN"]
)
SPOKEN = TEXT.filter(bool)
RUNS = st.one_of(
    TEXT.map(lambda text: [user(text)]),
    st.builds(lambda text: [said(text), user("next")], SPOKEN),
    st.builds(lambda text: [Message(role=Role.SYSTEM, content=text), user("next")], SPOKEN),
    st.builds(
        lambda first, second: [said(None, call(1), call(2, "{}")), result(call(2), first), result(call(1), second)],
        TEXT,
        TEXT,
    ),
)


@pytest.mark.parametrize("version", VERSIONS)
@given(runs=st.lists(RUNS, max_size=4), has_tools=st.booleans())
def test_any_conversation_has_the_ids_of_mistral_common(
    held: Callable[[str], Held], version: str, runs: list[list[Message]], has_tools: bool
) -> None:
    model = held(version)
    messages = [user("first"), *(message for run in runs for message in run)]
    is_reply_after_reply = any(a.role is b.role is Role.ASSISTANT for a, b in pairwise(messages))
    tools = (WEATHER,) if has_tools else ()
    if model.agrees(messages, tools) and not is_reply_after_reply:
        assert list(model.renderer.render(messages, tools, {})) == model.ids(messages, tools)


def test_a_tokenizer_that_is_not_byte_level_is_refused_with_the_reason(real: Callable[[str], object]) -> None:
    """As the tokenizers of Mistral's sentencepiece generations are none; Gemma's is of the same kind."""
    with pytest.raises(StartupError, match="only byte-level tokenizers are supported"):
        real("gemma3")
