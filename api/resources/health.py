"""GET /health and /health/ready.

Health: this process lives and has joined the broker. Ready: a request would find a worker, judged from the broker's own
snapshot. Invariant: ready is never answered from memory, so that it is not green over a dead pool.
"""

from typing import Any

import falcon.asgi

from api.broker_link import BrokerLink
from api.middleware import Lifecycle
from api.responses import API_ERROR, RequestError
from common.errors import ServingError

SNAPSHOT_S = 1.0
# The broker's own bound for a stuck engine: longer than the slowest prefill chunk.
SOUND_STEP_MS = 120_000


def _unavailable(cause: str) -> RequestError:
    return RequestError(503, cause, kind=API_ERROR, outcome="not_ready")


class Health:
    """Whether this process can speak to the broker."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        if not self._link.live:
            raise _unavailable(f"not joined to the broker: {self._link.lost_because}")
        resp.media = {"status": "ok"}


class Ready:
    """Whether a request would be served."""

    def __init__(self, link: BrokerLink, lifecycle: Lifecycle) -> None:
        self._link = link
        self._lifecycle = lifecycle

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        if self._lifecycle.draining:
            raise _unavailable("draining")
        try:
            snapshot = await self._link.snapshot(SNAPSHOT_S)
        except ServingError:
            raise _unavailable("the broker does not answer") from None
        cause = why_not_ready(snapshot)
        if cause:
            raise _unavailable(cause)
        resp.media = {"status": "ready"}


def why_not_ready(snapshot: dict[str, Any]) -> str:
    """ "" when some worker is ready, not draining, and steps."""
    if snapshot.get("draining"):
        return "draining"
    workers = snapshot.get("workers", ())
    if any(worker["state"] == "ready" and worker["step_age_ms"] < SOUND_STEP_MS for worker in workers):
        return ""
    states = ", ".join(f"{worker['name']} {worker['state']}" for worker in workers)
    return f"no worker is ready ({states or 'there is none'})"
