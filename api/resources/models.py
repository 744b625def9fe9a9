"""GET /v1/models and /v1/models/{id}.

Lists what this instance serves, always all of it; what the broker's snapshot knows of workers is added where it
answers. Invariant: a model whose workers are all down stays listed.
"""

from typing import Any

import falcon.asgi

from api.broker_link import BrokerLink
from api.catalog import Catalog
from api.responses import model_not_found
from api.served import ServedModel, find
from common.errors import ServingError

# A list without workers' details is better than one that waits for a broker that has gone.
SNAPSHOT_S = 1.0


class Models:
    """The list and its entries."""

    def __init__(self, catalog: Catalog, link: BrokerLink) -> None:
        self._catalog = catalog
        self._models = catalog.models
        self._link = link

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response, name: str = "") -> None:
        if name and find(self._models, name) is None:
            raise model_not_found(name, sorted(self._models))
        known = await self._known()
        model = find(self._models, name)
        if model is not None:
            resp.media = self._entry(model, known.get(model.name, {}))
        else:
            entries = [self._entry(one, known.get(one.name, {})) for one in self._models.values()]
            resp.media = {"object": "list", "data": entries}

    async def _known(self) -> dict[str, dict[str, Any]]:
        try:
            snapshot = await self._link.snapshot(SNAPSHOT_S)
        except ServingError:
            return {}
        await self._catalog.follow(snapshot)
        return {entry["name"]: entry for entry in snapshot.get("models", ())}

    @staticmethod
    def _entry(model: ServedModel, known: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "millpond",
            "context_length": known.get("context") or model.context,
            "lanes": known.get("lanes", []),
            "abilities": known.get("abilities", []),
            "state": known.get("state", "none"),
            "system_fingerprint": f"fp_{model.fingerprint}",
        }
