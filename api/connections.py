"""The open connections of one API process, and the bounds the server does not set itself.

gunicorn's protocol class with additions: who is connected, a deadline for a first request's headers, an end for
connections that take nothing any more, news of a client's departure, calls without a task of their own, and what
gunicorn leaves open of HTTP (upgrades, HTTP/1.0). Knows nothing of routes or bodies. Invariant: a protocol is
in `open` exactly between connection_made and connection_lost.
"""

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.workers import gasgi

from api.disconnect import CLIENT
from api.malformed import refusal
from api.request_line import RequestLine, new_label

# While draining: how long a connection that was just accepted may take to ask.
YOUNG_S = 1.0
# What the kernel takes for a client that reads slowly: small, so that the bound on a stream's pieces is real.
SEND_BUFFER = 65536


class Connections:
    """All connections of this process."""

    def __init__(self, header_timeout_s: float, stall_timeout_s: float) -> None:
        self.header_timeout_s = header_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.open: set[Connection] = set()

    def install(self) -> None:
        """Make the worker use these; it looks the class up by name in its module for each connection."""
        connections = self

        class Tracked(Connection):
            """Bound to this process's connections."""

            def __init__(self, worker: Any) -> None:
                super().__init__(worker, connections)

        gasgi.ASGIProtocol = Tracked

    def close_idle(self) -> None:
        """Close those between two requests and those that have sent none for a while."""
        for connection in list(self.open):
            if not connection.is_young():
                connection.close_if_idle()

    def abort_all(self) -> None:
        """Reset what is left, whatever it holds."""
        for connection in list(self.open):
            connection.transport.abort()


class Connection(ASGIProtocol):
    """One connection."""

    def __init__(self, worker: Any, connections: Connections) -> None:
        super().__init__(worker)
        self._connections = connections
        self._headers_due: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._made_at = 0.0
        self._left: Callable[[], None] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connections.open.add(self)
        loop = asyncio.get_running_loop()
        self._made_at = loop.time()
        self._headers_due = loop.call_later(self._connections.header_timeout_s, self._headers_are_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.open.discard(self)
        for timer in (self._headers_due, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        # The client took something; what is buffered from now on is measured anew.
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def is_young(self) -> bool:
        """Whether its first request is probably on its way: closing now would look like a crash to its client.

        gunicorn counts a request from the moment that it waits for it.
        """
        return self.req_count <= 1 and asyncio.get_running_loop().time() - self._made_at < YOUNG_S

    def close_if_idle(self) -> None:
        """Close unless a request is being served."""
        if self._awaiting_request and not self._finishing_calls and not self._closed:
            self._keepalive_timeout()

    def _close_transport(self) -> None:
        super()._close_transport()
        # A closed connection still waits for its client to take what is buffered.
        self._watch_progress()

    def _send_error_response(self, status: int, message: str, extra_headers: Sequence[tuple[str, str]] = ()) -> None:
        # The server's own refusals (a malformed request line, too many headers) come before any application.
        line = RequestLine(label=new_label(), status=status, outcome="malformed")
        body = refusal(status, message, sys.exc_info()[1]).body()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("x-request-id", line.label),
        ]
        lines = [f"{name}: {value}" for name, value in (*headers, *extra_headers, ("Connection", "close"))]
        head = "\r\n".join([f"HTTP/1.1 {status} {self._get_reason_phrase(status)}", *lines, "", ""])
        self._safe_write(head.encode("latin-1") + body)
        line.write()

    async def _serve_http_request(self, request: Any, sockname: Any, peername: Any) -> bool:
        # The server would run each call in a task of its own, so that an application may go on after its response and the
        # next request begin meanwhile. Ours is over with its response, and a task costs as much as a chunk.
        served = await self._handle_http_request(request, sockname, peername)
        # What comes in one packet is parsed already, and many an answer waits for nothing: ten thousand requests would
        # be served before anybody else had his turn.
        await asyncio.sleep(0)
        return bool(served)

    def _build_http_scope(self, request: Any, sockname: Any, peername: Any) -> dict[str, Any]:
        scope = super()._build_http_scope(request, sockname, peername)
        scope[CLIENT] = self
        return scope

    def tell_of_departure(self, left: Callable[[], None] | None) -> None:
        """As Client has it."""
        self._left = left
        if left is not None and self._closed:
            left()

    def has_whole_body(self) -> bool:
        """As Client has it."""
        return self._body_receiver is not None and self._body_receiver._complete

    def is_full(self) -> bool:
        """As Client has it."""
        return self._flow_control is not None and self._flow_control.write_paused

    def _is_websocket_upgrade(self, request: Any) -> bool:
        # A server may pass over an Upgrade (RFC 9110, 7.8). The answer is then that of the request without it, in our
        # shape and our log; the server's own would be a 403 without a word.
        return False

    def _send_response_start(self, status: int, headers: Any, request: Any, close: bool = False) -> None:
        if request.version < (1, 1) and not close and not any(name == b"connection" for name, _ in headers):
            # A client of HTTP/1.0 takes the connection for ended unless it is told (RFC 9112, C.2.2).
            headers = [*headers, (b"connection", b"keep-alive")]
        super()._send_response_start(status, headers, request, close=close)

    def _headers_are_late(self) -> None:
        if self.req_count <= 1 and self._current_request is None:
            self.close_if_idle()

    def _watch_progress(self) -> None:
        if self._stall is None and self.transport is not None and not self._conn_lost_handled:
            self._unsent = self.transport.get_write_buffer_size()
            if self._unsent:
                loop = asyncio.get_running_loop()
                self._stall = loop.call_later(self._connections.stall_timeout_s, self._judge_progress)

    def _judge_progress(self) -> None:
        self._stall = None
        if self._conn_lost_handled:
            return
        if self.transport.get_write_buffer_size() >= self._unsent:
            self.transport.abort()
        else:
            self._watch_progress()


def bound_listeners(sockets: list[Any], stall_timeout_s: float) -> None:
    """Options that accepted connections inherit."""
    for listener in sockets:
        listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT") and listener.sock.family != socket.AF_UNIX:
            timeout_ms = int(stall_timeout_s * 1000)
            listener.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
