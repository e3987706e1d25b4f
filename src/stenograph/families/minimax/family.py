"""MiniMax-M2 and M3. Of M2 every prompt opens the reasoning, which the model is to see again in later turns.

The stock template writes a reply's reasoning only after the last user message. Edited, a reply is always written with
its block, an empty one where it has no reasoning, as it was sampled after its prompt. The template shows one system
message, the first; another is dropped by the stock template and refused by this one.

M3's template writes every reply's reasoning, or the mark that closes it alone. It leaves out what is null in a call's
arguments, which would show another call than was made: edited, it writes null. With `thinking_mode` enabled the prompt
opens the reasoning, so a reply without any has an empty block, edited likewise. A late system message is refused.

MiniMax-M2's calls: one `<minimax:tool_call>` block of all calls, each an `<invoke name="…">` with its parameters.

A parameter is bare text, typed by the tool's schema. Only the block's two markers are tokens of their own. The template
has a line break before a block, too.

Source: the chat templates and the tokenizers in the files of MiniMax-M2.7 and M3.
"""

import re

from stenograph.families.minimax.m3_calls import M3_CALLS, MARK
from stenograph.text.call_syntax import NAME, PLAIN_NAME, CallSpelling
from stenograph.text.element_calls import ElementCalls, value_end
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"

_INVOKE, _INVOKE_CLOSE = "<invoke name=", "</invoke>"
_PARAMETER, _PARAMETER_CLOSE = "<parameter name=", "</parameter>"
_HEAD = rf'{_PARAMETER}"([^<>\n]{{1,256}})">'

MINIMAX_CALLS = ElementCalls(
    openers=(OPEN,),
    close=CLOSE,
    markers=(OPEN, CLOSE),
    lead="\n",
    call=re.compile(rf'\s*{_INVOKE}"([^"<>\n]+)">'),
    argument=re.compile(rf"\s*{_HEAD}"),
    call_end=re.compile(rf"\s*{_INVOKE_CLOSE}\s*"),
    value_head=re.compile(_HEAD),
    value_end=value_end(_PARAMETER_CLOSE, (_PARAMETER,), (_INVOKE_CLOSE, _INVOKE), (_INVOKE_CLOSE, CLOSE)),
    value_close=_PARAMETER_CLOSE,
    argument_head=f'{_PARAMETER}"{NAME}">',
    argument_tail=f"{_PARAMETER_CLOSE}\n",
    spelling=CallSpelling(
        begin=f"\n{OPEN}\n",
        head=f'{_INVOKE}"{NAME}">\n',
        tail=f"{_INVOKE_CLOSE}\n",
        end=CLOSE,
        names=PLAIN_NAME,
    ),
)

_IS_LATE = "{%- if reasoning_content and loop.index0 > ns.last_user_index -%}"
_USER = "{%- elif message.role == 'user' -%}"
_REFUSAL = "only the first message can be a system message"

MINIMAX_M2 = Family(
    name="minimax-m2",
    summary="MiniMax-M2 to MiniMax-M2.7",
    signs=Signs(tokens=("]~b]", "[e~[", "<minimax:tool_call>", "<think>"), template=("<minimax:tool_call>", _IS_LATE)),
    edits=(
        Edit(old=_IS_LATE, new="{%- if true -%}"),
        Edit(
            old=_USER,
            new=f"{{%- elif message.role == 'system' -%}}{{{{- raise_exception('{_REFUSAL}') }}}}{_USER}",
        ),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(calls=MINIMAX_CALLS),
)

_NO_THINKING = "{#- No thinking rendered → prefix with think_end_token -#}\n            {{- think_end_token }}"
_EMPTY_BLOCK = (
    "{{- (think_begin_token if thinking_mode is defined and thinking_mode == 'enabled' else '') ~ think_end_token }}"
)
_NONE_IN = "for k, v in val.items() if v is not none"
_NONE_AT = "for k, v in _args.items() if v is not none"
_NONE_IS = "{#- Should be unreachable when upstream cleaning is applied. -#}"
_IS_LIST = "val is iterable and val is not string"
_M3_USER = "{%- elif message.role == 'user' -%}"

MINIMAX_M3 = Family(
    name="minimax-m3",
    summary="MiniMax-M3",
    signs=Signs(
        tokens=("]~b]", "[e~[", MARK, "<tool_call>", "<mm:think>", "</mm:think>"),
        template=("ns_token ~ '<tool_call>'", _NO_THINKING),
    ),
    edits=(
        Edit(old=_NO_THINKING, new=_EMPTY_BLOCK),
        Edit(old=_NONE_IN, new="for k, v in val.items()"),
        Edit(old=_NONE_AT, new="for k, v in _args.items()"),
        Edit(old=_NONE_IS, new="{{- 'null' }}"),
        # In minijinja none is iterable.
        Edit(old=_IS_LIST, new=f"{_IS_LIST} and val is not none"),
        Edit(
            old=_M3_USER,
            new="{%- elif message.role in ['system', 'developer'] -%}"
            f"{{{{- raise_exception('{_REFUSAL}') }}}}{_M3_USER}",
        ),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(
        reasoning=ReasoningMarks(
            open="<mm:think>",
            close="</mm:think>",
            after_open="",
            before_close="",
            after_close="",
            closes_bare=True,
        ),
        calls=M3_CALLS,
    ),
)
