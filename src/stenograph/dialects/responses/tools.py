"""Tools of Responses: functions, namespaces of them, custom tools and a client's tool search, as functions. Pure.

Owns a tool's name below this dialect, and the form of its calls as they go back to the client. Hosted tools are
recorded and not shown.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, cast, get_args

import msgspec
from msgspec import UNSET, Meta, Raw

from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.messages import Tool
from stenograph.dialects.common.json_bodies import decode_part
from stenograph.dialects.common.pointers import shown
from stenograph.dialects.common.sampling_fields import Unread
from stenograph.dialects.common.template_input import function_tool
from stenograph.dialects.responses.fields import HostedTool

HOSTED: tuple[str, ...] = get_args(HostedTool)
SEARCH = "tool_search"
INPUT = "input"
"""The one parameter of a custom tool."""

CallKind = Literal["function", "custom", "search"]


class CallForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client's form of a tool: its kind, its own name, and its namespace if it is in one."""

    name: str
    kind: CallKind = "function"
    namespace: str | None = None


ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A function. What is not shown to the model is dropped."""

    name: ToolName
    type: str = "function"
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    defer_loading: Unread = UNSET
    allowed_callers: Unread = UNSET
    output_schema: Unread = UNSET
    is_async: Unread = msgspec.field(default=UNSET, name="async")
    cache_control: Unread = UNSET


class CustomFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a custom tool's input: any text, or a text in a grammar."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A custom tool, whose input is a text."""

    name: ToolName
    type: str = "custom"
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: Unread = UNSET
    allowed_callers: Unread = UNSET
    is_async: Unread = msgspec.field(default=UNSET, name="async")


class NamespaceSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A namespace of tools. Its description is not shown: those of its tools are."""

    name: ToolName
    tools: list[Raw]
    type: str = "namespace"
    description: str | None = None


class SearchSpec(msgspec.Struct, forbid_unknown_fields=True):
    """The search for tools, which the client runs."""

    type: str = SEARCH
    execution: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None


class ToolType(msgspec.Struct):
    """The type of a tool or a tool choice."""

    type: str


class ChoiceSpec(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` as an object."""

    type: str
    name: str
    namespace: str | None = None


_LIST = msgspec.json.Decoder(list[Raw])
_TYPE = msgspec.json.Decoder(ToolType)
_FUNCTION = msgspec.json.Decoder(FunctionSpec)
_CUSTOM = msgspec.json.Decoder(CustomSpec)
_NAMESPACE = msgspec.json.Decoder(NamespaceSpec)
_SEARCH = msgspec.json.Decoder(SearchSpec)
_CHOICE = msgspec.json.Decoder(ChoiceSpec)
_TEXT = msgspec.json.Decoder(str)
_SYNTAXES = ("lark", "regex")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTool:
    """A tool as it is shown, its pointer, and the form of its calls. `input_format` is a custom tool's."""

    tool: Tool
    at: str
    form: CallForm
    input_format: CustomFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolList:
    """The tools of a request: the shown ones, and the recorded ones, as JSON."""

    shown: tuple[ShownTool, ...] = ()
    hosted: tuple[Raw, ...] = field(default=())


def forms_of(tools: Iterable[ShownTool]) -> dict[str, CallForm]:
    """The forms of the calls, without those of functions by their own names."""
    return {one.tool.name: one.form for one in tools if one.form != CallForm(name=one.tool.name)}


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a tool below this dialect."""
    return name if not namespace else f"{namespace}__{name}"


def decode_tools(wire: Unread) -> ToolList:
    """Read `tools`. Raises InvalidRequest or UnrenderableMessage, with a JSON pointer."""
    if not isinstance(wire, Raw) or bytes(wire) == b"null":
        return ToolList()
    found: list[ShownTool] = []
    hosted: list[Raw] = []
    tools = decode_part(wire, _LIST, at="/tools")
    for index, raw in enumerate(tools):
        at = f"/tools/{index}"
        kind = decode_part(raw, _TYPE, at=at).type
        if kind in HOSTED or (kind == SEARCH and not _is_clients(raw, at)):
            hosted.append(raw)
        elif kind == "namespace":
            found += _in_namespace(raw, at)
        else:
            found.append(_shown(raw, kind, at, None))
    _check_names(found)
    return ToolList(shown=tuple(found), hosted=tuple(hosted))


def decode_choice(wire: Unread, tools: Sequence[ShownTool]) -> ToolChoice:
    """Read `tool_choice`. Raises InvalidRequest with a JSON pointer."""
    at = "/tool_choice"
    if not isinstance(wire, Raw) or bytes(wire) == b"null":
        return ToolChoice()
    if bytes(wire).startswith(b'"'):
        said = decode_part(wire, _TEXT, at=at)
        if said not in ("auto", "none", "required"):
            raise InvalidRequest(
                f"tool_choice must be auto, none, required, a function or a custom tool, got {shown(said)}.", param=at
            )
        if said == "required" and not tools:
            raise InvalidRequest("tool_choice 'required' needs tools. Hosted ones are not called here.", param=at)
        return ToolChoice(mode=ToolMode(said))
    kind = decode_part(wire, _TYPE, at=at).type
    if kind == "allowed_tools":
        raise InvalidRequest(
            "tool_choice 'allowed_tools' is refused: it would change which tools the prompt shows. Send the tools that"
            " are allowed.",
            param=f"{at}/type",
        )
    if kind not in ("function", "custom"):
        raise InvalidRequest(
            f"tool_choice.type must be 'function' or 'custom', got {shown(kind)}: no other tool can be called here.",
            param=f"{at}/type",
        )
    choice = decode_part(wire, _CHOICE, at=at, known=ChoiceSpec.__struct_fields__)
    name = flat_name(choice.name, choice.namespace)
    meant = next((one for one in tools if one.tool.name == name and one.form.kind == kind), None)
    if meant is None:
        raise InvalidRequest(f"tool_choice names a tool that is not in tools: {shown(name)}.", param=f"{at}/name")
    if meant.input_format is not None and meant.input_format.syntax == "lark":
        raise InvalidRequest(
            f"tool_choice forces {shown(name)}, whose input has a lark grammar: such a call cannot be held to it. Leave"
            " the choice to the model, or give the tool a regex.",
            param=f"{at}/name",
        )
    return ToolChoice(mode=ToolMode.NAMED, name=name)


def found_tools(wire: Sequence[Raw], at: str) -> Sequence[ShownTool]:
    """The tools found by a search. Raises as `decode_tools`."""
    found: list[ShownTool] = []
    for index, raw in enumerate(wire):
        place = f"{at}/{index}"
        kind = decode_part(raw, _TYPE, at=place).type
        if kind == "namespace":
            found += _in_namespace(raw, place)
        elif kind not in HOSTED:
            found.append(_shown(raw, kind, place, None))
    return found


def _is_clients(raw: Raw, at: str) -> bool:
    return decode_part(raw, _SEARCH, at=at, known=SearchSpec.__struct_fields__).execution == "client"


def _in_namespace(raw: Raw, at: str) -> Iterator[ShownTool]:
    wire = decode_part(raw, _NAMESPACE, at=at, known=NamespaceSpec.__struct_fields__)
    for index, tool in enumerate(wire.tools):
        place = f"{at}/tools/{index}"
        yield _shown(tool, decode_part(tool, _TYPE, at=place).type, place, wire.name)


def _shown(raw: Raw, kind: str, at: str, namespace: str | None) -> ShownTool:
    match kind:
        case "function":
            return _function(decode_part(raw, _FUNCTION, at=at, known=_names(FunctionSpec)), at, namespace)
        case "custom":
            return _custom(decode_part(raw, _CUSTOM, at=at, known=_names(CustomSpec)), at, namespace)
        case "tool_search" if namespace is None:
            return _search(decode_part(raw, _SEARCH, at=at, known=_names(SearchSpec)), at)
        case _:
            raise UnrenderableMessage(
                f"A tool of type {shown(kind)} cannot be shown to the model; functions, namespaces of them and custom"
                " tools can.",
                param=f"{at}/type",
            )


def _function(wire: FunctionSpec, at: str, namespace: str | None) -> ShownTool:
    tool = function_tool(
        flat_name(wire.name, namespace),
        wire.description,
        wire.parameters,
        at=f"{at}/parameters",
        strict=wire.strict,
    )
    return ShownTool(tool=tool, at=at, form=CallForm(name=wire.name, namespace=namespace))


def _custom(wire: CustomSpec, at: str, namespace: str | None) -> ShownTool:
    text: dict[str, object] = {"type": "string"}
    held = dict(text)
    wanted = wire.format
    if wanted is not None and wanted.type == "grammar":
        if wanted.syntax not in _SYNTAXES or not wanted.definition:
            raise InvalidRequest(
                f"A grammar needs its syntax, {' or '.join(_SYNTAXES)}, and its definition.", param=f"{at}/format"
            )
        text["description"] = f"A text in this {wanted.syntax} grammar:\n{wanted.definition}"
        if wanted.syntax == "regex":
            held["pattern"] = f"^(?:{wanted.definition})$"
    elif wanted is not None and wanted.type != "text":
        raise InvalidRequest(
            f"format.type must be 'text' or 'grammar', got {shown(wanted.type)}.", param=f"{at}/format/type"
        )
    tool = function_tool(flat_name(wire.name, namespace), wire.description, _one_text(text), at=at)
    if held != {"type": "string"}:
        pattern = msgspec.json.encode(_one_text(held)).decode()
        tool = Tool(name=tool.name, json=tool.json, parameters_json=pattern)
    form = CallForm(name=wire.name, kind="custom", namespace=namespace)
    return ShownTool(tool=tool, at=at, form=form, input_format=wanted)


def _one_text(text: Mapping[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _search(wire: SearchSpec, at: str) -> ShownTool:
    tool = function_tool(SEARCH, wire.description, wire.parameters, at=f"{at}/parameters")
    return ShownTool(tool=tool, at=at, form=CallForm(name=SEARCH, kind="search"))


def _check_names(found: Sequence[ShownTool]) -> None:
    """Raise InvalidRequest for two tools of one name: a call could mean either."""
    seen: dict[str, str] = {}
    for one in found:
        if one.tool.name in seen:
            raise InvalidRequest(
                f"Two tools are called {shown(one.tool.name)}: this one and that at {seen[one.tool.name]}.",
                param=f"{one.at}/name",
            )
        seen[one.tool.name] = one.at


def _names(struct: type[msgspec.Struct]) -> Sequence[str]:
    return cast("Sequence[str]", struct.__struct_encode_fields__)
