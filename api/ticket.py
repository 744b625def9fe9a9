"""One request (one choice) as the API sees it, from RESERVE to its one outcome (pure).

    asked --RESERVED--> reserved --submitted()--> submitted --STARTED--> started --DONE--> ended
      any state --REJECTED, DONE, end()--> ended

A ticket only takes messages in, keeps the pieces nobody has taken yet, and calls `wake` when there is something new.
Rules: 1. The outcome is set once. 2. A newer attempt replaces an older one only while no piece of the older has come;
anything older is stale and dropped. 3. Pieces are counted by seq from 0 without gaps; a gap ends the ticket as
STREAM_BROKEN. 4. A bounded ticket whose reader is too far behind ends as CANCELLED with `overflowed`; the pieces it
holds stay, so that what the client gets is a prefix. Methods that end a ticket which the broker still serves return
True: the owner sends CANCEL.
"""

import sys
from collections.abc import Callable

from common.envelope import Done, Rejected, Reserved, Started, Tokens
from common.errors import ProtocolError
from common.generation import Piece, Summary, unpack_pieces, unpack_summary
from common.ids import RequestId
from common.outcomes import Outcome


class Ticket:
    """State, pieces and outcome of one request."""

    __slots__ = (
        "attempt",
        "block",
        "bound",
        "fingerprint",
        "id",
        "lane",
        "next_seq",
        "outcome",
        "overflowed",
        "pieces",
        "placed",
        "quiet",
        "retry_after_s",
        "state",
        "summary",
        "wake",
        "worker",
    )

    def __init__(self, request: RequestId, wake: Callable[[], None]) -> None:
        self.id = request
        self.wake = wake
        self.state = "asked"
        # The broker gave it a place, and so began a trace of it.
        self.placed = False
        self.attempt = 0
        self.next_seq = 0
        self.pieces: list[Piece] = []
        # 0: unbounded (a whole reply is bounded by its max_tokens). block: the most pieces one TOKENS has brought.
        self.bound = 0
        self.block = 1
        # quiet: pieces alone wake nobody (a whole reply has no use for them before its end).
        self.quiet = False
        self.outcome: Outcome | None = None
        self.overflowed = False
        self.retry_after_s: float | None = None
        self.fingerprint = ""
        self.lane = ""
        self.worker = ""
        self.summary = Summary()

    @property
    def accepted(self) -> bool:
        """A worker took the request, so the reply's status may be sent."""
        return self.attempt > 0 or (self.outcome is not None and self.outcome.kind == "finished")

    def reserved(self, message: Reserved) -> None:
        """The place is held."""
        if self.state == "asked":
            self.state = "reserved"
            self.placed = True
            self.fingerprint = message.fingerprint
            self.wake()

    def rejected(self, message: Rejected) -> None:
        """No place, or not any more."""
        self.retry_after_s = message.retry_after_ms / 1000 or None
        self.end(message.outcome)

    def submitted(self) -> None:
        """SUBMIT has left."""
        assert self.state == "reserved", self.state
        self.state = "submitted"

    def started(self, message: Started) -> None:
        """A worker accepted the request; said again by the next attempt when the first one's worker died."""
        if self.state not in ("submitted", "started") or not self._current(message.attempt):
            return
        self.state = "started"
        self.lane, self.worker = message.lane, message.worker
        self.wake()

    def tokens(self, message: Tokens, payload: bytes) -> bool:
        """Pieces came. True: the ticket has ended here and the broker must be told."""
        if self.state != "started" or message.attempt < self.attempt:
            return False
        if message.attempt != self.attempt or message.seq != self.next_seq:
            return self.end(Outcome.STREAM_BROKEN)
        try:
            pieces = unpack_pieces(payload)
        except ProtocolError:
            return self.end(Outcome.STREAM_BROKEN)
        self.next_seq += 1
        if self.bound:
            self.block = max(self.block, len(pieces))
            if len(self.pieces) + len(pieces) > max(self.bound, 2 * self.block + 1):
                self.overflowed = True
                return self.end(Outcome.CANCELLED)
        self.pieces += pieces
        if not self.quiet:
            self.wake()
        return False

    def done(self, message: Done, payload: bytes) -> None:
        """The broker's or worker's one outcome."""
        if self.state == "ended" or 0 < message.attempt < self.attempt:
            return
        try:
            self.summary = unpack_summary(payload)
        except ProtocolError:
            self.end(Outcome.STREAM_BROKEN)
            return
        self.lane = self.summary.lane or self.lane
        self.end(message.outcome)

    def end(self, outcome: Outcome) -> bool:
        """End for this reason unless it has ended. True: it had not."""
        if self.state == "ended":
            return False
        self.state = "ended"
        self.outcome = outcome
        self.wake()
        return True

    def take(self, most: int = sys.maxsize) -> list[Piece]:
        """The pieces not taken yet, the oldest `most` of them."""
        if len(self.pieces) <= most:
            pieces, self.pieces = self.pieces, []
        else:
            pieces, self.pieces = self.pieces[:most], self.pieces[most:]
        return pieces

    def _current(self, attempt: int) -> bool:
        if attempt > self.attempt and self.next_seq == 0:
            self.attempt = attempt
        return attempt == self.attempt
