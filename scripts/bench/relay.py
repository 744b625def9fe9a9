"""relay: what one token frame costs the broker between real processes, and how much it delays it.

A real broker, a peer that feeds as a worker does and one that receives as an API process does, real envelopes and
payloads. Three loads alternate: as fast as it goes, half of that, and a thousand frames a second (about six busy demo
workers), where every step of sixteen frames wakes the broker anew. The receiver fails the run at any gap in a seq.
"""

from dataclasses import dataclass

from scripts.bench.children import Broker, Child
from scripts.bench.goals import Figure, Report, table
from scripts.bench.meter import CpuMeter
from scripts.loadtest.figures import percentile
from scripts.loadtest.table import Table

ROWS = 16
CALM_PER_S = 1_000.0
GOAL_US, FULL_SPEED_GOAL_US = 20.0, 14.0


@dataclass(frozen=True)
class Load:
    """One load's results."""

    frames_per_s: float
    cpu_us: float
    share: float
    latencies_us: list[float]


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    seconds, rounds = (0.4, 1) if quick else (4.0, 5)
    with Broker() as broker:
        (broker.place.folder / "received").write_bytes(bytes(8))
        arguments = (str(broker.place.folder.parent), str(ROWS))
        module = "scripts.bench.relay_peers"
        with Child(module, "worker", *arguments) as worker, Child(module, "api", *arguments) as api:
            bench = Relay(broker, worker, api)
            flood: list[Load] = []
            half: list[Load] = []
            calm: list[Load] = []
            frames = bench.fitting(seconds)
            for _ in range(rounds):
                flood.append(bench.load(frames, 0.0))
                half.append(bench.load(int(frames / 2), flood[-1].frames_per_s / 2))
                calm.append(bench.load(int(CALM_PER_S * seconds), CALM_PER_S))
            rss = broker.process.memory_info().rss / 1e6
            malformed = broker.snapshot()["malformed"]
    if malformed:
        raise RuntimeError(f"the broker counted {malformed} malformed messages")
    return _report(flood, half, calm, rss)


class Relay:
    """The three processes."""

    def __init__(self, broker: Broker, worker: Child, api: Child) -> None:
        self._broker, self._worker, self._api = broker, worker, api
        for child in (worker, api):
            child.ask(do="joined")

    def fitting(self, seconds: float) -> int:
        """About how many frames at full speed take so long."""
        probe = self.load(ROWS * 500, 0.0)
        return int(probe.frames_per_s * seconds / ROWS) * ROWS

    def load(self, frames: int, per_s: float) -> Load:
        """Relay so many frames."""
        frames -= frames % ROWS
        self._api.ask(do="submit")
        self._worker.ask(do="take")
        self._api.ask(do="started")
        meter = CpuMeter(self._broker.process)
        self._api.tell(do="receive", frames=frames, stamped=bool(per_s))
        self._worker.tell(do="feed", frames=frames, per_s=per_s)
        received = self._api.answer()
        span = meter.read()
        self._worker.answer()
        self._worker.ask(do="finish")
        self._api.ask(do="over")
        return Load(frames / span.wall_s, span.cpu_s / frames * 1e6, span.share, received["latencies_us"])


def _report(flood: list[Load], half: list[Load], calm: list[Load], rss: float) -> Report:
    figures = [
        Figure("broker CPU per frame at full speed, µs", [load.cpu_us for load in flood], "{:.1f}", most=FULL_SPEED_GOAL_US),
        Figure("broker CPU per frame at half load, µs", [load.cpu_us for load in half], "{:.1f}", most=GOAL_US),
        Figure(f"broker CPU per frame at {CALM_PER_S:.0f} frames/s, µs", [load.cpu_us for load in calm], "{:.1f}"),
        Figure("frames/s at full speed", [load.frames_per_s for load in flood], "{:.0f}"),
        Figure("broker memory afterwards, MB", [rss], "{:.0f}", most=60.0),
    ]
    rows = []
    for name, loads in (("half load", half), (f"{CALM_PER_S:.0f} frames/s", calm)):
        rate = sorted(load.frames_per_s for load in loads)[len(loads) // 2]
        shares = sorted(load.share for load in loads)[len(loads) // 2]
        cells = []
        for share in (50.0, 99.0):
            values = sorted(percentile(load.latencies_us, share) for load in loads)
            cells.append(f"{values[len(values) // 2]:.0f}")
        rows.append((name, f"{rate:.0f}", f"{shares:.0%}", *cells))
    latency = Table(
        "From the feeding peer's send to the receiving peer's take",
        ("load", "frames/s", "broker's share of a core", "p50 µs", "p99 µs"),
        rows,
        ("Sixteen frames leave at once, so the last waits for fifteen before it; seq had no gap in any run.",),
    )
    return Report("relay", [table("Relay of token frames", figures), latency], figures)
