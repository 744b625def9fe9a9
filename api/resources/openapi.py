"""GET /openapi.json: what this server does, for machines.

Invariant: made once, at the start, from the settings that the server runs with.
"""

from typing import Any

import falcon.asgi


class OpenApi:
    """The description."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        resp.media = self._document
