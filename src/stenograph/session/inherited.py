"""The requests of an agent that begins anew on a fork: those for inherited turns get the recorded replies, the first
other one goes on behind them or continues the cut reply. Loaded by the first request of such a fork.

Nothing is kept of what was answered: a fork that is read from the store answers as before, also a second agent.
"""

import logging
import re
from dataclasses import replace as replaced

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, TurnRequest
from stenograph.core.errors import HistoryMismatch
from stenograph.core.kinds import Label
from stenograph.session.kept import KeptWatch
from stenograph.session.recorded import VOLATILE, RecordedSession, context_of
from stenograph.session.services import TurnServices
from stenograph.session.session import Session
from stenograph.session.sessions import Sessions
from stenograph.trajectory.commits import PlacedTurn, SessionCommit
from stenograph.trajectory.forks import ForkPoint
from stenograph.trajectory.strand import Strand
from stenograph.trajectory.turn import Node, line_messages

log = logging.getLogger(__name__)

_IGNORED = tuple(map(re.compile, VOLATILE))


def answered(
    session: Session, request: TurnRequest, sessions: Sessions, services: TurnServices, label: Label
) -> tuple[TurnRequest, KeptWatch | None]:
    """A request of a fork, with the rules' label of it, and the recorded reply if it has one.

    Else the request is to be sampled. Where it begins with all inherited messages, but for parts that an agent makes
    anew each time, it gets the recorded ones in their place: it goes on behind the exact ids. The first request unlike
    them is logged with the place, unless it is a side request. Raises HistoryMismatch, with the place, for one of the
    same work that parts before the fork does.
    """
    fork = session.options.fork
    if fork is None or not fork.replays or not isinstance(request, ChatRequest):
        return request, None
    placed = _inherited(session, fork)
    if not placed:
        return request, None
    commits = [(SessionCommit(turns=(PlacedTurn(turn=one.turn),)), [(strand, one)]) for strand, one in placed]
    script, first, last = RecordedSession(commits, session.options.matcher, _IGNORED), placed[0][1], placed[-1][1]
    found = script.find(request, None)
    if found is not None and found.node.turn is not fork.cut:
        session.last_chat, capabilities = services.clock.monotonic(), services.engine.capabilities
        sessions.chatted(session)
        model = found.node.turn.policy or capabilities.model
        return request, found.stored().watch(request, replaced(capabilities, model=model))
    num, num_alike = last.num_messages - (fork.cut is not None), script.num_alike(request.messages)[last.id]
    if num_alike >= num:
        request = replace(request, messages=(*line_messages(last)[:num], *request.messages[num:]))
        if last.turn.context.is_same(context_of(request)):
            return request, None
    if label.kind is None and not _has_gone_on(session, fork):
        where = script.difference(request)
        if num_alike >= first.num_messages or _begins_alike(first, request):
            raise HistoryMismatch(
                f"This fork begins with recorded turns, and the request parts from them: {where}.",
                blame=Blame(RequestPart.MESSAGES),
            )
        log.warning("fork %s: sampled is a request unlike its recorded turns: %s", session.id, where)
    return request, None


def _inherited(session: Session, fork: ForkPoint) -> list[tuple[Strand | None, Node]]:
    """The inherited turns in order, and the cut one after them."""
    placed: list[tuple[Strand | None, Node]] = [
        (strand, node) for strand in session.strands.kept for node in strand.history.nodes if node.id < fork.num_turns
    ]
    if fork.cut is not None:
        placed.append((None, Node(id_=fork.num_turns, turn=fork.cut, parent=placed[-1][1] if placed else None)))
    return placed


def _has_gone_on(session: Session, fork: ForkPoint) -> bool:
    """Whether it has a turn of its own, side requests aside."""
    own = (strand.history.nodes for strand in session.strands.kept if strand.label.kind is None)
    return any(nodes and nodes[-1].id >= fork.num_turns for nodes in own)


def _begins_alike(first: Node, request: ChatRequest) -> bool:
    """Whether a request has the tools of the first turn and as many messages of these roles: an agent's first request,
    in other words."""
    roles = [message.role for message in first.turn.messages]
    has_tools = bool(request.tools) and first.turn.context.is_same(context_of(request))
    return has_tools and [message.role for message in request.messages] == roles
