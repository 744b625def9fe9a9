"""One budget for several models, and a worker that outgrows its share while clients are served."""

from pathlib import Path

import pytest

from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted
from tests.system.streams import Stream

pytestmark = [pytest.mark.system, pytest.mark.slow]

MIB = 2**20


def row_of(harness: Harness, worker: str) -> dict:
    return next(row for row in harness.snapshot()["workers"] if row["name"] == worker)


def test_a_worker_over_its_share_is_replaced_while_all_are_served(tiny_model: Path) -> None:
    flags = ("--workers", "2", "--slots", "2", "--memory-budget", "1GiB", "--memory-patience", "0.5")
    with scripted(tiny_model, *flags) as harness:
        before = {row["name"]: row["pid"] for row in harness.snapshot()["workers"]}
        # Half of the budget is each one's share.
        stream = Stream(harness, script(count=60, rate=20, memory=513 * MIB)).flowing()
        name = stream.headers["x-millpond-worker"]
        wait_for(lambda: row_of(harness, name)["state"] == "draining", 10, "draining")
        assert row_of(harness, name)["memory"] == {
            "active": 513 * MIB, "cache": 0, "peak": 513 * MIB, "budget": 512 * MIB
        }  # fmt: skip
        for _ in range(3):
            status, reply = harness.chat(script(count=3, rate=0))
            assert status == 200, reply
        other = Stream(harness, script(count=3, rate=0)).over()
        assert other.whole and other.headers["x-millpond-worker"] != name
        assert row_of(harness, name)["pid"] == before[name]
        # What it was running is not cut.
        assert stream.over().whole and stream.text.endswith(" word60")
        wait_for(lambda: row_of(harness, name)["state"] == "ready" and row_of(harness, name)["restarts"] == 1, 15, "again")
        rows = {row["name"]: row for row in harness.snapshot()["workers"]}
        assert rows[name]["pid"] != before[name] and rows[name]["memory"].get("active", 0) == 0
        assert [row["restarts"] for row in rows.values() if row["name"] != name] == [0]
        assert harness.snapshot()["finished"].get("worker_lost", 0) == 0


def test_models_share_a_budget_and_have_workers_and_queues_of_their_own(tiny_model: Path) -> None:
    flags = (
        "--model", f"org/a={tiny_model}", "--model", f"b={tiny_model}", "--workers", "org/a=2", "--workers", "b=1",
        "--memory-budget", "900MiB", "--slots", "2", "--engine", "scripted", "--api-processes", "1", "--max-queue", "0",
    )  # fmt: skip
    with Harness(*flags) as harness:
        wait_for(lambda: all(row["state"] == "ready" for row in harness.snapshot()["workers"]), 20, "all ready")
        rows = harness.snapshot()["workers"]
        assert {row["name"]: row["model"] for row in rows} == {"b-0": "b", "org/a-0": "org/a", "org/a-1": "org/a"}
        wait_for(lambda: all("budget" in row["memory"] for row in harness.snapshot()["workers"]), 10, "reports")
        assert {row["memory"]["budget"] for row in harness.snapshot()["workers"]} == {300 * MIB}
        assert [entry["id"] for entry in harness.get("/v1/models")[1]["data"]] == ["org/a", "b"]
        # An alias: the name without its owner.
        for asked, served in (("org/a", "org/a"), ("a", "org/a"), ("b", "b")):
            status, reply = harness.chat(script(count=1), model=asked)
            assert (status, reply["model"]) == (200, served)
        assert harness.chat("hello", model="c")[0] == 404
        # A flood on one is not felt by the other.
        flood = [Stream(harness, script(count=20, rate=10), model="b").flowing() for _ in range(2)]
        assert harness.chat(script(count=1), model="b")[0] == 529
        assert harness.chat(script(count=1), model="a")[0] == 200
        assert all(stream.over().whole for stream in flood)


def test_the_plan_is_shown_before_anything_starts_and_is_what_starts(tiny_model: Path) -> None:
    harness = Harness("--memory-budget", "600MiB", "--api-processes", "1", "--engine", "batched", model=tiny_model)
    planned = harness.plan()
    (entry,) = planned["devices"][0]["models"]
    assert entry["limited_by"] == "memory" and entry["weights"] == "float32"
    with harness:
        row = row_of(harness, "m-0")
        assert row["slots"] == entry["slots"] and row["kv_bytes_per_token"] == entry["kv_bytes_per_token"]
        assert row["kv_tokens"] == pytest.approx(entry["kv_tokens"], rel=0.05)
        assert row["weight_bytes"] == pytest.approx(entry["weight_bytes"], rel=0.05)
