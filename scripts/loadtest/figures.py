"""Percentiles and summaries of what a load did (pure)."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The `share`-th percentile (0 to 100) of sorted values, between neighbours by straight line; nan of nothing."""
    if not values:
        return math.nan
    place = (len(values) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
