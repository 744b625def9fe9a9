"""CPU time, memory and medians.

Owns how a process is measured; must never know what it does. Invariant: a Span's CPU time is what the kernel charged to
the whole process, its I/O threads included, between two readings of the same process.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")


@dataclass(frozen=True)
class Span:
    """What a process used between start and end."""

    cpu_s: float
    wall_s: float

    @property
    def share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


class CpuMeter:
    """CPU time of one process, or of several together, since start()."""

    def __init__(self, *processes: psutil.Process) -> None:
        self._processes = processes
        self.start()

    def start(self) -> None:
        """Begin here."""
        self._cpu, self._at = self._used(), time.monotonic()

    def read(self) -> Span:
        """Since start()."""
        return Span(self._used() - self._cpu, time.monotonic() - self._at)

    def _used(self) -> float:
        return sum(cpu_s(process) for process in self._processes)


def cpu_s(process: psutil.Process) -> float:
    """CPU time of all threads of a process since its start."""
    if sys.platform == "linux":
        # The kernel's CPU clock of another process (clock_getcpuclockid): nanoseconds, where /proc shows hundredths.
        return time.clock_gettime((~process.pid << 3) | 2)
    times = process.cpu_times()
    return float(times.user + times.system)


def rss_mb(process: psutil.Process) -> float:
    """Resident memory in MB (10^6)."""
    return process.memory_info().rss / 1e6


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def spread(values: Sequence[float], form: str = "{:.3g}") -> str:
    """Least to most, for a table: how far a median can be trusted."""
    return f"{form.format(min(values))}-{form.format(max(values))}"


def alternating(rounds: int, *measurements: Callable[[], T]) -> list[list[T]]:
    """A B A B …: each measurement's results. What disturbs the machine for a while disturbs all of them."""
    results: list[list[T]] = [[] for _ in measurements]
    for _ in range(rounds):
        for kept, measure in zip(results, measurements, strict=True):
            kept.append(measure())
    return results
