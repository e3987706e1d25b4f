"""Chat templates by jinja2's sandbox, set up as transformers does: for templates beyond the faster engine.

Owns the sandbox and its extension. Knows nothing of tokens or families.
"""

from collections.abc import Mapping

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stenograph.text.template.template import ChatTemplate, to_json


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
