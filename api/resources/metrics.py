"""GET /metrics: Prometheus's text, made from the broker's snapshot.

Invariant: nothing in it comes from this process, so every API process gives the same answer.
"""

import falcon.asgi

from api import metrics
from api.broker_link import BrokerLink


class Metrics:
    """The exposition."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        resp.data = metrics.text(await self._link.snapshot())
        resp.content_type = metrics.CONTENT_TYPE
