"""A minute of chaos: whatever is killed, frozen or flooded, every client is told the truth and everything comes back."""

from pathlib import Path

import pytest

from scripts.chaos_run import run

pytestmark = [pytest.mark.system, pytest.mark.slow]

SECONDS = 60.0


@pytest.mark.timeout(360)
def test_a_minute_of_chaos_leaves_nothing_behind(tiny_model: Path, tiny_sentencepiece_model: Path) -> None:
    chaos = run(20261129, SECONDS, tiny_model, tiny_sentencepiece_model)
    assert chaos.violations == []
    # A run in which nothing happened would prove nothing.
    assert chaos.ends["whole stream"] > 50 and chaos.ends["whole"] > 20 and sum(chaos.deeds.values()) > 20
    assert chaos.deeds["roll pool"] + chaos.deeds["swap pool"] and chaos.deeds["scale pool"] and chaos.changes["done"]
    assert chaos.deeds["kill worker"] and chaos.deeds["freeze worker"] and chaos.deeds["kill api"]
