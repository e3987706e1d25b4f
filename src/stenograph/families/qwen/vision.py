"""Qwen2.5-VL and Qwen3-VL: ChatML with images; the latter with Hermes calls, and no reasoning in its Instruct models.

Their templates are append-only as they stand, but for an argument: `add_vision_id` numbers the images of a
conversation, which a bridge does not see. Qwen2.5-VL's template shows no tools. An image is
`<|vision_start|><|image_pad|><|vision_end|>`; an engine repeats the token in the middle for each patch of it.

Source: the chat templates of both, as trl 1.16 ships them.
"""

from stenograph.text.family import Family, Signs
from stenograph.text.reply_syntax import ReplySyntax

IMAGE_PAD = "<|image_pad|>"
UNNUMBERED = {"add_vision_id": False}
_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE_PAD)
_IMAGE = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"

QWEN3_VL = Family(
    name="qwen3-vl",
    summary="Qwen3-VL Instruct",
    signs=Signs(
        tokens=(*_TOKENS, "<tool_call>"), template=(_IMAGE, "<tool_call>", "<tool_response>"), not_template=("<think>",)
    ),
    fixed_kwargs=UNNUMBERED,
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=None),
    image_placeholder=IMAGE_PAD,
)

QWEN2_5_VL = Family(
    name="qwen2.5-vl",
    summary="Qwen2.5-VL Instruct: no tools",
    signs=Signs(tokens=_TOKENS, template=(_IMAGE,), not_template=("<tool_call>", "<think>")),
    fixed_kwargs=UNNUMBERED,
    syntax=ReplySyntax(reasoning=None),
    image_placeholder=IMAGE_PAD,
)
