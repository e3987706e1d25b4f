"""A chat template: messages, tools and arguments to text, as transformers renders it.

Owns the template engine and its configuration (filters, globals, white space rules; parity with jinja2 configured as
transformers does is tested). One known difference, of the engine: a bare whole float that a template passes to
`tojson` loses its point (1.0 becomes 1); inside a list or a mapping it keeps it. Knows nothing of tokens or families.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

import minijinja

from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.text.template.json_filter import to_json

_NAME = "chat_template"


class Template(Protocol):
    """Whatever makes a conversation's text. Pure, and may be called from any thread.

    `names` are those that it reads, among them all arguments that can change what it writes.
    """

    @property
    def names(self) -> frozenset[str]: ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        """The conversation's text. Raises UnrenderableMessage with its own words when it refuses or fails."""
        ...


class TemplateRaised(Exception):
    """The template called raise_exception; the message is its own."""


class ChatTemplate:
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
        dates = {} if strftime_now is None else {"strftime_now": strftime_now}
        try:
            self._environment = minijinja.Environment(
                templates={_NAME: source},
                filters={"tojson": to_json},
                globals={"raise_exception": _raise_exception, "bos_token": bos_token, "eos_token": eos_token, **dates},
                debug=False,
                auto_escape_callback=_never_escape,
                trim_blocks=True,
                lstrip_blocks=True,
                pycompat=True,
            )
            self.names = frozenset(self._environment.undeclared_variables_in_template(_NAME))
        except minijinja.TemplateError as error:
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
            return self._environment.render_template(_NAME, **context)
        except TemplateRaised as error:
            raise UnrenderableMessage(f"The model's chat template refuses this: {error}") from error
        except (minijinja.TemplateError, TypeError, ValueError, RecursionError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, TemplateRaised) else error
            raise UnrenderableMessage(f"The model's chat template refuses this: {one_line(cause)}") from error


def _never_escape(_name: str) -> bool:
    return False


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaised(message)


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
