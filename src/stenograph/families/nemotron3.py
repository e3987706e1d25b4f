"""Nemotron 3: ChatML with Qwen's XML calls; reasoning in `<think>`, opened or closed by every prompt.

Two things in the stock template rewrite history: it drops the reasoning of replies before the last user message, unless
`truncate_history_thinking` is false, as it is here; and it writes an empty pair of marks on one line into a reply
without reasoning, whatever its prompt had opened. With that edited, every reply has the block begun by its prompt.

Source: the chat templates of Nemotron 3 Nano, Super and Ultra, and of Nemotron 3.5 Lightning.
"""

from dataclasses import replace

from stenograph.families.qwen.xml_calls import QWEN_XML_CALLS
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

_EMPTY = '"<think></think>" ~ content'

NEMOTRON3 = Family(
    name="nemotron3",
    summary="Nemotron 3, thinking or not",
    signs=Signs(tokens=("<|im_start|>", "<|im_end|>"), template=("truncate_history_thinking", "<function=", _EMPTY)),
    fixed_kwargs={"truncate_history_thinking": False},
    edits=(Edit(old=_EMPTY, new=r'("<think>\n\n</think>\n" if enable_thinking else "<think></think>") ~ content'),),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=ReasoningMarks(after_close="\n"), calls=replace(QWEN_XML_CALLS, lead="\n")),
)
