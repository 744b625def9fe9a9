"""One responder, run while its client is there.

Runs the inner application in the calling task and keeps the only watcher on receive() beside it, since the server wakes
one of two concurrent calls at most. Invariant: when run() is over, the watcher is, too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from api.body import Receive, watch_for_departure

Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class Departure:
    """Cancels the current task when the client leaves. gone: it did, before finished() said that all had been sent."""

    def __init__(self, receive: Receive, finished: Callable[[], bool]) -> None:
        self._receive = receive
        self._finished = finished
        self.gone = False

    async def run(self, app: App, scope: dict[str, Any], body: bytes, send: Send) -> None:
        """Call app with `body` as its one http.request. Raises CancelledError when the client leaves."""
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.ensure_future(self._watch(task))
        try:
            await app(scope, self._inner_receive(body), send)
        finally:
            watcher.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        await watch_for_departure(self._receive)
        if not self._finished():
            self.gone = True
            task.cancel()

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
