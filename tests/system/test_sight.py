"""Metrics, logs, traces and tables agree with what a scripted load did."""

import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted
from tests.system.streams import Stream

pytestmark = [pytest.mark.system, pytest.mark.slow]

MARKER = "tell-nobody-7f3a"


@pytest.fixture(scope="module")
def seen(tiny_model: Path) -> Iterator[Harness]:
    """An instance on which this happened: 6 whole replies of 5 tokens, 4 streams of 10, and refusals of four kinds."""
    flags = ("--workers", "2", "--slots", "2", "--max-queue", "2", "--api-processes", "2", "--log-format", "json")
    with scripted(tiny_model, *flags) as harness:
        for number in range(6):
            ask(harness, {"content": script(count=5) + MARKER}, {"x-request-id": f"whole-{number}"})
        for number in range(4):
            with httpx.stream(
                "POST", harness.url + "/v1/chat/completions", json=body(script(count=10), stream=True)
            ) as reply:
                reply.read()
        assert ask(harness, {"content": script(fail_at=2, count=5)}) == 503
        assert ask(harness, {"content": script(count=500, end="length")}, max_tokens=3) == 200
        assert httpx.get(harness.url + f"/{MARKER}").status_code == 404
        assert httpx.get(harness.url + "/v1/chat/completions").status_code == 405
        assert ask(harness, {"content": "x"}, temperature=9) == 400
        assert ask(harness, {"content": "x"}, {"authorization": f"Bearer {MARKER}"}, model=MARKER) == 404
        leaver = Stream(harness, script(count=1000, rate=50)).flowing()
        flood = [Stream(harness, script(count=30, rate=20)) for _ in range(8)]
        for stream in flood:
            stream.over()
        del leaver
        harness.flood = Counter(stream.status for stream in flood)  # type: ignore[attr-defined]
        # Reports come once a second.
        time.sleep(2.5)
        yield harness


def body(content: str, **fields: object) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def ask(harness: Harness, message: dict, headers: dict | None = None, **fields: object) -> int:
    content = {"model": "m", "messages": [{"role": "user", **message}], **fields}
    return httpx.post(harness.url + "/v1/chat/completions", json=content, headers=headers, timeout=60).status_code


def metrics(harness: Harness) -> dict[tuple, float]:
    text = urllib.request.urlopen(harness.url + "/metrics", timeout=10).read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_are_exact(seen: Harness) -> None:
    got = metrics(seen)
    flood = seen.flood  # type: ignore[attr-defined]
    assert set(flood) == {200, 529}

    def ended(outcome: str) -> float:
        return got["millpond_requests_total", ("model", "m"), ("outcome", outcome)]

    assert ended("stop") == 6 + 4 + flood[200]
    assert ended("length") == 1 and ended("failed") == 1
    assert ended("refused") == flood[529]
    assert got["millpond_refusals_total", ("cause", "queue_full"), ("model", "m")] == flood[529]
    for status, count in ((404, 2), (405, 1), (400, 1)):
        assert got["millpond_refusals_total", ("cause", f"http_{status}"), ("model", "")] == count


def test_histograms_add_up_to_the_counts(seen: Harness) -> None:
    got = metrics(seen)
    flood = seen.flood  # type: ignore[attr-defined]
    replies = 6 + 4 + flood[200] + 2
    running = got["millpond_requests_running", ("model", "m")]
    assert running == 1
    assert got["millpond_request_seconds_count", ("model", "m")] == replies
    assert got["millpond_queue_wait_seconds_count", ("model", "m")] == replies + running
    assert got["millpond_time_to_first_token_seconds_count", ("model", "m")] == replies + running
    intervals = got["millpond_inter_token_seconds_count", ("model", "m")]
    # 5-1 six times, 10-1 four times, 30-1 each of the flood, 2-1 of the failed one, 3-1 of the capped one, and the leaver's.
    fixed = 6 * 4 + 4 * 9 + flood[200] * 29 + 1 + 2
    assert intervals > fixed
    for name in ("request", "queue_wait", "time_to_first_token", "inter_token"):
        buckets = [v for k, v in got.items() if k[0] == f"millpond_{name}_seconds_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == got[f"millpond_{name}_seconds_count", ("model", "m")]


def test_every_api_process_gives_the_same_answer(seen: Harness) -> None:
    def stable() -> list[tuple]:
        return sorted((k, v) for k, v in metrics(seen).items() if "requests_total" in k[0] or "refusals" in k[0])

    # New connections each time: they spread over both processes.
    assert len({tuple(stable()) for _ in range(12)}) == 1


def lines(harness: Harness) -> list[dict]:
    entries = []
    for path in harness.place.logs.glob("*.log"):
        entries += [json.loads(line) for line in path.read_text().splitlines()]
    return entries


def test_log_trace_and_headers_of_a_request_agree(seen: Harness) -> None:
    (line,) = (entry for entry in lines(seen) if entry.get("id") == "whole-3")
    assert line["status"] == 200 and line["outcome"] == "stop" and line["completion_tokens"] == 5
    done = seen.command("trace", "whole-3")
    assert done.returncode == 0, done.stderr
    head, _, *marks = done.stdout.splitlines()
    assert f"{line['lane']} on {line['worker']}  stop" in head
    words = [re.split(r"\s+", mark.strip(), maxsplit=3) for mark in marks]
    assert {who for _, _, who, _ in words} == {"api", "broker", "worker"}
    instants = [float(at) for at, _, _, _ in words]
    assert instants == sorted(instants)
    names = [what for _, _, _, what in words]
    for earlier, later in (("parsed", "reserved"), ("place held", "rendered"), ("dispatched", "first token"), ("first token", "last write")):
        assert names.index(earlier) < names.index(later), names


def test_a_secret_is_in_no_log(seen: Harness) -> None:
    assert MARKER not in seen.output
    for path in seen.place.logs.iterdir():
        assert MARKER not in path.read_text(), path


def test_each_process_has_its_log_and_they_read_as_one(seen: Harness) -> None:
    names = {path.name.split("-")[0].removesuffix(".log") for path in seen.place.logs.iterdir()}
    assert names == {"serve", "broker", "pool", "api", "m"}
    done = seen.command("logs")
    assert done.returncode == 0 and "worker joined" in done.stdout and '"whole-3"' in done.stdout


def test_top_and_status_show_it(seen: Harness) -> None:
    top = seen.command("top", "--once").stdout
    assert all(len(line) <= 80 for line in top.splitlines()) and "m-0" in top and "refused" in top
    assert "m-1" in seen.command("status").stdout
    assert json.loads(seen.command("status", "--json").stdout)["models"][0]["name"] == "m"
    assert wait_for(lambda: seen.snapshot()["workers"][0]["tokens"] > 0, 5, "tokens")
