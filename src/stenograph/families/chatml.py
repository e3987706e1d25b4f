"""SmolLM2 Instruct: ChatML with a default system message; its stock template has no tools, ours adds them.

And any other ChatML model: its own template, as far as that goes; ours where the model brings none.

Source of the frame and of SmolLM2's system message: the chat template in the model's own files.
"""

from pathlib import Path

from stenograph.core.messages import Role
from stenograph.text.family import Family, Signs

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_BODY = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")


def chatml_template(default_system: str) -> str:
    """The ChatML template with tools; an empty `default_system` puts none before a conversation without one."""
    return f"{{%- set default_system = '{default_system}' -%}}\n{_BODY}"


SMOLLM2 = Family(
    name="smollm2",
    summary="SmolLM2 Instruct",
    signs=Signs(tokens=("<|im_start|>", "<|im_end|>"), template=(DEFAULT_SYSTEM,)),
    template=chatml_template(DEFAULT_SYSTEM),
    roles=frozenset(Role),
    shows_tools=True,
    tools_before_turns=True,
)

CHATML = Family(
    name="chatml",
    summary="any other model with `<|im_start|>` and `<|im_end|>`",
    signs=Signs(tokens=("<|im_start|>", "<|im_end|>"), template=("<|im_start|>", "<|im_end|>")),
    spare_template=chatml_template(""),
)
