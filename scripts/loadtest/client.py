"""The HTTP client of the load: many requests at once over bare asyncio protocols.

Owns connections and their reuse, hanging up, and slow reading; what the bytes mean is reply's. It does as little per
byte as it can, because a client that is the bottleneck measures itself. Invariant: send() always returns a Reply that
has ended, whatever the server or the network did.
"""

import asyncio
import json
import socket
import ssl
import time
from typing import Any, cast
from urllib.parse import urlsplit

from common.errors import ConfigError
from scripts.loadtest.plan import Ask
from scripts.loadtest.reply import Reply

# So small that a slow reader's unread bytes stay on the server's side; the kernel doubles it.
SLOW_BUFFER = 4096


class Target:
    """Where to send, and what every request has in common. Raises ConfigError for a URL that is none."""

    def __init__(
        self, url: str, model: str, *, key: str = "", stream: bool = True, extra: dict[str, Any] | None = None
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r}: allowed is http://HOST:PORT or https://HOST:PORT")
        self.model, self._stream, self._extra = model, stream, extra or {}
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        lines = [f"POST {path} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}", "content-type: application/json"]
        lines += ["accept: text/event-stream, application/json", "user-agent: millpond-loadtest"]
        lines += [f"authorization: Bearer {key}"] if key else []
        self._head = "\r\n".join([*lines, "content-length: "])

    def request(self, ask: Ask) -> bytes:
        """The bytes of one request."""
        body = json.dumps(ask.body(self.model, self._stream, self._extra)).encode()
        return f"{self._head}{len(body)}\r\n\r\n".encode() + body


class Client:
    """Sends requests and keeps connections. pieces: text pieces that have come so far, of all requests."""

    def __init__(self, target: Target, *, timeout_s: float = 600.0, patience_s: float | None = None) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._idle: list[_Connection] = []
        self.pieces = 0
        self.connections = 0

    async def send(self, ask: Ask, due_at: float | None = None) -> Reply:
        """One request to its end. due_at: when it should have been sent, on time.monotonic's clock."""
        data = self._target.request(ask)
        now = time.monotonic()
        reply = Reply(ask, now if due_at is None else due_at, now)
        while True:
            connection = self._idle_one() if ask.read_per_s is None else None
            fresh = connection is None
            try:
                connection = connection or await self._connect(ask)
            except OSError as error:
                reply.end(time.monotonic(), f"no connection: {error.strerror or error}")
                return reply
            try:
                await connection.exchange(data, reply, self._timeout_s, self._patience_s)
            except asyncio.CancelledError:
                connection.close()
                raise
            if fresh or connection.open or connection.answered or reply.left:
                break
            # The server had closed an idle connection, as it may at any time; nothing was answered, so it is sent anew.
            reply = Reply(ask, reply.due_at, reply.sent_at)
        if reply.http.reusable and ask.read_per_s is None:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _idle_one(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self, ask: Ask) -> "_Connection":
        target = self._target
        loop = asyncio.get_running_loop()
        self.connections += 1
        if ask.read_per_s is None:
            _, connection = await loop.create_connection(
                lambda: _Connection(self), target.host, target.port, ssl=target.tls
            )
            return connection
        # The buffer's size counts only when it is set before connecting.
        family, kind, _, _, address = (await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))[0]
        raw = socket.socket(family, kind)
        raw.setblocking(False)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        try:
            await loop.sock_connect(raw, address)
        except OSError:
            raw.close()
            raise
        name = target.host if target.tls else None
        _, connection = await loop.create_connection(
            lambda: _Connection(self), sock=raw, ssl=target.tls, server_hostname=name
        )
        return connection


class _Connection(asyncio.Protocol):
    """One connection, carrying one request at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._over: asyncio.Future[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self.answered = False
        self.open = True

    async def exchange(self, data: bytes, reply: Reply, timeout_s: float, patience_s: float | None) -> None:
        """Send `data` and fill `reply` to its end."""
        loop = asyncio.get_running_loop()
        self._reply, self._over, self.answered = reply, loop.create_future(), False
        late = loop.call_later(timeout_s, self._finish, f"no end within {timeout_s:g} s")
        if patience_s is not None:
            self._patience = loop.call_later(patience_s, self._lose_patience)
        assert self._transport is not None
        self._transport.write(data)
        try:
            await self._over
        finally:
            late.cancel()
            if self._patience is not None:
                self._patience.cancel()
            self._reply = None

    def close(self) -> None:
        """At once, whatever is unread."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are of no common class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:
            self.open = False  # bytes that nobody asked for: not to be trusted with a request
            return
        self.answered = True
        self._client.pieces += reply.feed(data, time.monotonic())
        if reply.over:
            self._finish()
        elif reply.ask.leave_after is not None and reply.accepted_at and len(reply.pieces) >= reply.ask.leave_after:
            self._leave()
        elif reply.ask.read_per_s is not None:
            self._rest(len(data) / reply.ask.read_per_s)

    def eof_received(self) -> bool:
        return False  # close, which ends in connection_lost

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._reply is not None:
            whole = self._reply.http.ended()
            self._finish("" if whole or self._reply.http.status else f"the connection was lost: {error or 'closed'}")

    # -- ends

    def _rest(self, seconds: float) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        asyncio.get_running_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self.open and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _lose_patience(self) -> None:
        if self._reply is not None and not self._reply.pieces:
            self._leave()

    def _leave(self) -> None:
        if self._reply is not None:
            self._reply.left = True
        self.close()
        self._finish()

    def _finish(self, problem: str = "") -> None:
        if self._reply is None or self._over is None or self._over.done():
            return
        self._reply.end(time.monotonic(), problem)
        self._over.set_result(None)
