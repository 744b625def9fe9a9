"""streams: what batching and a second worker are worth, in tokens per second through HTTP, with the demo model.

Sixteen streams at once against one alone on one worker; two one-thread workers against one, both given the same
thirty-two requests at once. Prompts are read within the measured time. A and B alternate in one run, since only their
ratio counts.

A one-thread worker computes on one core and prepares the next operations on another meanwhile, which two of them on two
cores cannot. So the two are compared once more with each worker confined to a core: what a worker is worth that has to
live on its share.
"""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import demo
from scripts.bench.load import drive, stories, tokens_per_s
from scripts.bench.meter import alternating, median
from scripts.harness import Harness
from scripts.loadtest.plots import Line, Plot

COUNTS = (1, 2, 4, 8, 16)
BOTH = 32


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, pairs, tokens = (1, 1, 8) if quick else (3, 5, 64)
    with demo() as one:
        load = Load(one, tokens)
        load(COUNTS[-1])
        found = alternating(rounds, *(partial(load, count) for count in COUNTS))
    with demo("--threads", "1") as one, demo("--threads", "1", "--workers", "2") as two:
        loads = Load(one, tokens // 2), Load(two, tokens // 2)
        for warming in loads:
            warming(BOTH)
        single, double = alternating(pairs, lambda: loads[0](BOTH), lambda: loads[1](BOTH))
        lone, both = [], []
        if sys.platform == "linux":
            for harness in (one, two):
                confine(harness)
            lone, both = alternating(pairs, lambda: loads[0](BOTH), lambda: loads[1](BOTH))
    rates = dict(zip(COUNTS, found, strict=True))
    alone, many = rates[COUNTS[0]], rates[COUNTS[-1]]
    batching = [b / a for a, b in zip(alone, many, strict=True)]
    workers = [b / a for a, b in zip(single, double, strict=True)]
    confined = [b / a for a, b in zip(lone, both, strict=True)]
    figures = [
        *(
            Figure(f"{count} streams, tokens/s" if count > 1 else "one stream, tokens/s", rates[count], "{:.1f}")
            for count in COUNTS
        ),
        Figure(f"{COUNTS[-1]} streams / one stream", batching, "{:.2f}", least=6.0),
        Figure(f"one one-thread worker, {BOTH} requests at once, tokens/s", single, "{:.1f}"),
        Figure("two one-thread workers, the same, tokens/s", double, "{:.1f}"),
        Figure("two workers / one", workers, "{:.2f}", least=1.85),
        *([Figure("two workers / one, each worker on one core", confined, "{:.2f}")] if confined else []),
    ]
    line = Line("one worker, all cores", [(count, median(rates[count])) for count in COUNTS])
    plot = Plot("Throughput of one worker", "streams at once", "tokens per second", [line], log_x=True)
    return Report("streams", [table(f"Tokens per second, greedy, {tokens} tokens a reply", figures)], figures, [plot])


def confine(harness: Harness) -> None:
    """Give each worker of an instance a core of its own, as far as there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    for number, process in enumerate(harness.processes("worker")):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            # One may have ended meanwhile.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {cores[number % len(cores)]})


class Load:
    """Requests for one instance, none of them twice."""

    def __init__(self, harness: Harness, tokens: int) -> None:
        self._harness = harness
        self._tokens = tokens
        self._asked = 0

    def __call__(self, streams: int) -> float:
        """Tokens per second of so many at once."""
        asks = stories(self._asked, streams, self._tokens)
        self._asked += streams
        stage = drive(self._harness.url, asks, streams, temperature=0)
        return tokens_per_s(stage)
