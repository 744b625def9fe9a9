"""`millpond status`: what a running instance does, asked of its broker."""

import argparse
import json
import os
from typing import Any

from common import runtime, settings
from common.client import BrokerClient
from common.errors import MillpondError
from worker.settings import WorkerSettings


def register(commands: Any) -> None:
    """Add the subcommand."""
    status = commands.add_parser("status", help="what a running instance does")
    status.add_argument("--json", action="store_true", help="the broker's snapshot as JSON")
    status.add_argument("--port", default=None, help="port of the instance (default: MILLPOND_PORT or 8080)")
    status.set_defaults(run=show)


def place_of(arguments: argparse.Namespace) -> runtime.Runtime:
    """The runtime of the instance on the chosen port. Raises ConfigError; MillpondError when none runs there."""
    environment = dict(os.environ)
    if arguments.port is not None:
        environment["MILLPOND_PORT"] = arguments.port
    chosen = settings.load(WorkerSettings, environment)
    place = runtime.runtime(chosen.port, chosen.runtime)
    if not place.broker_lock.exists():
        raise MillpondError(f"no millpond runs on port {chosen.port}")
    return place


def connect(arguments: argparse.Namespace) -> BrokerClient:
    """A client of the instance on the chosen port. Raises ConfigError, MillpondError."""
    return BrokerClient(place_of(arguments).front, arguments.command)


def show(arguments: argparse.Namespace) -> int:
    """Print the snapshot."""
    with connect(arguments) as client:
        snapshot = client.snapshot()
    print(json.dumps(snapshot, indent=2) if arguments.json else table(snapshot))
    return 0


def table(snapshot: dict[str, Any]) -> str:
    """The snapshot for people, within 80 columns."""
    queue, limits = snapshot["queue"], snapshot["limits"]
    lines = [
        f"millpond {snapshot['version']}  epoch {snapshot['epoch']}" + ("  draining" if snapshot["draining"] else ""),
        f"running {queue['running']}/{limits['max_inflight']}  waiting {queue['waiting']}/{limits['max_queue']}  "
        f"reserved {queue['reserved']}  oldest {queue['oldest_ms'] / 1000:.1f} s",
        "",
        f"{'worker':<28} {'pid':>7} {'state':<9} {'running':>8} {'restarts':>8} {'memory':>9}",
    ]
    for worker in snapshot["workers"]:
        memory = worker["memory"].get("active", 0) / 2**20
        lines.append(
            f"{worker['name'][:28]:<28} {worker['pid']:>7} {worker['state']:<9} "
            f"{worker['running']:>3}/{worker['slots']:<4} {worker['restarts']:>8} {memory:>5.0f} MiB"
        )
        lines += [f"    {line[:76]}" for line in worker.get("log", [])[-5:]]
    for title in ("finished", "refused"):
        counts = "  ".join(f"{name} {count}" for name, count in sorted(snapshot[title].items()))
        lines.append(f"{title}: {counts or 'none'}")
    return "\n".join(lines)
