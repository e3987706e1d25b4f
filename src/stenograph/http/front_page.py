"""The answer to `GET /`: links. HTML for a browser, JSON for other clients; it loads nothing from elsewhere."""

from collections.abc import Sequence
from html import escape
from typing import Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stenograph import __version__

LINKS: Sequence[tuple[str, str]] = (
    ("/console", "sessions, their tokens, and what runs now, to look at"),
    ("/health", "whether the server is alive"),
    ("/ready", "whether an engine is usable, and why not"),
    ("/metrics", "metrics for Prometheus"),
    ("/openapi.json", "every route, for machines"),
    ("/v1/models", "the model"),
    ("/sessions", "the sessions"),
)
"""The routes a browser can GET."""

_STYLE = "body{font:16px/1.5 sans-serif;max-width:40em;margin:2em auto;padding:0 1em}code{font-size:1.05em}"

_HTML = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Stenograph</title><style>{_STYLE}</style></head>
<body>
<h1>Stenograph {escape(__version__)}</h1>
<p>A session server that keeps the exact tokens of agent rollouts.</p>
<ul>
{"".join(f'<li><a href="{path}"><code>{path}</code></a>: {escape(what)}</li>' + chr(10) for path, what in LINKS)}</ul>
<p><code>POST /sessions</code> opens a session and answers with its addresses: <code>base_url</code> for a client of
OpenAI's (Chat Completions, Responses), <code>root_url</code> for one of Anthropic's (Messages) or Google's (Gemini).
A server with keys asks for one on the last two pages.</p>
</body>
</html>
""".encode()


class Link(TypedDict):
    """A path of this server, and what is there."""

    path: str
    what: str


class FrontPage(TypedDict):
    """Links to this server's pages."""

    name: Literal["stenograph"]
    version: str
    links: Sequence[Link]


_PAGE: FrontPage = {
    "name": "stenograph",
    "version": __version__,
    "links": [{"path": path, "what": what} for path, what in LINKS],
}
_JSON = msgspec.json.encode(_PAGE)


def front_page(request: Request) -> Response:
    """The page of links, as the client reads it. It says nothing of the model or of sessions, so it asks for no key."""
    is_browser = "text/html" in request.headers.get("accept", "")
    return Response(
        _HTML if is_browser else _JSON,
        media_type="text/html" if is_browser else "application/json",
        headers={
            "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
            "vary": "accept",
            "x-content-type-options": "nosniff",
        },
    )
