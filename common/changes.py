"""What commands have changed of a running instance's settings: workers per model, and the folder that a model was swapped to.

The pool writes it when a change has come through; it, and API processes that start later, read it over their settings, so
that none of them falls back to what was at the start. `serve` begins without it. Knows a file and its form, not who asked.
Invariant: the file is whole or not there.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError
from common.models import ModelChoice
from common.runtime import Runtime


@dataclass(frozen=True)
class Changes:
    """workers and folders by model; a model that is not named is as the settings say."""

    workers: Mapping[str, int] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)

    def models(self, choices: Sequence[ModelChoice]) -> list[ModelChoice]:
        """The models as they are now."""
        return [ModelChoice(choice.name, self.folders.get(choice.name, choice.source)) for choice in choices]


def read(place: Runtime) -> Changes:
    """What was changed since `serve` started. Raises ConfigError for a file that is not ours."""
    try:
        found = json.loads(place.changes.read_bytes())
        return Changes(dict(found["workers"]), dict(found["folders"]))
    except FileNotFoundError:
        return Changes()
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(f"cannot read {place.changes}; remove it: the settings then count again") from None


def write(place: Runtime, changes: Changes) -> None:
    """Replace what is there in one step. Raises OSError."""
    fresh = place.changes.with_name(f".{place.changes.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"workers": dict(changes.workers), "folders": dict(changes.folders)}), encoding="utf-8")
    fresh.replace(place.changes)
