"""The console's page: its files as they are in the package, for everybody. Its data needs a key."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from stenograph.console.assets import FILES, INDEX, PageFile
from stenograph.core.errors import RouteNotFound

POLICY = "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""No script, style or address but this server's own."""

_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


def console_page(request: Request) -> Response:
    """`GET /console`: the page; its other files lie below it."""
    return _sent(request, FILES[INDEX])


def console_file(request: Request) -> Response:
    """`GET /console/{file}`: a file of the page; `/console/` leads to the page. Raises RouteNotFound."""
    name: str = request.path_params["file"]
    if not name:
        return RedirectResponse("../console", status_code=308)
    if name not in FILES or name == INDEX:
        raise RouteNotFound(f"The console has no file {name[:80]!r}.")
    return _sent(request, FILES[name])


def _sent(request: Request, file: PageFile) -> Response:
    headers = {**_HEADERS, "etag": file.etag, "content-type": file.media_type}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, headers={**headers, "content-encoding": "gzip"})
    return Response(file.content, headers=headers)
