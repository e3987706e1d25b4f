"""Asks `GET /health` every few milliseconds, come what may, from a process of its own; reports how long each waited.

    python -m benchmarks.kit.probe '{"host": "127.0.0.1", "port": 8080}'

An open loop on one connection: see `latencies_of_due`. Plain sockets and `select`, whose timeouts are finer than a
millisecond. Says `{"ready": true}` when the first answer has come, and reports when stdin gets a line, or closes.
"""

import math
import select
import socket
import sys
import time

import httptools
import msgspec

from benchmarks.kit.quantiles import latencies_of_due, summary_ms
from benchmarks.kit.steps import nothing_collected, say

CONNECT_TIMEOUT_S = 5.0
HELD_BACK_PAUSE_S = 0.05
"""Pause after a connection that failed."""
LAST_ANSWER_S = 10.0
"""Time that the last probe has when it is time to stop."""


class ProbePlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whom to ask, and how often."""

    host: str
    port: int
    period_s: float = 0.005
    path: str = "/health"


class Probe:
    """One connection, its parser, and what was seen."""

    def __init__(self, plan: ProbePlan) -> None:
        self.latencies_s: list[float] = []
        self.lateness_s: list[float] = []
        """Lateness of probes that were sent when none was under way: this process's own wait for a core."""
        self.num_failures = 0
        self._plan = plan
        self._request = f"GET {plan.path} HTTP/1.1\r\nhost: {plan.host}\r\n\r\n".encode()
        self._socket: socket.socket | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._whole = False

    def on_message_complete(self) -> None:
        self._whole = True

    def ask_once(self) -> None:
        """A probe that is not counted. Raises OSError."""
        sock = self._connected()
        sock.sendall(self._request)
        while not self._read(sock):
            pass

    def run(self) -> None:
        """Probe until stdin has something, or closes; once at least."""
        period, due = self._plan.period_s, time.perf_counter()
        stopped = False
        while not stopped:
            now = time.perf_counter()
            if now < due:
                readable, _, _ = select.select([sys.stdin], [], [], due - now)
                stopped = bool(readable)
                continue
            self.lateness_s.append(now - due)
            stopped = self._probe_once(due)
            due += period * (1 + max(0, math.floor((time.perf_counter() - due) / period)))

    def _probe_once(self, due: float) -> bool:
        """Send a probe and wait for its answer; returns whether to stop. An answer that never came is a failure."""
        stopped, failed = False, False
        try:
            sock = self._connected()
            sock.sendall(self._request)
            while True:
                readable, _, _ = select.select([sock] if stopped else [sock, sys.stdin], [], [], LAST_ANSWER_S)
                stopped = stopped or sys.stdin in readable
                if sock in readable and self._read(sock):
                    failed = self._parser.get_status_code() != 200
                    break
                if stopped and not readable:
                    failed = True
                    break
        except (OSError, httptools.HttpParserError):
            failed = True
            self._forget()
            time.sleep(HELD_BACK_PAUSE_S)
        waited = list(latencies_of_due(due, time.perf_counter(), self._plan.period_s))
        self.latencies_s += waited
        self.num_failures += len(waited) if failed else 0
        return stopped

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._parser = httptools.HttpResponseParser(self)
            self._socket = socket.create_connection((self._plan.host, self._plan.port), CONNECT_TIMEOUT_S)
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _read(self, sock: socket.socket) -> bool:
        """Read what is there; returns whether the answer is whole. Raises ConnectionError at its end."""
        self._whole = False
        data = sock.recv(2**16)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._parser.feed_data(data)
        return self._whole


def main() -> None:
    """Probe as the plan in the first argument says."""
    probe = Probe(msgspec.json.decode(sys.argv[1], type=ProbePlan))
    probe.ask_once()
    with nothing_collected():
        say({"ready": True})
        probe.run()
    say(
        {
            **summary_ms(probe.latencies_s),
            "num_probes": len(probe.latencies_s),
            "num_failures": probe.num_failures,
            "lateness": summary_ms(probe.lateness_s),
        }
    )


if __name__ == "__main__":
    main()
