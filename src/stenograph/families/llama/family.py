"""Llama 3 to 3.3 Instruct: `<|start_header_id|>`; from 3.1 on tools, with results in the role `ipython`.

The stock template of 3.1 and 3.2 shows one call a reply, and drops the text beside it. Edited, it shows several, and
the text, with `<|python_tag|>` between, so that the call is seen. With tools it writes them into whatever message comes
first; edited, system messages keep their own frames before the user's message with the tools. Conversations with one
system message at most, and one call a reply without text, are written as by the stock template, byte by byte.

3.2's writes today's date into the first message: a line keeps the day on which it began. The built-in tools of 3.1 are
refused: a reply with calls to them ends with another token than one without.

Source: the chat templates in the models' own files.
"""

from stenograph.families.llama.calls import LLAMA_CALLS, PYTHON_TAG, SEPARATOR
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReplySyntax

_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_HEADER = "<|start_header_id|>assistant<|end_header_id|>\\n\\n"
_TRIMS = "message['content'] | trim + '<|eot_id|>'"

_HAS_CUSTOM_TOOLS = "{%- if custom_tools is defined %}"
_NO_BUILTIN_TOOLS = "builtin_tools is not supported"
_HAS_MESSAGES = "{%- if messages | length != 0 %}"
_HAS_CALLS = "{%- elif 'tool_calls' in message %}"
_WRITES_NAME = """'{"name": "' + tool_call.name + '", '"""

_LEADING_SYSTEM = (
    "{%- set leading = namespace(count=0) %}"
    "{%- for message in messages %}{%- if loop.index0 == leading.count and message.role == 'system' %}"
    "{%- set leading.count = leading.count + 1 %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- set messages = messages[leading.count:] %}"
)
_ONE_CALL = """'{"name": "' + each.function.name + '", "parameters": ' + (each.function.arguments | tojson) + '}'"""
_CALLS = (
    "{%- set text = (message['content'] or '') | trim %}"
    "{{- '" + _HEADER + "' + text + ('" + PYTHON_TAG + "' if text else '') }}"
    "{%- for each in message.tool_calls %}"
    "{{- ('' if loop.first else '" + SEPARATOR + "') + " + _ONE_CALL + " }}"
    "{%- endfor %}{{- '<|eot_id|>' }}"
)

LLAMA3 = Family(
    name="llama3",
    summary="Llama 3 Instruct: no tools",
    signs=Signs(tokens=_TOKENS, template=("<|start_header_id|>", _TRIMS), not_template=("tool_calls", "think")),
    syntax=ReplySyntax(reasoning=None, calls=None),
)

LLAMA3_1 = Family(
    name="llama3.1",
    summary="Llama 3.1, 3.2 and 3.3 Instruct",
    signs=Signs(
        tokens=(*_TOKENS, "<|eom_id|>", PYTHON_TAG),
        template=(_HAS_CALLS, _WRITES_NAME, "<|start_header_id|>ipython<|end_header_id|>"),
        not_template=("think",),
    ),
    edits=(
        Edit(
            old=_HAS_CUSTOM_TOOLS,
            new="{%- if builtin_tools is defined %}{{- raise_exception('"
            + _NO_BUILTIN_TOOLS
            + "') }}{%- endif %}"
            + _HAS_CUSTOM_TOOLS,
        ),
        Edit(
            old=_HAS_MESSAGES,
            new=_LEADING_SYSTEM + "{%- if messages | length != 0 and messages[0]['role'] == 'user' %}",
        ),
        Edit(old=_HAS_CALLS, new=_HAS_CALLS + _CALLS + "{%- elif false %}"),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=None, calls=LLAMA_CALLS),
    reply_stops=("<|eom_id|>",),
)
