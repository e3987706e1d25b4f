"""The choice of a template's engine: the fast one only where it writes what jinja2 writes.

Owns the choice, made once at start: both engines render every kind of conversation. Owns jinja2's sandbox as well, set
up as transformers does. Knows nothing of a template's meaning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.core.messages import Message, Tool
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.conversations import appended, exchanges
from stenograph.text.family import Family
from stenograph.text.template.template import ChatTemplate, Template, to_json
from stenograph.text.writer import Writer

_SHOWN_CHARS = 40
_ARGUMENTS: tuple[Mapping[str, object], ...] = ({}, {"enable_thinking": False})
"""None, and the argument set most often by requests; of use where the template reads it."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks an assistant's text, for anyone interested; it writes nothing."""

    tags = {"generation"}  # noqa: RUF012 -- as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's content alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaTemplate(ChatTemplate):
    """A compiled template of the sandbox."""

    malformed = (jinja2.TemplateError, RecursionError)
    failing = (Exception,)
    """A template is a program: it can fail in any way."""

    def _compile(self, source: str, known: Mapping[str, object]) -> frozenset[str]:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        self._template = environment.from_string(source, globals=dict(known))
        return frozenset(meta.find_undeclared_variables(environment.parse(source)))

    def _written(self, context: Mapping[str, object]) -> str:
        return self._template.render(context)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTemplate:
    """A template, and why it is not the fast engine's; empty if it is."""

    template: Template
    why_not_preferred: str = ""


def choose_template(
    source: str,
    bos_token: str | None,
    eos_token: str | None,
    *,
    tokenizer: Tokenizer,
    family: Family,
    strftime_now: Callable[[str], str] | None = None,
) -> ChosenTemplate:
    """Minijinja's if it writes each conversation as jinja2 does, and refuses where jinja2 refuses; else jinja2's.

    Raises StartupError: jinja2 too says that this is no template.
    """
    jinja = JinjaTemplate(source, bos_token, eos_token, strftime_now=strftime_now)
    try:
        fast = ChatTemplate(source, bos_token, eos_token, strftime_now=strftime_now, for_large=jinja)
    except StartupError as error:
        return ChosenTemplate(template=jinja, why_not_preferred=f"minijinja does not know it: {error}")
    ours, theirs = (Writer(tokenizer, template, family) for template in (fast, jinja))
    read = fast.names | jinja.names
    arguments = [kwargs for kwargs in _ARGUMENTS if kwargs.keys() <= read]
    for messages, tools, kwargs in _cases(arguments):
        written, expected = (_written(writer, messages, tools, kwargs) for writer in (ours, theirs))
        if written != expected:
            return ChosenTemplate(template=jinja, why_not_preferred=_difference(written, expected))
    return ChosenTemplate(template=fast)


def _cases(
    arguments: Sequence[Mapping[str, object]],
) -> Iterator[tuple[Sequence[Message], Sequence[Tool], Mapping[str, object]]]:
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            for kwargs in arguments:
                yield (*exchange.opening, exchange.reply, *new), exchange.tools, kwargs


def _written(
    writer: Writer, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]
) -> str | None:
    """The text with the next turn's prompt; None where the template refuses."""
    try:
        return writer.text(writer.sealer(), messages, tools, kwargs, prompt=True)
    except UnrenderableMessage:
        return None


def _difference(written: str | None, expected: str | None) -> str:
    if written is None or expected is None:
        return f"{'minijinja' if written is None else 'jinja2'} refuses what the other engine writes"
    at = next((i for i, (a, b) in enumerate(zip(written, expected, strict=False)) if a != b), 0)
    shown = slice(max(0, at - _SHOWN_CHARS // 2), at + _SHOWN_CHARS)
    return f"minijinja writes {written[shown]!r} where jinja2 writes {expected[shown]!r}"
