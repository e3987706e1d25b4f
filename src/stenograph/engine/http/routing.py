"""The headers that name a generation's session to routers, and its trace. Pure."""

from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.transport import Headers

AFFINITY_HEADER = "x-smg-routing-key"
"""By which a router keeps a session on one worker; it comes with all that is asked for a generation."""
SESSION_HEADER = "x-session-id"
"""The same for other routers."""


def routing_headers(request: GenerateRequest) -> Headers:
    """The headers that say to a router which session a generation is of, if it is of any, and of which trace."""
    key = request.affinity_key
    routing = () if key is None else ((AFFINITY_HEADER, key), (SESSION_HEADER, key))
    return routing if request.trace is None else (*routing, *request.trace.headers())
