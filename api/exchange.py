"""One client request's dealings with the broker: n tickets, their places, their waiting.

The async shell round the tickets of one request. Knows phases and instants, not HTTP, and of rendering only whom to ask
when a swapped model makes it necessary again. Invariant: after close() the broker holds nothing for this request, whatever
happened before.
"""

import asyncio
import hashlib
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence

from api.broker_link import BrokerLink
from api.ticket import Ticket
from common import logs
from common.errors import ServingError
from common.generation import GenerationRequest
from common.ids import ID_BYTES, RequestId
from common.outcomes import Outcome
from common.prefix import HASH_BYTES, lengths

# Renders for the model with this fingerprint: a request for each ticket, and the fingerprint. Raises ServingError or what
# makes an answer of its own.
Render = Callable[[str], Awaitable[tuple[Sequence[GenerationRequest], str]]]


class Exchange:
    """The tickets of one request."""

    def __init__(self, link: BrokerLink, count: int) -> None:
        self._link = link
        # A future by hand and not an Event: whoever is not written to directly waits for it at every token.
        self._fresh = False
        self._waiter: asyncio.Future[None] | None = None
        # What takes news where it comes, without waking who waits for it; False: wake all the same.
        self.taker: Callable[[], bool] | None = None
        self.tickets = [Ticket(RequestId(secrets.token_bytes(ID_BYTES)), self.poke, self._again) for _ in range(count)]
        self.fingerprint = ""
        # Fields of the request that nothing will come of, known once the model's abilities are.
        self.ignored: tuple[str, ...] = ()
        # A grammar holds the reply to JSON.
        self.enforced = False
        self._render: Render | None = None
        self._rendering: asyncio.Task[None] | None = None
        self._render_error: Exception | None = None
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

    def submit(self, requests: Sequence[GenerationRequest], fingerprint: str, render: Render) -> None:
        """Hand over the work, one request per ticket; render: makes it again if it is sent back. Raises ServingError."""
        self._raise_failure()
        self._render, self.fingerprint = render, fingerprint
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
        self._link.tell(self._news)

    def _news(self) -> None:
        if self.taker is not None and self.taker():
            return
        self._fresh = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, marks: list[tuple[str, float]] | None = None) -> None:
        """Give back whatever the broker still holds; marks: what it should keep for `millpond trace`."""
        if self._rendering is not None:
            self._rendering.cancel()
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

    def _again(self) -> None:
        if self._rendering is None:
            self._rendering = asyncio.get_running_loop().create_task(self._render_again())

    async def _render_again(self) -> None:
        """Render and submit what was sent back, until nothing is: a second swap may come meanwhile."""
        assert self._render is not None
        try:
            while back := [index for index, ticket in enumerate(self.tickets) if ticket.state == "reserved"]:
                requests, self.fingerprint = await self._render(self.tickets[back[0]].fingerprint)
                for index in back:
                    if self.tickets[index].state == "reserved":
                        prefix = prefix_hashes(requests[index].prompt)
                        self._link.submit(self.tickets[index], requests[index], prefix, self.fingerprint)
        except Exception as error:
            # It is told where the request is waited for: as its own answer before the 200, as a failure after it.
            logs.event("a request could not be rendered again", reason=type(error).__name__)
            self._render_error = error
            for ticket in self.tickets:
                if ticket.state == "reserved":
                    self._link.drop([ticket], Outcome.STALE_MODEL)
            self.poke()
        finally:
            self._rendering = None

    def _raise_failure(self) -> None:
        if self._render_error is not None:
            raise self._render_error
        failed = self.failure()
        if failed is not None:
            outcome = failed.outcome or Outcome.BROKER_LOST
            raise ServingError(outcome, failed.summary.error, failed.retry_after_s)


def prefix_hashes(prompt: Sequence[int]) -> bytes:
    """The prompt's prefix as common/prefix has it: prompts with a common head share all the hashes up to its length, so the
    next turn of a conversation shares nearly all of the last one's."""
    whole = array("I", prompt).tobytes()
    size = len(whole) // max(1, len(prompt))
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    hashes: list[bytes] = []
    at = 0
    for length in lengths():
        if length > len(prompt):
            break
        digest.update(whole[at * size : length * size])
        hashes.append(digest.copy().digest())
        at = length
    return b"".join(hashes)
