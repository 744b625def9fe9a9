"""From the broker's snapshot to Prometheus's text (pure but for the library that writes it).

Every API process gives the same answer, since all of it comes from the broker. Label values are names that the operator
chose or words of ours, never what a client sent, so their number is bounded. Counters begin anew when the broker does.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from common.histograms import BOUNDS
from common.outcomes import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HISTOGRAMS = {
    "queue_wait": ("millpond_queue_wait_seconds", "From SUBMIT to the first DISPATCH."),
    "time_to_first_token": ("millpond_time_to_first_token_seconds", "From SUBMIT to the first relayed pieces."),
    "inter_token": ("millpond_inter_token_seconds", "Between two tokens of one request, counted in the worker."),
    "request": ("millpond_request_seconds", "From RESERVE to the request's end."),
}


def text(snapshot: dict[str, Any]) -> bytes:
    """The exposition of a snapshot."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(snapshot))
    return generate_latest(registry)


def label_of(outcome: str) -> str:
    """An outcome as millpond_requests_total counts it: stop, length, tool_calls, cancelled, refused, failed or
    timeout."""
    kind = Outcome(outcome).kind
    return outcome if kind == "finished" else kind


class _Snapshot(Collector):
    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from _requests(self._snapshot)
        yield from _histograms(self._snapshot)
        yield from _workers(self._snapshot)


def _requests(snapshot: dict[str, Any]) -> Iterator[Metric]:
    ended = CounterMetricFamily("millpond_requests", "Requests by how they ended.", labels=["model", "outcome"])
    refusals = CounterMetricFamily("millpond_refusals", "Requests refused, by cause.", labels=["model", "cause"])
    tokens = CounterMetricFamily("millpond_tokens", "Tokens of ended requests.", labels=["model", "kind"])
    running = GaugeMetricFamily("millpond_requests_running", "Requests that hold a slot.", labels=["model"])
    waiting = GaugeMetricFamily("millpond_requests_waiting", "Requests that wait for a slot.", labels=["model"])
    routed = CounterMetricFamily(
        "millpond_prefix_routing",
        "Dispatches by whether a worker had read the prompt's head, and got it; counted where there were several workers.",
        labels=["model", "result"],
    )
    for model in snapshot["models"]:
        name = model["name"]
        for result, count in model["prefix_routing"].items():
            routed.add_metric([name, result], count)
        counts = dict.fromkeys(("stop", "length", "tool_calls", "cancelled", "refused", "failed", "timeout"), 0)
        for outcome, count in model["finished"].items():
            counts[label_of(outcome)] += count
        counts["refused"] += sum(model["refused"].values())
        for outcome, count in counts.items():
            ended.add_metric([name, outcome], count)
        for cause, count in model["refused"].items():
            refusals.add_metric([name, cause], count)
        for kind, count in model["tokens"].items():
            tokens.add_metric([name, kind], count)
        running.add_metric([name], model["running"])
        waiting.add_metric([name], model["waiting"])
    for cause, count in sorted(snapshot["api_refused"].items()):
        # Refused before a model was looked at, or by a check of the API's own: the status is the cause.
        refusals.add_metric(["", cause.replace("refused_", "http_")], count)
    yield from (ended, refusals, tokens, running, waiting, routed)


def _histograms(snapshot: dict[str, Any]) -> Iterator[Metric]:
    for kind, (name, help_) in _HISTOGRAMS.items():
        family = HistogramMetricFamily(name, help_, labels=["model"])
        for model in snapshot["models"]:
            *counts, sum_us = model["histograms"][kind]
            buckets, total = [], 0
            for bound, count in zip([*map(str, BOUNDS[kind]), "+Inf"], counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric([model["name"]], buckets, sum_us / 1e6)
        yield family


def _workers(snapshot: dict[str, Any]) -> Iterator[Metric]:
    up = GaugeMetricFamily("millpond_worker_up", "1 while the worker can take requests.", labels=["worker", "model"])
    restarts = CounterMetricFamily(
        "millpond_worker_restarts", "Starts after the first one.", labels=["worker", "model"]
    )
    memory = GaugeMetricFamily("millpond_worker_memory_bytes", "The worker's device memory.", labels=["worker", "kind"])
    age = GaugeMetricFamily(
        "millpond_worker_step_age_seconds",
        "Since the engine's last finished step while it has work.",
        labels=["worker"],
    )
    drafts = CounterMetricFamily(
        "millpond_draft_tokens", "Drafted tokens by what became of them.", labels=["worker", "model", "kind"]
    )
    for worker in snapshot["workers"]:
        for kind, count in worker.get("drafts", {}).items():
            drafts.add_metric([worker["name"], worker["model"], kind], count)
        up.add_metric([worker["name"], worker["model"]], worker["state"] == "ready")
        restarts.add_metric([worker["name"], worker["model"]], worker["restarts"])
        for kind, size in worker["memory"].items():
            memory.add_metric([worker["name"], kind], size)
        age.add_metric([worker["name"]], worker["step_age_ms"] / 1000)
    yield from (up, restarts, memory, age, drafts)
