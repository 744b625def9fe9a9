"""Histograms that add up across processes (pure): fixed bounds, counts, and the sum of what was observed.

A histogram travels as a list of whole numbers: one count per bucket, the last for what is above all bounds, then the sum in
microseconds. Adding two lists of one kind number by number is the histogram of both.
"""

from bisect import bisect_left
from collections.abc import Sequence

# Seconds. Requests: from a cached reply to the request timeout. Waits: from a free slot to the queue timeout. First token:
# from a short prompt on a GPU to a long one on a CPU. Between tokens: from a small model on a GPU to a stall.
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 45.0)
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)

BOUNDS: dict[str, tuple[float, ...]] = {
    "request": REQUEST_S,
    "queue_wait": QUEUE_S,
    "time_to_first_token": FIRST_TOKEN_S,
    "inter_token": INTER_TOKEN_S,
}


class Histogram:
    """Counts of one named kind (a key of BOUNDS)."""

    __slots__ = ("bounds", "counts", "sum_us")

    def __init__(self, kind: str) -> None:
        self.bounds = BOUNDS[kind]
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum_us = 0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum_us += int(seconds * 1e6) * times

    def add(self, packed: Sequence[int]) -> bool:
        """Add a packed one. False: it is not of this kind, and nothing was added."""
        if len(packed) != len(self.counts) + 1:
            return False
        for index, count in enumerate(packed[:-1]):
            self.counts[index] += count
        self.sum_us += packed[-1]
        return True

    def packed(self) -> list[int]:
        """Counts and sum, as it travels."""
        return [*self.counts, self.sum_us]

    def take(self) -> list[int]:
        """Packed, and emptied: what was observed since the last call."""
        packed = self.packed()
        self.counts = [0] * len(self.counts)
        self.sum_us = 0
        return packed
