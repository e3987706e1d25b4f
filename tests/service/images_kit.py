"""A model of the tests that takes images and shows tools: ChatML, each image at one placeholder."""

from importlib.resources import files
from pathlib import Path

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer

from .conftest import END

PAD = "<|image_pad|>"
TOKENS = ("<|vision_start|>", "<|vision_end|>", PAD, "<tool_call>", "</tool_call>")
NUM_IDS = 320 + len(TOKENS)

_TEXT_ALONE = "{%- set content = message.content or '' -%}"
_WITH_IMAGES = """
{%- set content -%}
    {%- if message.content is string or not message.content -%}{{- message.content or '' -}}
    {%- else -%}
        {%- for part in message.content -%}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endset -%}"""


def seeing_renderer(*, max_context_tokens: int = 4096) -> Renderer:
    chatml = (files("stenograph.families") / "chatml.jinja").read_text(encoding="utf-8")
    assert _TEXT_ALONE in chatml
    model = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(more=TOKENS),
        chat_template="{%- set default_system = '' -%}" + chatml.replace(_TEXT_ALONE, _WITH_IMAGES),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=NUM_IDS,
        max_context_tokens=max_context_tokens,
        architecture="llama",
    )
    return make_renderer(model, "qwen3-vl")
