"""Messages to a template's text, in one model family: the one place where a family and its template meet.

Owns what the family says of its template's input: the form of messages, and the arguments that no request changes.
Knows nothing of ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.day import STRFTIME_NOW
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Tool
from stenograph.model.tokenizer import Tokenizer
from stenograph.render.family import Family
from stenograph.render.seal import Sealer
from stenograph.render.template.input import client_strings, message_dict, tool_values
from stenograph.render.template.template import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """A template's input beside the messages: the same for all turns with the same tools and arguments."""

    tools: Sequence[object] | None
    arguments: Mapping[str, object]


class Writer:
    """A template with its family's rules. Pure; may be called from any thread.

    `allows_special`: in what clients write, a control token's spelling is that token.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, family: Family, *, allows_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._allows_special = allows_special
        self._template = template
        self._form = family.form
        self._fixed = dict(family.fixed_kwargs)

    def read_by_template(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """The arguments that can change what is written. Not the date: it is another for each session."""
        names = self._template.names - {STRFTIME_NOW}
        return {name: value for name, value in kwargs.items() if name in names}

    @property
    def reads_date(self) -> bool:
        """Whether the template asks for the date."""
        return STRFTIME_NOW in self._template.names

    def sealer(
        self,
        messages: Iterable[Message] = (),
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        avoid: Iterable[str] = (),
    ) -> Sealer:
        """A sealer for these strings of clients; its mark also occurs in none of `avoid`."""
        texts = (*client_strings(tuple(messages), tools, kwargs or {}), *avoid)
        return Sealer(self._tokenizer, texts, is_open=self._allows_special)

    def text(
        self,
        sealer: Sealer,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        prompt: bool,
    ) -> str:
        """The conversation's text, sealed; with `prompt`, that of the next turn at its end.

        Raises UnrenderableMessage: the template refuses, or an argument is one that the family fixes.
        """
        frame = self.around(sealer, tools, kwargs)
        return self.within(frame, self.shown(sealer, messages), prompt=prompt)

    def shown(self, sealer: Sealer, messages: Iterable[Message]) -> list[dict[str, object]]:
        """Messages as the template takes them, sealed."""
        return [message_dict(message, sealer, self._form) for message in messages]

    def around(
        self, sealer: Sealer, tools: Sequence[Tool] = (), kwargs: Mapping[str, object] | None = None
    ) -> "Surroundings":
        """The template's input beside the messages, sealed. Raises UnrenderableMessage as `text`."""
        arguments = {name: sealer.seal_value(value) for name, value in kwargs.items()} if kwargs else {}
        for name, value in self._fixed.items():
            if name in arguments and arguments[name] != value:
                raise UnrenderableMessage(
                    f"The template argument {name!r} is always {value!r} here: with another value the model's chat"
                    " template rewrites earlier turns.",
                    blame=Blame(RequestPart.TEMPLATE_KWARGS, path=(name,)),
                )
            arguments[name] = value
        return Surroundings(tools=tool_values(tools, sealer), arguments=arguments)

    def within(self, around: "Surroundings", shown: Sequence[Mapping[str, object]], *, prompt: bool) -> str:
        """The text of messages as `shown` gives them. Raises UnrenderableMessage: the template refuses."""
        return self._template.render(shown, around.tools, prompt, around.arguments)
