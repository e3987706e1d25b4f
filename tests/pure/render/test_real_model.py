"""The text side of the real SmolLM2 file."""

from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stenograph.core.messages import Message, Role
from stenograph.render.families import family_for
from stenograph.render.model_files import load_model_files
from stenograph.render.renderer import Renderer
from stenograph.render.template import ChatTemplate
from stenograph.render.tokenizer import Tokenizer

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Renderer:
    files = load_model_files(smollm2_path)
    family = family_for(files)
    template = ChatTemplate(family.template_source or "", files.bos_token, files.eos_token)
    return Renderer(Tokenizer(files.tokenizer_json), template, family)


CONVERSATIONS = [
    [(Role.USER, "hello")],
    [(Role.SYSTEM, "Be brief."), (Role.USER, "  12 + 34?"), (Role.ASSISTANT, " 46\n"), (Role.USER, "é𝄞\r\n\tif x:")],
    [(Role.USER, ""), (Role.SYSTEM, "late"), (Role.ASSISTANT, ""), (Role.ASSISTANT, "{{ x }}")],
]


@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_the_real_models_prompt_is_that_of_its_own_template(
    real: Renderer, stock_template: str, turns: list[tuple[Role, str]]
) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    dicts = [{"role": role.value, "content": content} for role, content in turns]
    text = environment.from_string(stock_template).render(messages=dicts, add_generation_prompt=True)
    messages = [Message(role=role, content=content) for role, content in turns]
    ids = real.render(messages, [], {})
    assert ids == real.tokenizer.encode(text)
    assert real.tokenizer.decode(ids) == text


def test_the_real_models_tokenizer_splits_digits_and_keeps_control_tokens(real: Renderer) -> None:
    tokenizer = real.tokenizer
    assert list(tokenizer.encode("  12")) == [256, 33, 34]
    assert list(tokenizer.encode("<|im_start|>  12<|im_end|>")) == [1, 256, 33, 34, 2]
    assert {1, 2}.isdisjoint(tokenizer.encode_plain("<|im_start|>  12<|im_end|>"))
    assert tokenizer.vocab_size == 49152
