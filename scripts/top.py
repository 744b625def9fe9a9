"""`millpond top`: a running instance, live, in 80 columns. q or Ctrl-C leaves.

Rates are differences between two snapshots; bars are shares of each worker's memory.
"""

import argparse
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common.client import NoBroker
from common.histograms import BOUNDS
from scripts.status import connect

WIDTH = 80
BAR = 12


def register(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser("top", help="a running instance, live")
    command.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: %(default)s)")
    command.add_argument("--once", action="store_true", help="print one look and leave")
    command.add_argument("--port", default=None, help="port of the instance (default: MILLPOND_PORT or 8080)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look until told to leave."""
    interval = min(60.0, max(0.1, arguments.interval))
    with connect(arguments) as client, _keys() as pressed:
        before, before_at = client.snapshot(), time.monotonic()
        while True:
            if pressed(interval):
                return 0
            try:
                now, now_at = client.snapshot(), time.monotonic()
            except NoBroker:
                print("\x1b[2J\x1b[Hthe broker does not answer", flush=True)
                continue
            lines = screen(before, now, now_at - before_at)
            if arguments.once:
                print("\n".join(lines))
                return 0
            print("\x1b[2J\x1b[H" + "\n".join(lines), flush=True)
            before, before_at = now, now_at


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds and says whether q was pressed."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    old = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda seconds: bool(select.select([sys.stdin], [], [], seconds)[0]) and sys.stdin.read(1) == "q"
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, old)


def screen(before: dict[str, Any], now: dict[str, Any], seconds: float) -> list[str]:
    """The lines of one look, none wider than 80 columns."""
    queue, limits = now["queue"], now["limits"]
    lines = [
        f"millpond {now['version']}  running {queue['running']}/{limits['max_inflight']}  "
        f"waiting {queue['waiting']}/{limits['max_queue']}  oldest {queue['oldest_ms'] / 1000:.1f} s"
        + ("  draining" if now["draining"] else ""),
        "",
        f"{'worker':<22} {'state':<8} {'running':>7} {'tok/s':>6} {'memory':<{BAR + 11}} {'restarts':>8}",
    ]
    # After a broker's restart the counters begin anew, so only workers seen by both looks have a rate.
    old = {worker["name"]: worker for worker in before["workers"]} if before["epoch"] == now["epoch"] else {}
    for worker in now["workers"]:
        rate = _rate(old.get(worker["name"]), worker, seconds)
        memory = worker["memory"].get("active", 0)
        lines.append(
            f"{worker['name'][:22]:<22} {worker['state']:<8} {worker['running']:>3}/{worker['slots']:<3} {rate:>6} "
            f"{_bar(memory, worker['memory'].get('budget', 0))} {worker['restarts']:>8}"
        )
    lines.append("")
    for model in now["models"]:
        served = model["tokens"]["completion"]
        earlier = next((m["tokens"]["completion"] for m in before["models"] if m["name"] == model["name"]), 0)
        first = _quantile(model["histograms"]["time_to_first_token"], "time_to_first_token", 0.5)
        late = _quantile(model["histograms"]["time_to_first_token"], "time_to_first_token", 0.99)
        lines.append(
            f"{model['name'][:26]:<26} {max(0, served - earlier) / max(seconds, 1e-3):>6.0f} tok/s done  "
            f"first token p50 {first} p99 {late}"
        )
    for title, counts in (("finished", now["finished"]), ("refused", now["refused"] | now["api_refused"])):
        text = "  ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        lines.append(f"{title}: {text or 'none'}")
    return [line[:WIDTH] for line in lines]


def _rate(before: dict[str, Any] | None, now: dict[str, Any], seconds: float) -> str:
    if before is None or before["pid"] != now["pid"] or seconds <= 0:
        return "-"
    difference = now.get("tokens", 0) - before.get("tokens", 0)
    return f"{max(0, difference) / seconds:.0f}"


def _bar(used: int, budget: int) -> str:
    """Used memory and its share of the worker's budget."""
    text = f"{used / 2**30:6.2f} GiB"
    if not budget:
        return f"{text:<{BAR + 11}}"
    filled = min(BAR, round(BAR * used / budget))
    return f"{text}{'#' * filled}{'.' * (BAR - filled)} "


def _quantile(packed: list[int], kind: str, share: float) -> str:
    """The upper bound of the bucket in which the quantile lies."""
    counts = packed[:-1]
    total = sum(counts)
    if not total:
        return "-"
    seen = 0
    for bound, count in zip([*BOUNDS[kind], float("inf")], counts, strict=True):
        seen += count
        if seen >= share * total:
            return f"<={bound:g}s" if bound != float("inf") else f">{BOUNDS[kind][-1]:g}s"
    raise AssertionError("the counts do not add up")
