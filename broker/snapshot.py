"""The broker's state as one plain map: what /v1/pool, /health/ready, /metrics and `millpond status` are made of (pure).

Shape as the HTTP contract's /v1/pool, plus "models", "draining", "apis", "malformed". Ages are milliseconds.
"""

from typing import Any

from broker.ledger import Ledger
from broker.roster import PeerRecord, Roster
from common import __version__
from common.envelope import Child


def snapshot(ledger: Ledger, roster: Roster, max_queue: int, now: float) -> dict[str, Any]:
    """Values of today's types only (msgpack and JSON take it as it is)."""
    # Sizes and leases, never a look at every request: the broker stands still meanwhile.
    waiting = sum(len(model.line) for model in ledger.models.values())
    running = sum(lease.stopping_at is None for worker in ledger.workers.values() for lease in worker.leases.values())
    oldest = [ledger.requests[id].submitted_at for model in ledger.models.values() for id in model.line.heads()]
    refused: dict[str, int] = {}
    finished: dict[str, int] = {}
    for model in ledger.models.values():
        for outcome, count in model.refused.items():
            refused[outcome.value] = refused.get(outcome.value, 0) + count
        for outcome, count in model.finished.items():
            finished[outcome.value] = finished.get(outcome.value, 0) + count
    return {
        "workers": _workers(ledger, roster, now),
        "models": [_model(ledger, name) for name in sorted(ledger.models)],
        "queue": {
            "waiting": waiting,
            "reserved": len(ledger.requests) - waiting - running,
            "running": running,
            "oldest_ms": int((now - min(oldest, default=now)) * 1000),
        },
        "limits": {
            "max_inflight": sum(ledger.max_inflight(model) for model in ledger.models.values()),
            "max_queue": max_queue,
        },
        "refused": refused,
        "finished": finished,
        "tokens": {
            kind: sum(model.tokens[kind] for model in ledger.models.values()) for kind in ("prompt", "cached", "completion")
        },
        "draining": ledger.draining,
        "apis": [{"name": record.name, "pid": record.pid} for record in roster.of_role("api")],
        "pools": len(roster.of_role("pool")),
        "version": __version__,
    }


def _workers(ledger: Ledger, roster: Roster, now: float) -> list[dict[str, Any]]:
    stuck = {record.id for record in roster.stuck()}
    rows = [_connected(ledger, record, roster, record.id in stuck, now) for record in roster.of_role("worker")]
    names = {row["name"] for row in rows}
    rows += [_child(child) for child in roster.children.values() if child.name not in names]
    return sorted(rows, key=lambda row: row["name"])


def _connected(ledger: Ledger, record: PeerRecord, roster: Roster, stuck: bool, now: float) -> dict[str, Any]:
    worker = ledger.workers[record.id]
    report = record.report
    child = roster.children.get(record.name)
    state = "draining" if worker.leaving else "stuck" if stuck else "ready"
    return {
        "name": record.name,
        "pid": record.pid,
        "host": record.host,
        "model": worker.facts.model,
        "state": state,
        "lanes": list(worker.facts.lanes),
        "abilities": list(worker.facts.abilities),
        "slots": worker.facts.slots,
        "running": len(worker.leases),
        "kv_tokens": worker.facts.kv_tokens,
        "kv_tokens_used": len(worker.leases) * worker.longest,
        "memory": dict(report.memory) if report else {},
        "tokens": report.counters.get("completion_tokens", 0) if report else 0,
        "drafts": {
            kind: report.counters.get(f"{kind}_draft_tokens", 0) if report else 0 for kind in ("accepted", "rejected")
        },
        "step_age_ms": report.step_age_ms if report else 0,
        "heard_ms": int((now - record.heard_at) * 1000),
        "restarts": child.restarts if child else 0,
        "blas": worker.facts.blas,
        "weight_bytes": worker.facts.weight_bytes,
        "kv_bytes_per_token": worker.facts.kv_bytes_per_token,
    }


def _child(child: Child) -> dict[str, Any]:
    # Waiting for its restart is on the way to ready; failed is given up.
    state = {"ready": "loading", "backoff": "loading", "stopping": "draining"}.get(child.state, child.state)
    return {
        "name": child.name,
        "pid": child.pid,
        "host": "",
        "model": child.model,
        "state": state,
        "lanes": [],
        "abilities": [],
        "slots": 0,
        "running": 0,
        "kv_tokens": 0,
        "kv_tokens_used": 0,
        "memory": {},
        "step_age_ms": 0,
        "restarts": child.restarts,
        "exit": child.exit,
        "log": list(child.log),
    }


def _model(ledger: Ledger, name: str) -> dict[str, Any]:
    model = ledger.models[name]
    workers = [worker for worker in ledger.workers_of(name) if not worker.leaving]
    facts = workers[0].facts if workers else None
    if workers:
        state = "ready"
    elif model.plan is None or (model.plan.workers == 0 and model.plan.state != "failed"):
        state = "none"
    else:
        state = "failed" if model.plan.state == "failed" else "starting"
    return {
        "name": name,
        "state": state,
        "workers": len(workers),
        "planned_workers": model.plan.workers if model.plan else len(workers),
        "slots": sum(worker.facts.slots for worker in workers),
        "running": ledger.inflight(name),
        "waiting": len(model.line),
        "places": len(model.requests),
        "max_inflight": ledger.max_inflight(model),
        "context": facts.context if facts else (model.plan.context if model.plan else 0),
        "lanes": list(facts.lanes) if facts else [],
        "abilities": list(facts.abilities) if facts else [],
        "fingerprint": facts.fingerprint if facts else "",
        # Where the API finds what it needs to render for each; not for clients.
        "folders": {worker.facts.fingerprint: worker.facts.folder for worker in workers},
        "finished": {outcome.value: count for outcome, count in model.finished.items()},
        "refused": {outcome.value: count for outcome, count in model.refused.items()},
        "tokens": dict(model.tokens),
        "prefix_routing": dict(model.routed),
        "histograms": {kind: histogram.packed() for kind, histogram in model.histograms.items()},
    }
