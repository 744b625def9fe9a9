"""`millpond loadtest` against a real instance of the scripted engine: its counts are the server's counts."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted

pytestmark = [pytest.mark.system, pytest.mark.slow]

WORKERS, SLOTS, QUEUE = 2, 3, 2


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Harness]:
    """Room for eight requests."""
    with scripted(tiny_model, "--workers", str(WORKERS), "--slots", str(SLOTS), "--max-queue", str(QUEUE)) as harness:
        yield harness


def load(harness: Harness, folder: Path, *flags: str) -> tuple[int, list[dict[str, Any]], str]:
    """Status, stages and page of one run."""
    paths = folder / "figures.json", folder / "page.html"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.millpond", "loadtest", harness.url, "--warmup", "0"]
        + [*flags, "--json", str(paths[0]), "--html", str(paths[1])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(paths[0].read_text())["stages"], paths[1].read_text()


def finished(harness: Harness) -> dict[str, int]:
    return dict(harness.snapshot()["finished"])


def test_a_closed_loop_counts_what_the_server_counts(small: Harness, tmp_path: Path) -> None:
    before = finished(small)
    flags = ("--clients", "1,6", "--requests", "30", "--ending", script(count=12, rate=200), "--reply", "50")
    status, stages, page = load(small, tmp_path, *flags)
    assert status == 0 and [stage["requests"] for stage in stages] == [30, 30]
    for stage in stages:
        assert stage["outcomes"]["complete"] == 30 and stage["tokens"] == 30 * 12 and stage["finishes"] == {"stop": 30}
        assert sum(stage["served_by"].values()) == 30 and len(stage["served_by"]) == WORKERS
        # Tokens are 5 ms apart whatever the load; wide limits, because the machine is shared.
        assert 0.004 < stage["per_token"]["percentiles"]["p50"] < 0.02
        assert stage["gap"]["count"] <= 30 * 11 and stage["first"]["count"] == 30
    assert stages[1]["tokens_per_s"] > 2 * stages[0]["tokens_per_s"]
    assert finished(small)["stop"] - before.get("stop", 0) == 60
    assert page.startswith("<!doctype html>") and page.count("<svg") == 8


def test_past_capacity_refusals_are_counted_with_their_advice(small: Harness, tmp_path: Path) -> None:
    refused = dict(small.snapshot()["refused"]).get("queue_full", 0)
    flags = ("--clients", "16", "--requests", "64", "--impatient", "--ending", script(count=40, rate=100))
    status, (stage,), _ = load(small, tmp_path, *flags)
    outcomes = stage["outcomes"]
    assert status == 0 and sum(outcomes.values()) == 64 and outcomes["refused"] > 0 and outcomes["failed"] == 0
    assert stage["refusals"] == {"529 queue_full": outcomes["refused"]} and stage["without_advice"] == 0
    assert 1 <= stage["retry_after_s"]["least"] <= 60
    assert small.snapshot()["refused"]["queue_full"] - refused == outcomes["refused"]
    wait_for(small.idle, 10, "idle")


def test_an_open_loop_with_hang_ups_and_slow_readers_accounts_for_everybody(small: Harness, tmp_path: Path) -> None:
    ending = script(count=30, rate=200)
    flags = (
        "--rate",
        "15",
        "--seconds",
        "3",
        "--cancel",
        "0.2",
        "--slow",
        "0.1",
        "--slow-bytes",
        "4000",
        "--ending",
        ending,
    )
    status, (stage,), _ = load(small, tmp_path, *flags, "--limit-first-ms", "1")
    outcomes = stage["outcomes"]
    assert status == 0 and sum(outcomes.values()) == stage["requests"] > 20
    assert outcomes["left"] > 0 and outcomes["complete"] > 0 and outcomes["failed"] == 0
    # Nothing is that fast: no reply is good, though every one is complete.
    assert stage["good"] == 0 < stage["replies_per_s"]
    wait_for(small.idle, 10, "idle")


def test_failures_are_failures(small: Harness, tmp_path: Path) -> None:
    flags = ("--clients", "2", "--requests", "4", "--ending", script(count=30, rate=200, fail_at=9))
    status, (stage,), page = load(small, tmp_path, *flags)
    assert status == 1 and stage["outcomes"]["failed"] == 4
    assert all("error event" in problem for problem in stage["problems"]) and "4 replies failed" in page
