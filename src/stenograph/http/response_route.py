"""`GET …/responses/{response}`: a response held by a session, written anew from its record. A Starlette endpoint."""

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import InvalidRequest, RouteNotFound, SessionNotFound
from stenograph.dialects.base import HeldDialect
from stenograph.dialects.responses.reply import ResponseBody
from stenograph.http.auth import Authenticator
from stenograph.http.query import check_query
from stenograph.http.responses import in_pieces
from stenograph.http.route import SESSION_HEADER, STORED, TEXT, Needs, parameter, route
from stenograph.offload.pool import LoopShare
from stenograph.session.kept import held_reply

_RESPONSE_ID = {**parameter("path", "response", "The id of a response.", TEXT), "required": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldResponses:
    """The responses of one server's sessions."""

    authenticator: Authenticator
    share: LoopShare
    model: str
    dialect: HeldDialect

    @route(
        "GET /sessions/{id}/v1/responses/{response}",
        "getResponse",
        "Get a response that the session holds",
        ResponseBody,
        parameters=(_RESPONSE_ID,),
        errors=(InvalidRequest, RouteNotFound, *STORED),
        needs=Needs.TOKEN,
    )
    @route(
        "GET /v1/responses/{response}",
        "getResponseOfHeader",
        "Get a response of the session that a header names",
        ResponseBody,
        parameters=(_RESPONSE_ID, SESSION_HEADER),
        errors=(InvalidRequest, RouteNotFound, SessionNotFound, *STORED),
        needs=Needs.TOKEN,
    )
    async def get(self, request: Request) -> Response:
        """`GET /sessions/{id}/v1/responses/{response}`, and the same on the session named in a header."""
        check_query(request)
        session = await self.authenticator.session_of(request.scope, wakes=False)
        if session is None:
            raise RouteNotFound(
                "Responses are kept in sessions: ask for it at /sessions/{id}/v1/responses/{response}, or name its"
                " session in X-Session-Id."
            )
        asked: str = request.path_params["response"]
        turn = self.dialect.turn_of(asked)
        node = None if turn is None else session.strands.turn_of(turn)
        if node is None or node.turn.reply_id != asked:
            raise RouteNotFound(f"This session holds no response {asked[:64]!r}.")
        body = self.dialect.held(held_reply(node, self.model), node.turn.request_json)
        headers = {name: value for name, value in body.headers if name != "content-type"}
        pieces: Iterable[bytes] = (body.content,) if isinstance(body.content, bytes) else body.content
        answer = in_pieces(self.share, iter(pieces), media_type="application/json")
        answer.headers.update(headers)
        return answer
