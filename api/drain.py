"""The end of an API process: from the first TERM to its exit.

gunicorn would wait for silent connections and then kill running streams without a word; so this ends them before it
does. Knows signals and instants, nothing of requests. Invariant: what is cut is cut as a failure the client can see,
and counted.
"""

import asyncio
import logging
import mmap
import signal
from collections.abc import Callable
from typing import Any

from api.broker_link import BrokerLink
from api.connections import Connections
from api.middleware import Lifecycle
from common import logs

# While draining, connections become idle one by one.
SWEEP_S = 0.1
# For cut streams' last event to leave; a client that does not read would hold the process otherwise.
LAST_WORDS_S = 1.0


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


def hold_signals() -> None:
    """Keep signals that end a worker until Drain takes them: uvloop loses what comes before its loop runs, and the
    master, which says it once, would wait for the whole graceful timeout."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


class CutCounter:
    """How many replies were cut, over all processes: shared memory made before the fork."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 64)

    def add(self, count: int) -> None:
        """One process's cuts. Two at the same instant may count as one: only zero or not matters."""
        self._shared[:8] = (self.total + count).to_bytes(8, "little")

    def reset(self) -> None:
        """Count from here."""
        self._shared[:8] = bytes(8)

    @property
    def total(self) -> int:
        """Cut so far."""
        return int.from_bytes(self._shared[:8], "little")


class Drain:
    """Ends one worker of gunicorn's."""

    def __init__(
        self,
        worker: Any,
        lifecycle: Lifecycle,
        link: BrokerLink,
        connections: Connections,
        cuts: CutCounter,
        timeout_s: float,
    ) -> None:
        self._worker = worker
        self._lifecycle = lifecycle
        self._link = link
        self._connections = connections
        self._cuts = cuts
        self._timeout_s = timeout_s

    def listen(self) -> None:
        """Take the worker's signals: a first TERM drains, a second one (or INT, QUIT) ends at once."""
        loop = self._worker.loop
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        for number in (signal.SIGINT, signal.SIGQUIT):
            loop.add_signal_handler(number, self._now)
        # Once the loop runs.
        loop.call_soon(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)

    def _terminate(self) -> None:
        if self._lifecycle.draining:
            self._now()
            return
        self._begin()
        self._later(self._timeout_s, self._cut)
        logs.event("draining", requests=self._link.running, timeout_s=self._timeout_s)

    def _begin(self) -> None:
        self._lifecycle.draining = True
        # gunicorn's loop looks at its exit flag once a second; what this process accepted until then would be served by
        # one that is about to end, while the next one stands ready.
        for server in self._worker.servers:
            server.close()
        self._worker.handle_exit_signal()
        self._sweep()

    def _sweep(self) -> None:
        self._connections.close_idle()
        self._later(SWEEP_S, self._sweep)

    def _now(self) -> None:
        if not self._lifecycle.draining:
            self._begin()
        self._cut()

    def _cut(self) -> None:
        cut = self._link.cut_all()
        if cut:
            self._cuts.add(cut)
            logs.event("cut what still ran", logging.WARNING, requests=cut)
        self._later(LAST_WORDS_S, self._connections.abort_all)

    @staticmethod
    def _later(delay_s: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, call)
