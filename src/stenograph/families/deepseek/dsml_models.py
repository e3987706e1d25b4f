"""DeepSeek V3.2 and V4: no chat template, so an encoder of ours; calls in DSML; reasoning in `<think>`, if asked for.

Where the model's files bring their own encoder, in Python, tools are described in its words; it is not run.

`chat_template_kwargs` `{"thinking": true}` asks for it, as with V3.1. A developer's message is shown as a system
message: the published frames for developers are for other ends.
Source: the encoders published with the models (encoding_dsv32.py, encoding_dsv4.py).
"""

from stenograph.core.messages import Role
from stenograph.families.deepseek.dsml import MARK, dsml_calls
from stenograph.families.deepseek.encoder import DsmlEncoder, asking_v3_2, asking_v4
from stenograph.families.deepseek.v3 import THINK_MARKS
from stenograph.families.deepseek.words import own_words
from stenograph.text.family import Family, Signs
from stenograph.text.reply_syntax import ReplySyntax

_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", MARK)
_ROLES = frozenset({Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL})
_EARLY_ROLES = frozenset({Role.SYSTEM, Role.DEVELOPER})
_V3_2 = DsmlEncoder(
    block="function_calls",
    asking=asking_v3_2,
    names=frozenset({"thinking"}),
    words=own_words("function_calls"),
)
_V4 = DsmlEncoder(
    block="tool_calls",
    asking=asking_v4,
    names=frozenset({"thinking", "reasoning_effort"}),
    words=own_words("tool_calls"),
)

DEEPSEEK_V3_2 = Family(
    name="deepseek-v3.2",
    summary="DeepSeek V3.2, thinking or not",
    signs=Signs(tokens=_TOKENS, without_template=True),
    encoder=_V3_2,
    encoder_of_source=_V3_2.in_words_of,
    roles=_ROLES,
    early_roles=_EARLY_ROLES,
    shows_tools=True,
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=THINK_MARKS, calls=dsml_calls(_V3_2.block)),
)

DEEPSEEK_V4 = Family(
    name="deepseek-v4",
    summary="DeepSeek V4, thinking or not",
    signs=Signs(tokens=(*_TOKENS, "<｜latest_reminder｜>"), without_template=True),
    encoder=_V4,
    encoder_of_source=_V4.in_words_of,
    roles=_ROLES,
    early_roles=_EARLY_ROLES,
    shows_tools=True,
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=THINK_MARKS, calls=dsml_calls(_V4.block)),
)
