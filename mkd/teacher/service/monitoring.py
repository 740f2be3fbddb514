"""Health and metrics of a teacher service over HTTP: GET /health and GET /metrics (Prometheus)."""

import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_LIMIT_S = 5.0
"""Seconds after which a connection is closed, whatever its client does."""


@dataclass(frozen=True)
class ServiceStatus:
    """State of a service at one moment."""

    state: str
    """loading, serving or stopping."""
    fingerprint: str
    """Fingerprint of its teacher."""
    counters: dict[str, float]
    """See `TeacherServer.counters`."""
    uptime_s: float

    @property
    def is_healthy(self) -> bool:
        """True if requests are computed."""
        return self.state == "serving"

    def health(self) -> str:
        """JSON of one line."""
        values = {"status": self.state, "fingerprint": self.fingerprint, "uptime_s": round(self.uptime_s, 1)}
        return json.dumps(values | self.counters) + "\n"

    def metrics(self) -> str:
        """Prometheus' text format."""
        lines = [
            "# HELP mkd_teacher_info The teacher that is served.",
            "# TYPE mkd_teacher_info gauge",
            f'mkd_teacher_info{{fingerprint="{self.fingerprint}"}} 1',
        ]
        values = {"serving": int(self.is_healthy), "uptime_s": self.uptime_s, **self.counters}
        for name, value in values.items():
            suffix, kind, text = _METRICS[name]
            lines += [f"# HELP mkd_teacher_{suffix} {text}", f"# TYPE mkd_teacher_{suffix} {kind}"]
            lines.append(f"mkd_teacher_{suffix} {value:g}" if value < 1e6 else f"mkd_teacher_{suffix} {value:.0f}")
        return "\n".join(lines) + "\n"


_METRICS = {
    "serving": ("serving", "gauge", "1 while requests are computed, 0 while the teacher loads or the service ends."),
    "uptime_s": ("uptime_seconds", "gauge", "Seconds since the service has started."),
    "received": ("requests_received_total", "counter", "Requests that were read."),
    "requests": ("requests_total", "counter", "Requests that were answered."),
    "passes": ("forward_passes_total", "counter", "Forward passes; fewer than requests with --batch-tokens."),
    "tokens": ("tokens_total", "counter", "Tokens in the rows that were computed."),
    "busy_s": ("busy_seconds_total", "counter", "Seconds in which something was computed."),
    "refused": ("refused_total", "counter", "Messages that were refused."),
    "queue": ("queue", "gauge", "Requests that were read and wait."),
}
"""Counter -> name, type and help of its metric."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request for each connection; anything but the two pages is an error."""

    timeout = 2.0
    server_version, sys_version = "mkd", ""

    def handle(self) -> None:
        limit = threading.Timer(_LIMIT_S, self._end)
        limit.daemon = True
        limit.start()
        try:
            super().handle()
        finally:
            limit.cancel()

    def _end(self) -> None:
        with suppress(OSError):  # the client may be gone already
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        status: ServiceStatus = self.server.status()
        match self.path:
            case "/health":
                self._send(200 if status.is_healthy else 503, "application/json", status.health())
            case "/metrics":
                self._send(200, "text/plain; version=0.0.4", status.metrics())
            case _:
                self._send(404, "text/plain", "/health or /metrics\n")

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


class _Server(socketserver.TCPServer):
    allow_reuse_address = True

    def handle_error(self, *_: object) -> None:
        """A client that has disconnected is not an error."""


class Monitor:
    """Serves the pages in a thread, one connection at a time. They hold counts, and nothing of texts or weights."""

    def __init__(self, host: str, port: int, status: Callable[[], ServiceStatus]) -> None:
        """Listen.

        Args:
            host: address or name of this machine.
            port: 0 is chosen by the system.
            status: called for each request, in the thread.

        Raises:
            OSError: the address cannot be used.
        """
        self._server = _Server((host, port), _Handler)
        self._server.status = status
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="monitoring", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
