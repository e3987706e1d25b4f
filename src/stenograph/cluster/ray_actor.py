"""The actor of a machine's server, as Ray runs it. It ends when its server ends, and then Ray starts it again.

Knows of Ray only whether it was started again. The first start is asked for, so its failure is told to the
asker; a later failing one ends the process, and Ray tries again.
"""

import importlib
import logging
import os
import socket
from collections.abc import Mapping

from stenograph.cluster.server_process import ServerProcess
from stenograph.core.errors import StartupError

log = logging.getLogger(__name__)

_EXIT_ENDED = 1


def free_port(host: str) -> int:
    """A port of this machine without a listener now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        port: int = free.getsockname()[1]
        return port


class NodeActor:
    """A machine's server at `url`. Made and called by Ray, one call at a time."""

    def __init__(self, settings: Mapping[str, str], url: str) -> None:
        """`settings` are variables of the server's environment."""
        self._settings = settings
        self._url = url
        self._server: ServerProcess | None = None
        if importlib.import_module("ray").get_runtime_context().was_current_actor_reconstructed:
            try:
                self.begin()
            except StartupError as error:
                log.warning("a server that ended could not be started again, and is tried once more: %s", error)
                os._exit(_EXIT_ENDED)

    def begin(self) -> str:
        """Start the server, unless it runs; its address, once it is ready. Raises StartupError."""
        if self._server is None:
            self._server = ServerProcess(self._settings, on_end=_end)
        return self._url

    def url(self) -> str:
        """The server's address; "" until it was ready."""
        return "" if self._server is None else self._url

    def end(self) -> None:
        """Stop the server, after its turns."""
        if self._server is not None:
            self._server.stop()


def _end(code: int) -> None:
    log.error("the server has ended with exit code %d", code)
    os._exit(_EXIT_ENDED)
