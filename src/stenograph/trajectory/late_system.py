"""Late system messages, for a template without a frame for them: they become text of their neighbours. Pure.

Owns the place of such a text, and the record of it. Knows no session, no dialect and no template: the renderer names
the roles to rewrite. The law: the messages before a reply become the same, whatever follows the reply. So a message
goes back to the one before it, or forward as far as the next message, never over a reply.
"""

from collections.abc import Set
from operator import attrgetter

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest
from stenograph.core.messages import Message, Role
from stenograph.core.rewrites import AppliedRewrite, kept_text

LATE_SYSTEM = "late-system"
"""The rule's name in records."""

_INSTRUCTING = frozenset({Role.SYSTEM, Role.DEVELOPER})
_BETWEEN = "\n\n"
_role = attrgetter("role")


def with_reminders(request: ChatRequest, hidden: Set[Role]) -> ChatRequest:
    """The request with each late message of the `hidden` roles as a reminder in another message.

    A message is late after any message but a system's or a developer's. The reminder is appended to the user's message
    or the tool's result right before it. After a reply it goes in front of the next message if this is a user's, or
    behind it if this is a result; else it is a user's message of its own. The known beginning of the request has been
    rewritten already, and is not looked at.
    """
    messages, known = request.messages, request.known
    start = 0 if known is None else len(known.messages)
    if start == 0 or messages[start - 1].role in _INSTRUCTING:
        begun = (i for i, message in enumerate(messages) if message.role not in _INSTRUCTING)
        start = max(start, next(begun, len(messages)))
    if hidden.isdisjoint(map(_role, messages[start:])):
        return request
    reading = _Conversation(request, start=start)
    for message in messages[start:]:
        reading.read(message, is_late=message.role in hidden)
    return reading.request()


class _Conversation:
    """A request's messages up to one of them, rewritten. `start` of them are as they are."""

    def __init__(self, request: ChatRequest, *, start: int) -> None:
        self._request = request
        self._messages = list(request.messages[:start])
        self._gaps = list(request.gaps)
        self._place = start + len(request.gaps)
        self._texts: list[str] = []
        """The texts joined into the last message, if more than its own."""
        self._num_before = 0
        """Characters of reminders in front of the last message's own text, and so of its media."""
        self._held: list[str] = []
        """Reminders waiting for the message after a reply."""
        self._rewrites: list[AppliedRewrite] = []

    def read(self, message: Message, *, is_late: bool) -> None:
        if is_late:
            self._remind(message)
        else:
            self._append(message)
        self._place += 1

    def request(self) -> ChatRequest:
        may_be_known = not self._held  # else the next request may still have the message that they wait for
        self._close()
        self._let_go()
        return replace(
            self._request,
            messages=tuple(self._messages),
            text_print=self._request.text_print if may_be_known else None,
            gaps=tuple(self._gaps),
            rewrites=(*self._request.rewrites, *self._rewrites),
        )

    def _remind(self, message: Message) -> None:
        text = message.content or ""
        reminder = f"<system-reminder>\n{text}\n</system-reminder>"
        where = self._request.spelling.pointer(Blame(RequestPart.MESSAGES, self._place, ("content",))) or ""
        self._rewrites.append(
            AppliedRewrite(
                rule=LATE_SYSTEM,
                where=where,
                before=kept_text(text),
                after=kept_text(reminder),
                message=self._place,
            )
        )
        last = self._messages[-1]
        if last.role not in (Role.USER, Role.TOOL):
            self._held.append(reminder)
            return
        self._texts = self._texts or [last.content or ""]
        self._texts.append(reminder)
        self._gaps.append(len(self._messages))

    def _append(self, message: Message) -> None:
        self._close()
        if self._held and message.role in (Role.USER, Role.TOOL):
            own, held = message.content or "", self._held
            self._texts = [*held, own] if message.role is Role.USER else [own, *held]
            self._num_before = sum(len(one) + len(_BETWEEN) for one in held) if message.role is Role.USER else 0
            self._gaps += [len(self._messages)] * len(held)
            self._held = []
        self._let_go()
        self._messages.append(message)

    def _close(self) -> None:
        """Write the joined texts into the last message."""
        if self._texts:
            last, num_before = self._messages[-1], self._num_before
            media = tuple(replace(one, at=one.at + num_before) for one in last.media) if num_before else last.media
            self._messages[-1] = replace(last, content=_BETWEEN.join(self._texts), media=media)
            self._texts, self._num_before = [], 0

    def _let_go(self) -> None:
        """Make a user's message of the waiting reminders."""
        if self._held:
            self._messages.append(Message(role=Role.USER, content=_BETWEEN.join(self._held)))
            self._gaps += [len(self._messages)] * (len(self._held) - 1)
            self._held = []
