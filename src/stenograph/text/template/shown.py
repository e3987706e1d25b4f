"""The roles and tools found in a template's output, for a family without a declaration of them.

Knows nothing of any template's source: it renders, and looks for its own input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.conversations import WEATHER, call, result, said, user
from stenograph.text.family import Family
from stenograph.text.template.input import ArgumentsForm, MessageForm
from stenograph.text.template.template import Template
from stenograph.text.writer import Writer

_TEXT = "Text zq."
_NOBODY = "nobody"


def as_shown(family: Family, tokenizer: Tokenizer, template: Template) -> Family:
    """The family, with its open fields filled in: roles, whether tools are shown, and the form of messages.

    If a template writes any role whatsoever, it has a frame for none but the usual three. Without a frame for a
    developer's message, but with one for a system message, it gets the former as the latter.
    """
    shows_tools, form = family.shows_tools, family.form
    if shows_tools is None:
        as_text = replace(form, arguments=ArgumentsForm.TEXT)
        forms = (form, as_text, replace(form, empty_content=None), replace(as_text, empty_content=None))
        shown = next((one for one in forms if _shows_tools(_Look(family, one, tokenizer, template))), None)
        shows_tools, form = shown is not None, shown or form
    look = _Look(family, form, tokenizer, template)
    roles = family.roles or frozenset(_roles(look, shows_tools=shows_tools))
    if Role.DEVELOPER not in roles and Role.SYSTEM in roles:
        form, roles = replace(form, developer_as=Role.SYSTEM), roles | {Role.DEVELOPER}
        look = _Look(family, form, tokenizer, template)
    early_roles = family.early_roles
    if early_roles is None:
        early_roles = frozenset(role for role in (Role.SYSTEM, Role.DEVELOPER) if look.moves_to_front(role)) & roles
    late_roles = frozenset(role for role in (Role.SYSTEM, Role.DEVELOPER) if look.writes_late(role, shows_tools))
    late_roles &= roles - early_roles
    return replace(
        family, roles=roles, early_roles=early_roles, late_roles=late_roles, shows_tools=shows_tools, form=form
    )


class _Look:
    """A template, looked at through one form of messages."""

    def __init__(self, family: Family, form: MessageForm, tokenizer: Tokenizer, template: Template) -> None:
        self._writer = Writer(tokenizer, template, replace(family, form=form))
        self.template = template

    def shows(self, messages: Sequence[Message], tools: Sequence[Tool], *texts: str) -> bool:
        """Whether all of `texts` are in the output; not if the template refuses."""
        written = self._written(messages, tools)
        return written is not None and all(text in written for text in texts)

    def moves_to_front(self, role: Role) -> bool:
        """Whether a late message of this role is written before earlier ones."""
        before, after = (self._written((user("a"), said("b"), *late), ()) for late in ((), (_late(role),)))
        if before is None or after is None or _TEXT not in after:
            return False
        return after.index(_TEXT) < len(before) and not after.startswith(before)

    def writes_late(self, role: Role, shows_tools: bool) -> bool:
        """Whether a message of this role is written where it stands: after a user, a reply, and a tool's result."""
        asked, first = (user("a"),), call(1, '{"city": "Zq City"}')
        conversations: list[tuple[Message, ...]] = [asked, (*asked, said("b"))]
        if shows_tools:
            conversations.append((*asked, said(None, first), result(first, "c")))
        for messages in conversations:
            before, after = (self._written((*messages, *late), ()) for late in ((), (_late(role),)))
            if before is None or after is None or not after.startswith(before) or _TEXT not in after[len(before) :]:
                return False
        return True

    def _written(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
        try:
            return self._writer.text(self._writer.sealer(), messages, tools, prompt=False)
        except UnrenderableMessage:
            return None


def _shows_tools(look: _Look) -> bool:
    first = call(1, '{"city": "Zq City"}')
    messages = (user("a"), said(None, first), result(first, _TEXT))
    return look.shows((user("a"),), (WEATHER,), WEATHER.name) and look.shows(
        messages, (), WEATHER.name, "city", "Zq City", _TEXT
    )


def _roles(look: _Look, *, shows_tools: bool) -> Iterator[Role]:
    yield from (Role.USER, Role.ASSISTANT)
    if look.shows((Message(role=Role.SYSTEM, content=_TEXT), user("a")), (), _TEXT):
        yield Role.SYSTEM
    if shows_tools:
        yield Role.TOOL
    developer = (Message(role=Role.DEVELOPER, content=_TEXT), user("a"))
    if not _writes_anybody(look.template) and look.shows(developer, (), _TEXT):
        yield Role.DEVELOPER


def _late(role: Role) -> Message:
    return Message(role=role, content=_TEXT)


def _writes_anybody(template: Template) -> bool:
    try:
        written = template.render(
            [{"role": _NOBODY, "content": _TEXT}, {"role": "user", "content": "a"}], None, False, {}
        )
    except UnrenderableMessage:
        return False
    return _TEXT in written
