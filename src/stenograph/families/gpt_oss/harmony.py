"""Conversations in harmony, the format of gpt-oss: frames, channels, the system message and the tools' namespace.

A reply is several messages: its reasoning on the channel `analysis`, a call on `commentary` with the function as its
recipient, text beside a call on `commentary` too, and text for the user on `final`. The format's own renderer leaves
the reasoning of answered turns out of later prompts; here it is kept: a line is never rewritten.

Source: the harmony response format as OpenAI publishes it; checked against the output of the package openai-harmony.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.day import STRFTIME_NOW, Day
from stenograph.core.errors import UnrenderableMessage
from stenograph.families.gpt_oss.reply import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    START,
)
from stenograph.families.gpt_oss.types import typescript

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_KNOWLEDGE_CUTOFF = "2024-06"
_DATE = "conversation_start_date"
_EFFORTS = ("low", "medium", "high")
_INSTRUCTING = ("system", "developer")

Dict = Mapping[str, object]


class HarmonyEncoder:
    """Encoder in the place of a chat template. Stateless.

    It shows the session's day as the date, or `conversation_start_date`; an empty one shows no date.
    """

    names = frozenset({"reasoning_effort", "model_identity", "knowledge_cutoff", _DATE, STRFTIME_NOW, "builtin_tools"})

    def render(
        self,
        messages: Sequence[Dict],
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        """The conversation's text. Raises UnrenderableMessage: an argument, a tool or a message has no spelling."""
        pieces = [_system(kwargs, has_tools=bool(tools))]
        instructions = str(messages[0]["content"]) if messages and messages[0]["role"] in _INSTRUCTING else None
        if instructions is not None or tools:
            pieces.append(_frame("developer", _developer(instructions, tools or ())))
        past = messages if instructions is None else messages[1:]
        calls: Sequence[Dict] = ()
        for message in past:
            if message["role"] == "assistant":
                calls = _list(message.get("tool_calls")) or calls
                pieces.extend(_reply(message))
            else:
                pieces.append(_other(message, calls))
        if add_generation_prompt:
            pieces.append(f"{START}assistant")
        return "".join(pieces)


def _frame(author: str, content: str, *, end: str = END) -> str:
    return f"{START}{author}{MESSAGE}{content}{end}"


def _system(kwargs: Mapping[str, object], *, has_tools: bool) -> str:
    """The system message: the model's identity, its reasoning effort, and the channels."""
    if kwargs.get("builtin_tools"):
        raise UnrenderableMessage(
            "The tools that gpt-oss has built in, browser and python, are not served: a client can offer its own.",
            blame=Blame(RequestPart.TEMPLATE_KWARGS, path=("builtin_tools",)),
        )
    effort = kwargs.get("reasoning_effort", "medium")
    if effort not in _EFFORTS:
        raise UnrenderableMessage(
            f"reasoning_effort must be {', '.join(_EFFORTS[:-1])} or {_EFFORTS[-1]} for this model, not {effort!r}.",
            blame=Blame(RequestPart.TEMPLATE_KWARGS, path=("reasoning_effort",)),
        )
    lines = [_argument(kwargs, "model_identity", _IDENTITY)]
    lines.append(f"Knowledge cutoff: {_argument(kwargs, 'knowledge_cutoff', _KNOWLEDGE_CUTOFF)}")
    day = kwargs.get(STRFTIME_NOW)
    if date := _argument(kwargs, _DATE, day("%Y-%m-%d") if isinstance(day, Day) else ""):
        lines.append(f"Current date: {date}")
    lines += ["", f"Reasoning: {effort}", ""]
    lines.append(f"# Valid channels: {ANALYSIS}, {COMMENTARY}, {FINAL}. Channel must be included for every message.")
    if has_tools:
        lines.append(f"Calls to these tools must go to the {COMMENTARY} channel: 'functions'.")
    return _frame("system", "\n".join(lines))


def _argument(kwargs: Mapping[str, object], name: str, default: str) -> str:
    value = kwargs.get(name, default)
    if not isinstance(value, str):
        raise UnrenderableMessage(f"{name} must be a string.", blame=Blame(RequestPart.TEMPLATE_KWARGS, path=(name,)))
    return value


def _developer(instructions: str | None, tools: Sequence[object]) -> str:
    """A developer's message: instructions and functions."""
    sections = [] if instructions is None else [f"# Instructions\n\n{instructions}"]
    if tools:
        lines = ["## functions", "", "namespace functions {", "", *(line for tool in tools for line in _function(tool))]
        sections += ["# Tools", "\n".join((*lines, "} // namespace functions"))]
    return "\n\n".join(sections)


def _function(tool: object) -> Iterator[str]:
    """A function's description and type; after it an empty line."""
    function = _dict(_dict(tool).get("function"))
    name, description, schema = function.get("name"), function.get("description"), function.get("parameters")
    if not isinstance(name, str):
        raise UnrenderableMessage(
            "A tool of this model must be a function with a name.", blame=Blame(RequestPart.TOOLS)
        )
    if isinstance(description, str):
        yield from (f"// {line}" for line in _lines(description))
    try:
        parameters = "" if schema is None else f"_: {typescript(schema)}"
    except RecursionError as error:
        raise UnrenderableMessage(
            f"The parameters of {name!r} are nested too deep.", blame=Blame(RequestPart.TOOLS)
        ) from error
    yield f"type {name} = ({parameters}) => any;"
    yield ""


def _lines(text: str) -> list[str]:
    """Lines, without a carriage return before the line feed, and without an empty one at the end."""
    lines = text.split("\n")
    ended = [line.removesuffix("\r") for line in lines[:-1]]
    return [*ended, lines[-1]] if lines[-1] else ended


def _reply(message: Dict) -> Iterator[str]:
    calls, content = _list(message.get("tool_calls")), str(message["content"] or "")
    if reasoning := message.get("reasoning_content"):
        yield _frame(f"assistant{CHANNEL}{ANALYSIS}", str(reasoning))
    if not calls:
        yield _frame(f"assistant{CHANNEL}{FINAL}", content)
    elif content:
        yield _frame(f"assistant{CHANNEL}{COMMENTARY}", content)
    for call in calls:
        function = _dict(call["function"])
        author = f"assistant to={FUNCTIONS}{function['name']}{CHANNEL}{COMMENTARY} {CONSTRAIN}json"
        yield _frame(author, str(function["arguments_json"]), end=CALL)


def _other(message: Dict, calls: Sequence[Dict]) -> str:
    """A message other than a reply. A tool's comes from the function named in the call it answers."""
    role, content = str(message["role"]), str(message["content"])
    if role in _INSTRUCTING:
        return _frame("developer", f"# Instructions\n\n{content}")
    if role != "tool":
        return _frame(role, content)
    named = (_dict(call["function"])["name"] for call in calls if call["id"] == message.get("tool_call_id"))
    name = next(named, message.get("name"))
    if name is None:
        raise UnrenderableMessage("A tool's message must answer a call of the last reply that made any, by its id.")
    return _frame(f"{FUNCTIONS}{name} to=assistant{CHANNEL}{COMMENTARY}", content)


def _dict(value: object) -> Dict:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Dict]:
    return cast("list[Dict]", value) if isinstance(value, list) else []
