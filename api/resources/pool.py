"""GET /v1/pool: the broker's snapshot as JSON.

Passes on what the broker says, in its order; workers that have not reported yet have every kind of memory, too.
Invariant: nothing in it comes from this process.
"""

from typing import Any

import falcon.asgi

from api.broker_link import BrokerLink


NO_MEMORY = {"active": 0, "cache": 0, "peak": 0, "budget": 0}


class Pool:
    """The snapshot."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        resp.media = complete(await self._link.snapshot())


def complete(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The snapshot with what workers that are only starting cannot say, and without paths of this machine."""
    workers = [{**worker, "memory": NO_MEMORY | worker["memory"]} for worker in snapshot["workers"]]
    models = [{name: value for name, value in model.items() if name != "folders"} for model in snapshot["models"]]
    return {**snapshot, "workers": workers, "models": models}
