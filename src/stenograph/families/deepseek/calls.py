"""DeepSeek's calls up to V3.1: in one block of control tokens, each with a name and the JSON of its arguments.

V3 and R1 write `function`, then the name on a line, then the arguments fenced as JSON; V3.1 the name and the arguments
alone. Source: the chat templates in the models' own files.
"""

import re

from stenograph.text.call_syntax import NAME, CallSpelling
from stenograph.text.json_calls import FramedCalls

BLOCK_OPEN, BLOCK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def _calls(call: str, spelling: CallSpelling) -> FramedCalls:
    return FramedCalls(
        openers=(BLOCK_OPEN,),
        close=BLOCK_CLOSE,
        markers=(BLOCK_OPEN, BLOCK_CLOSE, CALL_OPEN, CALL_CLOSE, SEPARATOR),
        head=re.compile(rf"\s*{re.escape(CALL_OPEN)}"),
        call_close=CALL_CLOSE,
        call=re.compile(call),
        spelling=spelling,
    )


_SEP = re.escape(SEPARATOR)

CALLS = _calls(
    rf"(?s)(?P<name>.*?){_SEP}(?P<arguments>.*)",
    CallSpelling(begin=BLOCK_OPEN, head=f"{CALL_OPEN}{NAME}{SEPARATOR}", tail=CALL_CLOSE, end=BLOCK_CLOSE),
)
FENCED_CALLS = _calls(
    # The fences may share their line break.
    rf"(?s)\s*function\s*{_SEP}(?P<name>[^\n]*)\n```json(?:\n(?P<arguments>.*))?\n```",
    CallSpelling(
        begin=BLOCK_OPEN,
        head=f"{CALL_OPEN}function{SEPARATOR}{NAME}\n```json\n",
        tail=f"\n```{CALL_CLOSE}",
        between="\n",
        end=BLOCK_CLOSE,
    ),
)
