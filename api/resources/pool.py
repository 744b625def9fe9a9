"""GET /v1/pool: the broker's snapshot as JSON.

Passes on what the broker says, in its order. Invariant: nothing in it comes from this process.
"""

import falcon.asgi

from api.broker_link import BrokerLink


class Pool:
    """The snapshot."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        resp.media = await self._link.snapshot()
