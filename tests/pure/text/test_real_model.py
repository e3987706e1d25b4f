"""The text side of the real SmolLM2 file."""

from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stenograph.core.messages import Message, Role
from stenograph.families import family_for
from stenograph.model.files import load_model_files
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.renderer import Renderer
from stenograph.text.template.template import ChatTemplate

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module", params=list(EncoderKind), ids=str)
def real(smollm2_path: Path, request: pytest.FixtureRequest) -> Renderer:
    kind: EncoderKind = request.param
    files = load_model_files(smollm2_path)
    family = family_for(files)
    template = ChatTemplate(family.template or "", files.bos_token, files.eos_token)
    tokenizer = Tokenizer(files.tokenizer_json, sample_texts=[family.template or ""], prefer=kind)
    assert tokenizer.encoder is kind, tokenizer.why_not_preferred
    return Renderer(tokenizer, template, family)


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


def test_the_real_models_encoders_agree_on_code_points_of_every_plane(smollm2_path: Path) -> None:
    tokenizer_json = load_model_files(smollm2_path).tokenizer_json
    fast, reference = (Tokenizer(tokenizer_json, prefer=kind) for kind in EncoderKind)
    points = [*range(0x3400), *range(0x3400, 0xD800, 17), *range(0xE000, 0x110000, 53)]
    for start in range(0, len(points), 5000):
        text = "".join(f"a{chr(point)}1{chr(point)} {chr(point)}\n" for point in points[start : start + 5000])
        assert fast.encode_plain(text) == reference.encode_plain(text)
