"""One responder, run while its client is there.

Runs the inner application in the calling task and has the connection say when the client leaves, since receive() tells it
only to who waits for it: a task of its own for every request. Invariant: when run() is over, the connection tells nobody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from api.body import Receive

Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]
# Where a request's scope has its Client.
CLIENT = "millpond.client"


class Client(Protocol):
    """The connection that a request came by (api/connections), as far as the request may know it."""

    def tell_of_departure(self, left: Callable[[], None] | None) -> None:
        """Call this when the client has gone, at once if it has; None: nobody asks any more."""

    def has_whole_body(self) -> bool:
        """Whether nothing of the request is still to come."""

    def is_full(self) -> bool:
        """Whether what was sent waits for the client to take it."""


class Departure:
    """Cancels the current task when the client leaves. gone: it did, before finished() said that all had been sent."""

    def __init__(self, client: Client, finished: Callable[[], bool]) -> None:
        self._client = client
        self._finished = finished
        self._task: asyncio.Task[Any] | None = None
        self.gone = False

    async def run(self, app: App, scope: dict[str, Any], body: bytes, send: Send) -> None:
        """Call app with `body` as its one http.request. Raises CancelledError when the client leaves."""
        self._task = asyncio.current_task()
        try:
            self._client.tell_of_departure(self._left)
            await app(scope, self._inner_receive(body), send)
        finally:
            self._client.tell_of_departure(None)

    def _left(self) -> None:
        assert self._task is not None
        if not self._finished() and not self.gone:
            self.gone = True
            self._task.cancel()

    @staticmethod
    def _inner_receive(body: bytes) -> Receive:
        events = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if events:
                return events.pop()
            # Nobody inside may learn of the departure in another way than by being cancelled.
            await asyncio.get_running_loop().create_future()
            raise AssertionError("unreachable")

        return receive
