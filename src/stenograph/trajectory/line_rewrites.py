"""The changes to what a client sent that a turn keeps in its record: those that its line has not already. Pure."""

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest
from stenograph.core.rewrites import AppliedRewrite, kept_text
from stenograph.trajectory.text_calls import rewrites_of
from stenograph.trajectory.turn import Node


def rewrites_after(request: ChatRequest, parent: Node | None) -> tuple[AppliedRewrite, ...]:
    """The changes that a turn after `parent` keeps: those before matching, but for those of messages that the line
    has, and those that made the last reply of what the client sent in its place."""
    if parent is None:
        return request.rewrites
    place = request.place_of(parent.num_messages - 1)
    new = tuple(one for one in request.rewrites if one.message is None or one.message > place)
    where = request.spelling.pointer(Blame(RequestPart.MESSAGES, place, ("content",))) or ""
    of_reply = tuple(
        AppliedRewrite(rule=one.rule, where=where, before=kept_text(one.from_text), after=kept_text(one.to_text))
        for one in rewrites_of(parent.turn.reply.message, request.messages[parent.num_messages - 1])
    )
    return (*new, *of_reply)
