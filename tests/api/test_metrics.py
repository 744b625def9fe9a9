"""/metrics as Prometheus's own parser reads it."""

from prometheus_client.parser import text_string_to_metric_families

from api import metrics
from common.histograms import BOUNDS, Histogram
from common.outcomes import Outcome


def snapshot(models: int = 1, workers: int = 1) -> dict:
    histograms = {kind: Histogram(kind) for kind in BOUNDS}
    histograms["request"].observe(0.3)
    histograms["request"].observe(700.0)
    return {
        "models": [
            {
                "name": f"m{n}",
                "finished": {
                    "stop": 3,
                    "length": 1,
                    "worker_lost": 2,
                    "queue_timeout": 1,
                    "cancelled": 4,
                    "stale_model": 1,
                },
                "refused": {"queue_full": 5, "draining": 1},
                "tokens": {"prompt": 10, "cached": 2, "completion": 7},
                "running": 2,
                "waiting": 3,
                "prefix_routing": {"hit": 4, "diverted": 2, "new": 1},
                "histograms": {kind: histogram.packed() for kind, histogram in histograms.items()},
            }
            for n in range(models)
        ],
        "api_refused": {"refused_404": 6},
        "workers": [
            {
                "name": f'w"{n}',
                "model": "m0",
                "state": "ready" if n == 0 else "loading",
                "restarts": n,
                "memory": {"active": 5, "budget": 9},
                "step_age_ms": 1500,
                "drafts": {"accepted": 8, "rejected": n},
            }
            for n in range(workers)
        ],
    }


def read(snap: dict) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text(snap).decode())
        for sample in family.samples
    }


def test_every_count_is_where_it_belongs() -> None:
    got = read(snapshot(workers=2))

    def ended(outcome: str) -> float:
        return got["millpond_requests_total", ("model", "m0"), ("outcome", outcome)]

    assert [ended(o) for o in ("stop", "length", "tool_calls", "cancelled", "refused", "failed", "timeout")] == [
        3,
        1,
        0,
        4,
        7,
        2,
        1,
    ]
    assert got["millpond_refusals_total", ("cause", "queue_full"), ("model", "m0")] == 5
    assert got["millpond_refusals_total", ("cause", "http_404"), ("model", "")] == 6
    assert got["millpond_tokens_total", ("kind", "cached"), ("model", "m0")] == 2
    assert got["millpond_prefix_routing_total", ("model", "m0"), ("result", "diverted")] == 2
    assert (
        got["millpond_requests_running", ("model", "m0")] == 2
        and got["millpond_requests_waiting", ("model", "m0")] == 3
    )
    assert got["millpond_worker_up", ("model", "m0"), ("worker", 'w"0')] == 1
    assert got["millpond_worker_up", ("model", "m0"), ("worker", 'w"1')] == 0
    assert got["millpond_worker_memory_bytes", ("kind", "budget"), ("worker", 'w"0')] == 9
    assert got["millpond_worker_step_age_seconds", ("worker", 'w"0')] == 1.5
    assert got["millpond_worker_restarts_total", ("model", "m0"), ("worker", 'w"1')] == 1


def test_histograms_add_up() -> None:
    got = read(snapshot())
    buckets = {key[1][1]: value for key, value in got.items() if key[0] == "millpond_request_seconds_bucket"}
    assert buckets["0.25"] == 0 and buckets["0.5"] == 1 and buckets["600.0"] == 1 and buckets["+Inf"] == 2
    assert list(buckets.values()) == sorted(buckets.values())
    assert got["millpond_request_seconds_count", ("model", "m0")] == 2
    assert got["millpond_request_seconds_sum", ("model", "m0")] == 700.3


def test_every_outcome_has_a_label() -> None:
    labels = {metrics.label_of(outcome.value) for outcome in Outcome}
    assert labels == {"stop", "length", "tool_calls", "cancelled", "refused", "failed", "timeout"}


def test_the_dashboard_asks_only_for_metrics_that_there_are() -> None:
    import json
    import re
    from pathlib import Path

    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"millpond_\w+", target["expr"])
    }
    given = {key[0] for key in read(snapshot())}
    assert asked and asked <= given, asked - given


def test_64_workers_and_many_models_stay_within_bounds() -> None:
    text = metrics.text(snapshot(models=4, workers=64)).decode()
    assert len(text.splitlines()) < 2000


def test_drafted_tokens_are_counted_by_what_became_of_them() -> None:
    got = read(snapshot())
    for kind, count in (("accepted", 8), ("rejected", 0)):
        assert got["millpond_draft_tokens_total", ("kind", kind), ("model", "m0"), ("worker", 'w"0')] == count
