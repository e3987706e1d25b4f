"""Any template as it stands: what it shows is seen, and what it rewrites is refused."""

from pathlib import Path

import pytest
import tokenizers

from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.core.messages import Message, Role
from stenograph.families import TEMPLATE
from stenograph.families.load import Loaded, check_renderer, load_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.append_proof import Law
from stenograph.text.conversations import WEATHER, call, result, said, user
from stenograph.text.template.input import ArgumentsForm
from stenograph.verify.verify import verify

LATE = Message(role=Role.SYSTEM, content="late")
OPENING = "<x>{{ m.role }}\n{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}{{ c.function.arguments | tojson }}</c>{% endfor %}"
TURN = "{% for m in messages %}" + OPENING + CALLS + "<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<x>assistant\n{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
MOVED = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}" + OPENING + "<|im_end|>\n{% endfor %}" + PROMPT
)


@pytest.fixture(scope="module")
def files(reference: tokenizers.Tokenizer) -> ModelFiles:
    return ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=reference.to_str(),
        chat_template=None,
        bos_token=None,
        eos_token="<|im_end|>",
        eos_token_ids=(),
        vocab_size=400,
        max_context_tokens=64,
        architecture="llama",
    )


def loaded(files: ModelFiles, source: str) -> Loaded:
    return load_renderer(files_with(files, source), TEMPLATE.name)


def files_with(files: ModelFiles, source: str) -> ModelFiles:
    fields = {name: getattr(files, name) for name in files.__slots__}
    return ModelFiles(**{**fields, "chat_template": source})


def test_what_a_template_shows_is_seen(files: ModelFiles) -> None:
    plain = loaded(files, TURN.replace(CALLS, "") + PROMPT).renderer
    assert plain.family.shows_tools is False
    assert plain.family.roles == frozenset(Role) - {Role.TOOL}
    assert verify(plain).holds
    with_tools = loaded(files, TOOLS + TURN + PROMPT).renderer
    assert with_tools.family.shows_tools is True
    assert with_tools.family.roles == frozenset(Role)
    assert with_tools.prove().holds
    text = with_tools.tokenizer.decode(with_tools.render([Message(role=Role.DEVELOPER, content="d")], [], {}))
    assert text.startswith("<x>system\nd"), "a template that writes any role has no frame for a developer"


def test_a_template_that_joins_arguments_as_text_is_given_text(files: ModelFiles) -> None:
    source = TOOLS + TURN.replace("c.function.arguments | tojson", "'=' + c.function.arguments") + PROMPT
    renderer = loaded(files, source).renderer
    assert renderer.family.form.arguments is ArgumentsForm.TEXT
    asked = call(1, '{"city":  "a"}')
    ids = renderer.render([user("a"), said(None, asked), result(asked, "b")], [WEATHER], {})
    assert '={"city":  "a"}' in renderer.tokenizer.decode(ids)


def test_a_system_message_that_would_move_to_the_front_is_refused_after_a_reply_only(files: ModelFiles) -> None:
    renderer = loaded(files, MOVED).renderer
    assert renderer.family.early_roles == {Role.SYSTEM, Role.DEVELOPER}
    assert renderer.prove().holds
    renderer.render([user("a"), LATE], [], {})
    with pytest.raises(UnrenderableMessage, match="moves system messages to the front"):
        renderer.bridge([1], said("b"), [LATE], [], {})


@pytest.mark.parametrize(
    ("source", "late_roles"),
    [
        pytest.param(TOOLS + TURN + PROMPT, {Role.SYSTEM, Role.DEVELOPER}, id="in place"),
        pytest.param(MOVED, set[Role](), id="moved to the front"),
        pytest.param(
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('late') }}{% endif %}" + OPENING + "<|im_end|>\n{% endfor %}" + PROMPT,
            set[Role](),
            id="refused",
        ),
        pytest.param(
            "{% for m in messages if m.role != 'system' or loop.first %}"
            + OPENING
            + "<|im_end|>\n{% endfor %}"
            + PROMPT,
            set[Role](),
            id="left out",
        ),
        pytest.param(
            "{% for m in messages %}{% if m.role == 'system' and messages[loop.index0 - 1].role == 'user' %}"
            "{% else %}" + OPENING + "<|im_end|>\n{% endif %}{% endfor %}" + PROMPT,
            set[Role](),
            id="left out after a user alone",
        ),
    ],
)
def test_the_roles_that_a_template_writes_where_they_stand_are_seen(
    files: ModelFiles, source: str, late_roles: set[Role]
) -> None:
    assert loaded(files, source).renderer.family.late_roles == late_roles


@pytest.mark.parametrize(
    ("source", "law"),
    [
        ("{{ messages | length }}" + TURN + PROMPT, Law.HISTORY),
        (TURN + "{% if add_generation_prompt %}<x>assistant\n<think>\n{% endif %}", Law.PROMPT),
        (TURN + PROMPT.replace("assistant", "assistant{{ messages[0].content | length }}"), Law.PROMPT),
        (TURN.replace("{{ m.role }}", "{{ m.role }}{{ loop.index if m.role == 'user' }}") + PROMPT, Law.SUFFIX),
    ],
)
def test_each_law_that_a_template_breaks_is_named(files: ModelFiles, source: str, law: Law) -> None:
    renderer = loaded(files, source).renderer
    proof = renderer.prove()
    assert not proof.holds
    assert law in {rewrite.law for rewrite in proof.rewrites}
    with pytest.raises(StartupError, match="append-only"):
        check_renderer(files_with(files, source), renderer)


def test_a_template_that_shows_no_plain_conversation_is_refused_in_its_own_words(files: ModelFiles) -> None:
    source = "{{ raise_exception('not for chats') }}"
    with pytest.raises(StartupError, match="not for chats"):
        check_renderer(files_with(files, source), loaded(files, source).renderer)


def test_jinja2_renders_what_minijinja_writes_otherwise_or_does_not_know(files: ModelFiles) -> None:
    otherwise = loaded(files, TURN.replace("m.content", "m.content | trim") + PROMPT)
    assert any("where jinja2 writes" in note for note in otherwise.notes)
    marked = loaded(
        files, TURN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}") + PROMPT
    )
    assert any("minijinja does not know it" in note for note in marked.notes)
    assert marked.renderer.render([user("a")], [], {}) == otherwise.renderer.render([user("a")], [], {})
    assert not loaded(files, TURN + PROMPT).notes
