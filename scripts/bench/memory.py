"""memory: what one waiting request and one open stream hold in the API process and in the broker.

A fresh instance for each figure, since memory that was freed once hides what is taken next: resident memory after the
first few hundred, then after a thousand more; the difference over a thousand is the price of one.
"""

import asyncio

import psutil

from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import scripted
from scripts.bench.load import MODEL
from scripts.bench.load import run as run_loop
from scripts.harness import Harness, script
from scripts.loadtest.client import Client, Target
from scripts.loadtest.plan import Ask, Shape, asks, parse_mix

FIRST, MORE = 300, 1000
LONG = ("--queue-timeout", "3600", "--request-timeout", "3600")
# Opened so fast that none is refused for headers that come too late, slowly enough that the API's backlog stays short.
PER_BATCH, BATCH_S = 25, 0.02


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    first, more, rounds = (20, 50, 1) if quick else (FIRST, MORE, 3)
    waiting: list[tuple[float, float]] = []
    streams: list[tuple[float, float]] = []
    for _ in range(rounds):
        with scripted("--slots", "1", "--max-queue", str(2 * (first + more)), *LONG) as harness:
            waiting.append(_held(harness, first, more, waiting=True))
        with scripted("--slots", str(2 * (first + more)), *LONG) as harness:
            streams.append(_held(harness, first, more, waiting=False))
    figures = [
        Figure("API, one waiting request, kB", [api for api, _ in waiting], "{:.1f}", most=30.0),
        Figure("API, one open stream, kB", [api for api, _ in streams], "{:.1f}", most=100.0),
        Figure("broker, one waiting request, kB", [broker for _, broker in waiting], "{:.1f}"),
        Figure("broker, one running request, kB", [broker for _, broker in streams], "{:.1f}"),
    ]
    notes = ("Prompts of 64 words, which are part of it; every request has a connection of its own.",)
    return Report(
        "memory", [table(f"Resident memory, from {first} to {first + more} at once", figures, notes)], figures
    )


def _held(harness: Harness, first: int, more: int, *, waiting: bool) -> tuple[float, float]:
    """kB each in the API process and in the broker."""
    (api,), (broker,) = harness.processes("api"), harness.processes("broker")
    holding = Ask(0, script(count=10**6, rate=1), 10**6)
    # A piece every ten seconds: the stream is open, and the CPU is free.
    slow = asks(Shape(parse_mix("64"), parse_mix("1000"), ending=script(count=1000, rate=0.1)), 1)

    async def work() -> tuple[float, float]:
        client = Client(Target(harness.url, MODEL))
        tasks = []
        if waiting:
            tasks.append(asyncio.create_task(client.send(holding)))
            while not client.pieces:
                await asyncio.sleep(0.02)
        sizes = []
        for count in (first, more):
            for number in range(count):
                tasks.append(asyncio.create_task(client.send(next(slow))))
                if number % PER_BATCH == 0:
                    await asyncio.sleep(BATCH_S)
            await _settled(harness, len(tasks), waiting)
            sizes.append((_rss(api), _rss(broker)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return tuple((after - before) / more / 1000 for before, after in zip(*sizes, strict=True))  # type: ignore[return-value]

    return run_loop(work)


async def _settled(harness: Harness, places: int, waiting: bool) -> None:
    """Until all have their place and what they caused is over."""
    for _ in range(3000):
        queue = await asyncio.to_thread(lambda: harness.snapshot()["queue"])
        if queue["waiting"] + queue["running"] == places and (queue["waiting"] == places - 1 or not waiting):
            await asyncio.sleep(0.5)
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"{places} requests never got their places: {queue}")


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss)
