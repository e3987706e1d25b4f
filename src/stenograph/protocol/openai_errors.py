"""Errors as OpenAI writes them. Pure."""

import msgspec

from stenograph.core.errors import MethodNotAllowed, StenographError


def error_body(error: StenographError) -> bytes:
    """`{"error": {"message", "type", "code", "param"}}`; `param` is a JSON pointer where a field is to blame."""
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "code": error.code,
                "param": error.param,
            }
        }
    )


def error_headers(error: StenographError) -> list[tuple[str, str]]:
    """Headers that tell a client whether to try again: `x-should-retry` for the SDKs, `retry-after` in seconds.

    A 405 says with `allow` which methods there are. Source: RFC 9110, section 15.5.6.
    """
    headers = [("x-should-retry", "true" if error.should_retry else "false")]
    if error.retry_after_s is not None:
        headers.append(("retry-after", f"{max(1, round(error.retry_after_s))}"))
    if isinstance(error, MethodNotAllowed):
        headers.append(("allow", ", ".join(error.allowed)))
    return headers
