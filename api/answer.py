"""One response on its way out: the headers every response carries, HEAD, HTTP/1.0, and errors in the one shape.

Wraps the server's send(). Knows HTTP, nothing of what is answered. Invariant: `complete` is true exactly when the
client has been given a whole response.
"""

import asyncio
from typing import Any

from api.disconnect import Client, Send
from api.responses import RequestError
from api.sse import event


class Answer:
    """The response of one request."""

    def __init__(self, send: Send, label: str, method: str, http_version: str, client: Client) -> None:
        self._send = send
        self._client = client
        self._label = label.encode("latin-1")
        self._head_only = method == "HEAD"
        self._old = http_version == "1.0"
        self._ends_with_connection = False
        self.status = 0
        self.complete = False
        self.headers: list[tuple[bytes, bytes]] = []

    @property
    def started(self) -> bool:
        """Whether a status has been sent."""
        return self.status != 0

    async def send(self, message: dict[str, Any]) -> None:
        """The inner application's send()."""
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._ends_with_connection and not message.get("more_body", False):
            await self._end_old(message)
        else:
            if self._head_only:
                message = {**message, "body": b""}
            # Before the send: the client may leave the moment it has the last byte.
            self.complete = not message.get("more_body", False)
            await self._send(message)

    def takes_more(self) -> bool:
        """Whether what is written now leaves at once."""
        return not self._client.is_full()

    def write(self, part: bytes) -> None:
        """A part of a body that has begun and not ended, without waiting: only while the client takes more."""
        step = self._send({"type": "http.response.body", "body": part, "more_body": True})
        try:
            step.send(None)
        except StopIteration:
            return
        # It is written; what the server waits for is that the connection, full with this, takes more.
        step.close()

    async def _start(self, message: dict[str, Any]) -> None:
        headers = [*message.get("headers", ()), (b"x-request-id", self._label), *self.headers]
        if self._old and message["status"] != 204 and not any(name == b"content-length" for name, _ in headers):
            # The server leaves such a body unframed; only the connection's end can say where it ends.
            self._ends_with_connection = True
            headers.append((b"connection", b"close"))
        self.status = message["status"]
        await self._send({**message, "headers": headers})

    async def _end_old(self, message: dict[str, Any]) -> None:
        if message.get("body"):
            await self._send({**message, "more_body": True})
        self.complete = True
        raise asyncio.CancelledError

    async def empty(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer without a body."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def error(self, error: RequestError) -> None:
        """Answer with an error's status, headers and body."""
        body = error.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def cut(self, error: RequestError) -> None:
        """After the 200: the error as an event, then no end, so that nobody takes what came for the whole."""
        await self._send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        raise asyncio.CancelledError
