"""The models as they are now: those of the settings, and what `millpond swap` has put in their places since.

A swap changes a model's fingerprint under its name; the broker's snapshot says in which folder the new one's files lie.
Owns the table that all resources share, replaces entries in it and never adds or removes a name. Invariant: an entry is
whole and can render; one that cannot be read leaves the old one where it is.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from api.broker_link import BrokerLink
from api.served import ServedModel, read_model
from common import logs
from common.errors import ConfigError, ServingError
from common.models import ModelChoice
from common.outcomes import Outcome

# How old the answer to "which model is it now" may be for what the broker is not asked about.
FRESH_S = 2.0
# Beside the present one: the one before it, whose workers may still drain.
KEPT = 2


class Catalog:
    """models: by name, changed in place."""

    def __init__(
        self, models: dict[str, ServedModel], link: BrokerLink, in_thread: Callable[..., Awaitable[Any]]
    ) -> None:
        self.models = models
        self._link = link
        self._in_thread = in_thread
        self._known: dict[str, list[ServedModel]] = {name: [model] for name, model in models.items()}
        self._reading = asyncio.Lock()
        self._fresh_until = 0.0

    async def rendered_for(self, name: str, fingerprint: str) -> ServedModel:
        """The model under this name that has this fingerprint ("": as it is now). Raises ServingError when nobody knows
        its files."""
        found = self._find(name, fingerprint)
        if found is None:
            snapshot = await self._link.snapshot()
            (entry,) = [entry for entry in snapshot["models"] if entry["name"] == name] or [{}]
            found = await self._read(name, fingerprint, entry.get("folders", {}).get(fingerprint, ""))
        if found is None:
            raise ServingError(Outcome.STALE_MODEL)
        self.models[name] = found
        return found

    async def follow(self, snapshot: dict[str, Any]) -> None:
        """Take over what a snapshot says of models that have one fingerprint now."""
        self._fresh_until = time.monotonic() + FRESH_S
        for entry in snapshot.get("models", ()):
            folders = entry.get("folders", {})
            if len(folders) == 1 and entry["name"] in self.models:
                ((fingerprint, folder),) = folders.items()
                found = self._find(entry["name"], fingerprint) or await self._read(entry["name"], fingerprint, folder)
                self.models[entry["name"]] = found or self.models[entry["name"]]

    async def refresh(self) -> None:
        """Ask the broker if nobody has for a while; without a broker everything stays as it is."""
        if time.monotonic() < self._fresh_until:
            return
        self._fresh_until = time.monotonic() + FRESH_S
        try:
            await self.follow(await self._link.snapshot())
        except ServingError:
            return

    def _find(self, name: str, fingerprint: str) -> ServedModel | None:
        if not fingerprint:
            return self.models[name]
        return next((model for model in self._known[name] if model.fingerprint == fingerprint), None)

    async def _read(self, name: str, fingerprint: str, folder: str) -> ServedModel | None:
        if not folder:
            return None
        async with self._reading:
            # Sixteen requests that were sent back at once need it read once.
            found = self._find(name, fingerprint)
            if found is not None:
                return found
            try:
                found = await self._in_thread(read_model, ModelChoice(name, folder))
            except ConfigError as error:
                logs.event("a swapped model cannot be read", logging.ERROR, model=name, reason=str(error))
                return None
            if found.fingerprint != fingerprint:
                return None
            self._known[name] = [found, *self._known[name]][:KEPT]
            logs.event("model swapped", model=name, fingerprint=fingerprint)
            return found
