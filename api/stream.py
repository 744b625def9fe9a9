"""A streamed reply: tickets in, bytes of events out: text directly to the connection, the rest when it is asked for.

An async iterator over the body's parts. Owns the order of a stream's events; the bytes are a Format's. Invariant:
it ends by StopAsyncIteration after [DONE], or by CancelledError after anything less, so that a client can tell the two.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from api.exchange import Exchange
from api.request_line import RequestLine
from api.responses import stream_error
from api.sse import KEEP_ALIVE, event
from api.ticket import Ticket
from common.generation import Piece, Summary
from common.outcomes import Outcome

# One write's worth, so that what a stalled client is given stays a few packets.
PART_PIECES = 64


class Format(Protocol):
    """The bytes of one reply's stream."""

    def opening(self, choice: int) -> bytes: ...

    def pieces(self, choice: int, pieces: Iterable[Piece]) -> bytes: ...

    def finish(self, choice: int, reason: str) -> bytes: ...

    def usage(self, summaries: Iterable[Summary]) -> bytes: ...


class Writer(Protocol):
    """A response whose start has been sent (api/answer)."""

    def takes_more(self) -> bool: ...

    def write(self, part: bytes) -> None: ...


class ReplyStream:
    """The body of one streamed reply whose tickets have all been accepted.

    The application is given its opening and its end as items. Text that comes between goes straight to `writer` while
    the client keeps up: to wake the application for each token costs more than the token.
    """

    def __init__(
        self, exchange: Exchange, form: Format, line: RequestLine, writer: Writer, *, buffer: int, comment_s: float
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._line = line
        self._writer = writer
        # The application has written all that it was given, and waits.
        self._waits = False
        self._broken: Exception | None = None
        self._buffer = buffer
        self._comment_s = comment_s
        self._state = "opening"
        self._finished: set[int] = set()
        self._sent_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> "ReplyStream":
        return self

    async def __anext__(self) -> bytes:
        # Asked for more: the last part has left. Only while a part waits to be taken can the client be too slow;
        # a burst that comes while nothing waits is no fault of the client's.
        self._bound(0)
        while self._state == "open":
            self._waits = True
            await self._exchange.news()
            self._waits = False
            if self._broken is not None:
                raise self._broken
            part = self._ready() or self._comment()
            if part:
                self._sent_at = time.monotonic()
                self._bound(self._buffer)
                return part
        if self._state == "opening":
            self._state = "open"
            self._exchange.taker = self._take
            self._wake_later()
            return b"".join([self._form.opening(index) for index in range(len(self._exchange.tickets))])
        if self._state == "cut":
            raise asyncio.CancelledError
        raise StopAsyncIteration

    async def close(self) -> None:
        """Called by Falcon at every kind of end."""
        self._exchange.taker = None
        if self._timer is not None:
            self._timer.cancel()

    def _take(self) -> bool:
        """Write the text that has come. False: there is more to it than that, so the application is to be woken."""
        tickets = self._exchange.tickets
        if not self._waits or not self._writer.takes_more() or any(ticket.outcome for ticket in tickets):
            return False
        # Not while we are at it: more than one part of text asks to be woken for the rest.
        self._waits = False
        try:
            part = self._ready()
            if part:
                self._sent_at = time.monotonic()
                self._writer.write(part)
        except Exception as error:
            # Where the application waits, it is told as if it had asked.
            self._broken = error
            return False
        self._waits = True
        return bool(part)

    def _bound(self, pieces: int) -> None:
        for ticket in self._exchange.tickets:
            ticket.bound = pieces

    def _comment(self) -> bytes:
        silent = self._state == "open" and time.monotonic() - self._sent_at >= self._comment_s
        return KEEP_ALIVE if silent else b""

    def _ready(self) -> bytes:
        parts = []
        tickets = self._exchange.tickets
        failed: Ticket | None = None
        for index, ticket in enumerate(tickets):
            if ticket.pieces:
                parts.append(self._form.pieces(index, ticket.take(PART_PIECES)))
                if not self._line.ttft_ms:
                    self._line.ttft_ms = self._line.elapsed_ms()
                    self._line.mark("first write")
            if ticket.pieces:
                self._exchange.poke()
                continue
            if ticket.outcome is None or index in self._finished:
                continue
            if ticket.outcome.kind != "finished":
                failed = failed or ticket
            else:
                self._finished.add(index)
                parts.append(self._form.finish(index, ticket.outcome.value))
        if failed is not None:
            parts.append(self._fail(failed))
        elif len(self._finished) == len(tickets):
            parts.append(self._form.usage([ticket.summary for ticket in tickets]))
            self._line.outcome = tickets[0].outcome.value if tickets[0].outcome else ""
            self._line.completion_tokens = sum(ticket.summary.completion_tokens for ticket in tickets)
            self._state = "done"
        return b"".join(parts)

    def _fail(self, ticket: Ticket) -> bytes:
        self._state = "cut"
        outcome = ticket.outcome or Outcome.STREAM_BROKEN
        self._line.outcome = "slow_reader" if ticket.overflowed else outcome.value
        # What a slow reader gets is a prefix and nothing else.
        return b"" if ticket.overflowed else event(stream_error(outcome, ticket.summary.error))

    def _wake_later(self) -> None:
        # One timer per stream instead of a timeout per wait: there may be a wait for every token.
        self._exchange.poke()
        self._timer = asyncio.get_running_loop().call_later(self._comment_s, self._wake_later)
