"""Counts the ids of a chat's prompt, and makes no turn of it.

Takes no lease and no place among the turns in flight: it may be asked at any time, also while its strand is busy.
Changes nothing of a session.
"""

from contextlib import suppress

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest
from stenograph.core.errors import HistoryMismatch, InvalidRequest, TruncatedGeneration
from stenograph.session.admission import Caller
from stenograph.session.manager import SessionManager
from stenograph.session.prompt_builder import ChatPromptBuilder
from stenograph.session.services import TurnServices
from stenograph.session.session import Session
from stenograph.trajectory.strand import Onlooker


async def num_prompt_tokens(
    manager: SessionManager, services: TurnServices, session: Session | None, request: ChatRequest, caller: Caller
) -> int:
    """Number of ids that the engine would get for this chat: those of its line and the bridge, or all of a new one.

    A chat that its session would refuse, because its history goes on otherwise, counts as one without a session.
    Raises CallerError for content that cannot be shown, and TokenizationFailed.
    """
    agent_id = services.kind_rules.agent_id(caller.headers) if session is not None and caller.headers else ""
    ruled = manager.as_sent(request, session, agent_id)
    assert isinstance(ruled, ChatRequest), "a chat is sent as a chat"
    if any(message.media for message in ruled.messages):
        raise InvalidRequest(
            "The tokens of images are not counted ahead: the engine makes them, and reports them with a turn's usage.",
            blame=Blame(RequestPart.MESSAGES),
        )
    if session is not None:
        builder = _builder(services, ruled, session, agent_id)
        with suppress(HistoryMismatch, TruncatedGeneration):
            attachment = await builder.position()
            if not attachment.adds_nothing:
                return (await builder.render(attachment)).num_tokens
    builder = _builder(services, ruled, None, agent_id)
    return (await builder.render(await builder.position())).num_tokens


def _builder(services: TurnServices, request: ChatRequest, session: Session | None, agent_id: str) -> ChatPromptBuilder:
    return ChatPromptBuilder(
        request,
        leases=Onlooker(None if session is None else session.strands, agent_id=agent_id),
        services=services,
        capabilities=services.engine.capabilities,
        opened_at=services.clock.wall() if session is None else session.created_at,
    )
