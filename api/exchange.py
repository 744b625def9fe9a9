"""One client request's dealings with the broker: n tickets, their places, their waiting.

The async shell round the tickets of one request. Knows phases and instants, not HTTP. Invariant: after close() the
broker holds nothing for this request, whatever happened before.
"""

import asyncio
import hashlib
import secrets
import time
from array import array
from collections.abc import Sequence

from api.broker_link import BrokerLink
from api.ticket import Ticket
from common.errors import ServingError
from common.generation import GenerationRequest
from common.ids import ID_BYTES, RequestId
from common.outcomes import Outcome

# Enough tokens to tell one system prompt from another; reading fewer again costs nothing to speak of.
PREFIX_BLOCK = 64
# Reached beyond a million tokens.
MOST_HASHES = 64


class Exchange:
    """The tickets of one request."""

    def __init__(self, link: BrokerLink, count: int) -> None:
        self._link = link
        # A future by hand and not an Event: this is waited for at every token of every stream.
        self._fresh = False
        self._waiter: asyncio.Future[None] | None = None
        self.tickets = [Ticket(RequestId(secrets.token_bytes(ID_BYTES)), self.poke) for _ in range(count)]
        # Fields of the request that nothing will come of, known once the model's abilities are.
        self.ignored: tuple[str, ...] = ()
        self.began_at = time.monotonic()
        self.submitted_at = self.accepted_at = 0.0

    async def reserve(self, label: str, model: str, priority: int, key: str, weight: float) -> str:
        """Take all places or none; the fingerprint of the model that will serve. Raises ServingError."""
        if not self._link.live:
            await self._link.joined()
        self._link.reserve(self.tickets, label, model, priority, key, weight)
        while self.tickets[0].state == "asked":
            await self.news()
        self._raise_failure()
        return self.tickets[0].fingerprint

    def submit(self, requests: Sequence[GenerationRequest], fingerprint: str) -> None:
        """Hand over the work, one request per ticket. Raises ServingError."""
        self._raise_failure()
        self.submitted_at = time.monotonic()
        prompt: list[int] | None = None
        for ticket, request in zip(self.tickets, requests, strict=True):
            if request.prompt is not prompt:
                prompt, prefix = request.prompt, prefix_hashes(request.prompt)
            self._link.submit(ticket, request, prefix, fingerprint)

    async def accepted(self) -> None:
        """Wait until a worker has taken every ticket. Raises ServingError when one ends without its reply before
        that."""
        while True:
            self._raise_failure()
            if all(ticket.accepted for ticket in self.tickets):
                self.accepted_at = time.monotonic()
                return
            await self.news()

    async def finished(self) -> None:
        """Wait until every ticket has ended well. Raises ServingError as soon as one has not."""
        while True:
            self._raise_failure()
            if all(ticket.outcome for ticket in self.tickets):
                return
            await self.news()

    async def news(self) -> None:
        """Wait until something has happened since the last call."""
        if not self._fresh:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._fresh = False

    def poke(self) -> None:
        """Something has happened: let the waiting go on."""
        self._fresh = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, marks: list[tuple[str, float]] | None = None) -> None:
        """Give back whatever the broker still holds; marks: what it should keep for `millpond trace`."""
        self._link.drop(self.tickets)
        if marks:
            self._link.trace(self.tickets, marks)

    def failure(self) -> Ticket | None:
        """A ticket that ended without its reply, if there is one."""
        return next((t for t in self.tickets if t.outcome is not None and t.outcome.kind != "finished"), None)

    @property
    def queue_ms(self) -> float:
        """From the submission to the last acceptance."""
        return max(0.0, self.accepted_at - self.submitted_at) * 1000

    def _raise_failure(self) -> None:
        failed = self.failure()
        if failed is not None:
            outcome = failed.outcome or Outcome.BROKER_LOST
            raise ServingError(outcome, failed.summary.error, failed.retry_after_s)


def prefix_hashes(prompt: Sequence[int]) -> bytes:
    """Eight bytes for each of several heads of a prompt, the shortest first: 64 tokens, then longer by 64 or, from 512 on,
    by a quarter to an eighth. Prompts with a common head share all the hashes up to its length, so the next turn of a
    conversation shares nearly all of the last one's."""
    whole = array("I", prompt).tobytes()
    size = len(whole) // max(1, len(prompt))
    digest = hashlib.blake2b(digest_size=8)
    hashes: list[bytes] = []
    at, length = 0, PREFIX_BLOCK
    while length <= len(prompt) and len(hashes) < MOST_HASHES:
        digest.update(whole[at * size : length * size])
        hashes.append(digest.copy().digest())
        at, length = length, length + max(PREFIX_BLOCK, 1 << (length.bit_length() - 3))
    return b"".join(hashes)
