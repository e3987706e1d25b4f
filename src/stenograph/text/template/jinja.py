"""Chat templates by jinja2's sandbox, set up as transformers does: for those that the faster engine writes otherwise.

Owns the sandbox and its extension. Knows nothing of tokens or families.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.text.template.json_filter import to_json
from stenograph.text.template.template import TemplateRaised, one_line


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what an assistant says, for those who want to know it; it writes nothing."""

    tags = {"generation"}  # noqa: RUF012 -- as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's content alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaTemplate:
    """A compiled template. Rendering is pure and may happen on any thread.

    `strftime_now` gives today's date in a format; without it, it is undefined for the template.
    Raises StartupError: the source is not a template.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        *,
        strftime_now: Callable[[str], str] | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        known: dict[str, object] = {
            "raise_exception": _raise_exception,
            "bos_token": bos_token,
            "eos_token": eos_token,
            **({} if strftime_now is None else {"strftime_now": strftime_now}),
        }
        try:
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source, globals=known)
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartupError(f"chat template: {one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        """The conversation's text; `kwargs` are the template's own arguments and cannot replace the others.

        Raises UnrenderableMessage with the template's words when it refuses or fails.
        """
        context = {**kwargs, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except TemplateRaised as error:
            raise UnrenderableMessage(f"The model's chat template refuses this: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise UnrenderableMessage(f"The model's chat template refuses this: {one_line(error)}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaised(message)
