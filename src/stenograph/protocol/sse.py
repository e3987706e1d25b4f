"""Server-sent events, as OpenAI's streams use them: `data:` lines, no ids, no event names. Pure.

Source: WHATWG HTML, section 9.2 (text/event-stream).
"""

DONE = b"data: [DONE]\n\n"
"""OpenAI's terminal event."""


def data_event(payload: bytes) -> bytes:
    """One event with one line of data. `payload` is JSON and so holds no line break."""
    return b"data: " + payload + b"\n\n"
