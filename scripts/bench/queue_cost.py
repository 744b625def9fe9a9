"""queue: what an event costs the broker while ten, and while ten thousand, requests wait.

Twice: the ledger alone, called as the switchboard calls it, and a real broker process with real peers. A cycle is a
place, a prompt and a hang-up of one request at the end of the line; a turn is a DONE and the next in line dispatched.
The requests are a hundred keys', who take turns. A displacement is a RESERVE that takes a flood's place in a full queue.
"""

import itertools
import time

from broker.ledger import Ledger
from broker.settings import BrokerSettings
from common.envelope import Dispatch, Done, Reserve, Submit, WorkerFacts
from common.ids import PeerId, RequestId
from common.outcomes import Outcome
from scripts.bench.children import Broker, Child
from scripts.bench.goals import Figure, Report, table
from scripts.bench.meter import CpuMeter
from scripts.loadtest.plots import Line, Plot
from scripts.loadtest.table import Table

LENGTHS = (10, 100, 1_000, 10_000)
# Flat means that ten thousand cost no more than half as much again: caches hold less of a longer queue.
FLAT = 1.5
MODEL = "bench"
SETTINGS = {"max_queue": 100_000, "queue_timeout": 86_400.0, "request_timeout": 604_800.0}
CYCLE_EVENTS, TURN_EVENTS = 3, 1
KEYS = 100


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, pure_events, real_events = (1, 200, 100) if quick else (5, 2000, 2000)
    pure = {length: [_pure(length, pure_events) for _ in range(rounds)] for length in LENGTHS}
    displacing = {length: [_displacing(length, pure_events) for _ in range(rounds)] for length in LENGTHS}
    real = _real(LENGTHS, rounds, real_events)
    rows = []
    for length in LENGTHS:
        cells = [_middle([one[which] for one in found[length]]) for found in (pure, real) for which in (0, 1)]
        cells.insert(2, _middle(displacing[length]))
        rows.append((str(length), *(f"{cell:.1f}" for cell in cells)))
    header = (
        "waiting",
        "ledger: event of a cycle, µs",
        "ledger: turn, µs",
        "ledger: displacement, µs",
        "broker: event of a cycle, µs",
        "broker: turn, µs",
    )
    figures = [
        Figure(f"{name}, {LENGTHS[-1]} waiting / {LENGTHS[0]}", _ratios(found, which), "{:.2f}", most=FLAT)
        for name, found, which in (
            ("ledger: cycle", pure, 0),
            ("ledger: turn", pure, 1),
            ("broker: cycle", real, 0),
            ("broker: turn", real, 1),
        )
    ]
    growth = [many / few for many, few in zip(displacing[LENGTHS[-1]], displacing[LENGTHS[0]], strict=True)]
    name = f"ledger: displacement, {LENGTHS[-1]} waiting / {LENGTHS[0]}"
    figures.append(Figure(name, growth, "{:.2f}", most=FLAT))
    lines = [
        Line(name, [(length, _middle([one[which] for one in found[length]])) for length in LENGTHS])
        for name, found, which in (("ledger, cycle", pure, 0), ("ledger, turn", pure, 1), ("broker, cycle", real, 0))
    ]
    plot = Plot("CPU time by queue length", "requests waiting", "µs per event", lines, log_x=True)
    tables = [Table("CPU time by queue length", header, rows), table("Growth", figures)]
    return Report("queue", tables, figures, [plot])


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _ratios(found: dict[int, list[tuple[float, float]]], which: int) -> list[float]:
    pairs = zip(found[LENGTHS[-1]], found[LENGTHS[0]], strict=True)
    return [many[which] / few[which] for many, few in pairs]


# -- the ledger alone


def _pure(length: int, events: int) -> tuple[float, float]:
    """µs per event of a cycle, and per turn."""
    ledger = Ledger(BrokerSettings(**SETTINGS), 0.0)  # type: ignore[arg-type]
    api, worker = PeerId(b"a" * 16), PeerId(b"w" * 16)
    facts = WorkerFacts(MODEL, "f", 1, 2**50, 1, 8192, ["batched"], [])
    ledger.worker_joined(worker, "w", facts, 0.0)
    numbers = itertools.count()

    def arrive() -> tuple[RequestId, list]:
        number = next(numbers)
        id = RequestId(number.to_bytes(16, "big"))
        ledger.reserve(api, Reserve([id], "bench", MODEL, 0, f"key-{number % KEYS}"), 0.0)
        return id, ledger.submit(api, Submit(id, 64, 64, b"", "f"), b"", 0.0)

    _, effects = arrive()
    running = _dispatched(effects)
    for _ in range(length):
        arrive()
    began = time.process_time()
    for _ in range(events):
        id, _ = arrive()
        ledger.cancel(api, id, 0.0)
    cycles = time.process_time() - began
    turns = 0.0
    for _ in range(events):
        began = time.process_time()
        effects = ledger.done(worker, Done(running.request, running.attempt, Outcome.STOP), b"", 0.0)
        turns += time.process_time() - began
        running = _dispatched(effects)
        arrive()
    return cycles / events / CYCLE_EVENTS * 1e6, turns / events / TURN_EVENTS * 1e6


def _displacing(length: int, events: int) -> float:
    """µs per RESERVE that displaces, in a queue that a flood has filled beside many small holders."""
    ledger = Ledger(BrokerSettings(**{**SETTINGS, "max_queue": length, "max_inflight": 1}), 0.0)  # type: ignore[arg-type]
    api = PeerId(b"a" * 16)
    ledger.worker_joined(PeerId(b"w" * 16), "w", WorkerFacts(MODEL, "f", 1, 2**50, 1, 8192, ["batched"], []), 0.0)
    numbers = itertools.count()

    def ask(key: str) -> tuple[RequestId, list]:
        id = RequestId(next(numbers).to_bytes(16, "big"))
        return id, ledger.reserve(api, Reserve([id], "bench", MODEL, 0, key), 0.0)

    small = min(KEYS, length // 2)
    for number in range(length + 1):
        ask(f"key-{number}" if number < small else "flood")
    spent = 0.0
    for _ in range(events):
        began = time.process_time()
        id, effects = ask("single")
        spent += time.process_time() - began
        if len(effects) != 2:
            raise RuntimeError(f"nobody was displaced: {effects}")
        ledger.release(api, [id], 0.0)
        ask("flood")
    return spent / events * 1e6


def _dispatched(effects: list) -> Dispatch:
    (message,) = [effect.message for effect in effects if isinstance(getattr(effect, "message", None), Dispatch)]
    return message


# -- a real broker


def _real(lengths: tuple[int, ...], rounds: int, events: int) -> dict[int, list[tuple[float, float]]]:
    """The same of a broker process, from short to long queues in each round."""
    found: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    for _ in range(rounds):
        with Broker(**SETTINGS, reservation_timeout=3600) as broker:
            (broker.place.folder / "received").write_bytes(bytes(8))
            arguments = (str(broker.place.folder.parent), "1")
            module = "scripts.bench.queue_peers"
            with Child(module, "worker", *arguments) as worker, Child(module, "api", *arguments) as api:
                for child in (worker, api):
                    child.ask(do="joined")
                waiting = -1  # the first one runs
                for length in lengths:
                    # What a turn takes from the line, the next length puts in again.
                    api.ask(do="fill", count=length - waiting)
                    if waiting < 0:
                        worker.ask(do="take")
                    meter = CpuMeter(broker.process)
                    api.ask(do="cycle", count=events)
                    cycles = meter.read().cpu_s
                    turns_us = _turns(broker, worker, api, length, events)
                    found[length].append((cycles / events / CYCLE_EVENTS * 1e6, turns_us))
                    waiting = length
    return found


def _turns(broker: Broker, worker: Child, api: Child, length: int, events: int) -> float:
    """µs per turn. The line is filled again between stretches, so that it stays about as long."""
    stretch = max(1, min(events, length // 2))
    cpu = 0.0
    done = 0
    while done < events:
        meter = CpuMeter(broker.process)
        worker.ask(do="turn", count=stretch)
        cpu += meter.read().cpu_s
        api.ask(do="fill", count=stretch)
        done += stretch
    return cpu / done * 1e6
