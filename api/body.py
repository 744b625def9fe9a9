"""Reading one request's body from the ASGI server: whole, under one deadline and one cap.

Owns what of the body has been read, so that a refusal can leave the connection usable or close it cleanly. Knows
nothing of what is in the body. Invariant: after settle() nothing of this body can be taken for the next request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from api.responses import body_timeout, body_too_large, refused_length

Receive = Callable[[], Awaitable[dict[str, Any]]]

# An unread body up to this size is read and dropped, so that the connection can go on; a larger one ends it.
SKIPPED_BYTES = 65536
# How long a refused client may still send before the connection is closed: closing at once would reset it and could
# destroy the answer it has not read yet.
LINGER_S = 1.0


class ClientGone(Exception):
    """The connection ended before the body did."""


class Body:
    """The body of one request."""

    def __init__(
        self, receive: Receive, headers: Iterable[tuple[bytes, bytes]], is_here: Callable[[], bool]
    ) -> None:
        """is_here: whether all of it has come already."""
        self._receive = receive
        self._is_here = is_here
        self._length: int | None = None
        self._bad_length = False
        self._chunked = self._held_back = False
        for name, value in headers:
            if name == b"content-length":
                self._bad_length = not value.isdigit()
                self._length = int(value) if value.isdigit() and len(value) < 19 else 2**63
            elif name == b"transfer-encoding":
                self._chunked = True
            elif name == b"expect":
                self._held_back = True
        self._finished = not self._chunked and not self._length

    @property
    def leaves_connection_usable(self) -> bool:
        """Whether what is unread is little enough to be skipped."""
        return self._finished or (not self._chunked and not self._held_back and (self._length or 0) <= SKIPPED_BYTES)

    async def read(self, cap: int, deadline_s: float) -> bytes:
        """The whole body. Raises RequestError (413, 408), ClientGone."""
        if self._bad_length:
            raise refused_length()
        if self._length is not None and self._length > cap:
            raise body_too_large(cap)
        if self._is_here():
            # Most come with their headers; a deadline would cost more than the reading.
            return await self._read(cap)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._read(cap)
        except TimeoutError:
            raise body_timeout(deadline_s) from None

    async def _read(self, cap: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            event = await self._receive()
            if event["type"] != "http.request":
                raise ClientGone
            part = event.get("body", b"")
            size += len(part)
            if size > cap:
                raise body_too_large(cap)
            parts.append(part)
            if not event.get("more_body", False):
                self._finished = True
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def settle(self) -> None:
        """Read away what a refused client still sends, for a while."""
        if self._finished or (self._held_back and not self._chunked):
            return
        try:
            async with asyncio.timeout(LINGER_S):
                while not self._finished:
                    event = await self._receive()
                    self._finished = event["type"] != "http.request" or not event.get("more_body", False)
        except TimeoutError:
            return
