"""The server's socket, bound before anything else is loaded."""

import errno
import os
import socket

from stenograph.core.errors import StartupError


def url_of(listener: socket.socket) -> str:
    """The address of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def listen(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Bind before anything else. Raises StartupError, in a line, on failure.

    `shares_port`: this user's other sockets with the same option may have the port; the kernel spreads connections.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048, reuse_port=shares_port)
        # Connections inherit it. asyncio would not set it on them, and an answer's body would wait 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use; choose another with --port") from error
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or error
        raise StartupError(f"cannot listen on {host}:{port}: {why}; choose another with --host or --port") from error
