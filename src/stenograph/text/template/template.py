"""A chat template: messages, tools and arguments to text, as transformers renders it.

Owns the template engine and its configuration (filters, globals, white space rules; parity with jinja2 configured as
transformers does is tested). One known difference, of the engine: a bare whole float passed to `tojson` by a template
loses its point (1.0 becomes 1); inside a list or a mapping it keeps it. Knows nothing of tokens or families.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

import minijinja
import msgspec

from stenograph.core.errors import StartupError, UnrenderableMessage

_NAME = "chat_template"
_EXPONENT = re.compile(rb"[0-9]e-?[0-9]")
"""A float that Python writes otherwise than msgspec: 1e16 is 1e+16 there."""


class Template(Protocol):
    """The maker of a conversation's text. Pure, and may be called from any thread.

    `names` are those read, among them all arguments with an effect on the text.
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

    `strftime_now` gives today's date in a format; without it, it is undefined for the template. `for_large` is the same
    template for large conversations. Raises StartupError: the source is not a template.
    """

    malformed: tuple[type[Exception], ...] = (minijinja.TemplateError,)
    """Errors of a malformed source."""
    failing: tuple[type[Exception], ...] = (minijinja.TemplateError, TypeError, ValueError, RecursionError)
    """Errors of a failing template."""

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        *,
        strftime_now: Callable[[str], str] | None = None,
        for_large: "ChatTemplate | None" = None,
    ) -> None:
        self.for_large = for_large or self
        known: dict[str, object] = {
            "raise_exception": _raise_exception,
            "bos_token": bos_token,
            "eos_token": eos_token,
            **({} if strftime_now is None else {"strftime_now": strftime_now}),
        }
        try:
            self.names = self._compile(source, known)
        except self.malformed as error:
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
            return self._written(context)
        except TemplateRaised as error:
            raise UnrenderableMessage(f"The model's chat template refuses this: {error}") from error
        except self.failing as error:
            cause = error.__cause__ if isinstance(error.__cause__, TemplateRaised) else error
            raise UnrenderableMessage(f"The model's chat template refuses this: {one_line(cause)}") from error

    def _compile(self, source: str, known: Mapping[str, object]) -> frozenset[str]:
        """Compile the source, with these globals; return the names read by it."""
        self._environment = minijinja.Environment(
            templates={_NAME: source},
            filters={"tojson": to_json},
            globals=dict(known),
            debug=False,
            auto_escape_callback=_never_escape,
            trim_blocks=True,
            lstrip_blocks=True,
            pycompat=True,
        )
        return frozenset(self._environment.undeclared_variables_in_template(_NAME))

    def _written(self, context: Mapping[str, object]) -> str:
        return self._environment.render_template(_NAME, **context)


def _never_escape(_name: str) -> bool:
    return False


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaised(message)


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it; the engine's own filter would escape HTML.

    Lists and objects, maybe hundreds of thousands of them in a client's JSON, are written by msgspec: `json.dumps`
    makes a string of each first, and keeps the GIL for the whole call.
    """
    if isinstance(value, dict | list) and not (ensure_ascii or sort_keys) and indent is None and separators is None:
        with suppress(TypeError, ValueError, OverflowError, RecursionError):  # `json.dumps` takes it, or says why not
            text = msgspec.json.format(msgspec.json.encode(value), indent=0)
            if _EXPONENT.search(text) is None:
                return text.decode()
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
