"""A decoded request made into turns that can run, under the options of its session. Starts nothing."""

import uuid

from stenograph.core.chat import CompletionRequest, TurnRequest
from stenograph.core.types import RequestId, StageTimes
from stenograph.session.opening import openings
from stenograph.session.request import Keep, RequestRun
from stenograph.session.session import Session
from stenograph.session.strand import Seats
from stenograph.session.turn import TurnRun, TurnServices


def request_run(
    request: TurnRequest,
    request_json: bytes,
    *,
    session: Session | None,
    seats: Seats,
    stages: StageTimes,
    services: TurnServices,
    keep: Keep | None,
) -> RequestRun:
    """The turns of a request, under the options of its session. A chat takes its seat. Raises SessionBusy."""
    opened = openings(
        request,
        seats=seats,
        renderer=services.renderer,
        pool=services.pool,
        share=services.share,
        capabilities=services.engine.capabilities,
        over_budget=services.over_budget,
        tokenizer=services.tokenizer if session is None or isinstance(request, CompletionRequest) else None,
        clock=services.clock,
        opened_at=session.created_at if session is not None else services.clock.wall(),
    )
    ids = [RequestId(uuid.uuid4().hex) for _ in opened]
    reply_id = request.spelling.id_prefix + ids[0]
    turns = [
        TurnRun(
            request_id=request_id,
            reply_id=reply_id if len(ids) == 1 else f"{reply_id}-{index}",
            request=request,
            request_json=request_json,
            opening=opening,
            seats=seats,
            affinity_key=session.id if session is not None else None,
            stages=stages if len(ids) == 1 else StageTimes(start=stages.start, ends=dict(stages.ends)),
            services=services,
            wants_support=session is not None and session.options.support,
        )
        for index, (request_id, opening) in enumerate(zip(ids, opened, strict=True))
    ]

    def may_commit() -> bool:
        return session is not None and not session.is_closing

    return RequestRun(
        request=request,
        reply_id=None if len(turns) == 1 else reply_id,
        turns=turns,
        seats=seats,
        may_commit=may_commit,
        token_limit=None if session is None else session.options.max_total_tokens,
        services=services,
        keep=keep,
    )
