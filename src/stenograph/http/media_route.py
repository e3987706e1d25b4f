"""`GET /sessions/{id}/media/{sha256}`: the bytes of a medium that the session's messages have. A Starlette endpoint."""

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.base64_text import decoded
from stenograph.core.errors import InvalidRequest, RouteNotFound
from stenograph.http.auth import Authenticator
from stenograph.http.query import check_query
from stenograph.http.route import STORED, Needs, Schema, one_answer, parameter, route
from stenograph.session.kept_media import find_media

_BYTES: Schema = {"type": "string", "format": "binary"}
_SHA256 = {
    **parameter("path", "sha256", "SHA-256 of the bytes, in hex.", {"type": "string", "pattern": "^[0-9a-f]{64}$"}),
    "required": True,
}
_HEADERS = {
    "cache-control": "private, max-age=31536000, immutable",
    "content-security-policy": "default-src 'none'; sandbox",
    "x-content-type-options": "nosniff",
}
"""The bytes are a client's: a browser takes them for what they say to be, and for nothing that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRoute:
    """The media of one server's sessions."""

    authenticator: Authenticator

    @route(
        "GET /sessions/{id}/media/{sha256}",
        "getMedia",
        "Get an image of the session's messages",
        answers=one_answer("The bytes, as the client sent them.", {"image/*": {"schema": _BYTES}}),
        parameters=(_SHA256,),
        errors=(InvalidRequest, RouteNotFound, *STORED),
        needs=Needs.TOKEN,
    )
    async def get(self, request: Request) -> Response:
        """`GET /sessions/{id}/media/{sha256}`."""
        check_query(request)
        session = await self.authenticator.session_of(request.scope, wakes=False)
        assert session is not None, "the path names it"
        sha256 = request.path_params["sha256"]
        item = await find_media(session, self.authenticator.manager.sessions.storage, sha256)
        if item is None:
            raise RouteNotFound(f"This session has no media {sha256[:64]!r}.")
        content = await asyncio.to_thread(decoded, item.base64)
        named = (one.ref for node in session.strands.nodes for message in node.turn.messages for one in message.media)
        ref = next((ref for ref in named if ref.sha256 == sha256), item.ref)  # equal bytes came first as another type
        return Response(content, media_type=ref.media_type, headers=_HEADERS)
