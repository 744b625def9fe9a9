"""Instances that several tests may share, because none of them changes it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.harness import Harness

pytestmark = pytest.mark.system


def scripted(model: Path, *flags: str, **environment: str) -> Harness:
    """An instance of the scripted engine with one API process."""
    base = {"MILLPOND_ENGINE": "scripted", "MILLPOND_API_PROCESSES": "1", "MILLPOND_SCRIPTED_RATE": "200"}
    return Harness(*flags, model=model, environment=base | environment)


@pytest.fixture(scope="module")
def instance(tiny_model: Path) -> Iterator[Harness]:
    """Two scripted workers of four slots."""
    with scripted(tiny_model, "--workers", "2", "--slots", "4") as harness:
        yield harness


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[Harness]:
    """Two one-thread workers of the demo model."""
    with Harness("--workers", "2", "--api-processes", "1", model=demo_model) as harness:
        yield harness
