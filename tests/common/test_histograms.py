"""Histograms add up, whoever counted."""

import random

import pytest

from common.histograms import BOUNDS, Histogram


def test_a_duration_counts_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram("inter_token")
    histogram.observe(0.002)
    histogram.observe(0.0021, times=3)
    histogram.observe(99.0)
    assert histogram.counts[0] == 1 and histogram.counts[1] == 3 and histogram.counts[-1] == 1
    assert histogram.sum_us == 2000 + 3 * 2100 + 99_000_000


@pytest.mark.parametrize("kind", BOUNDS)
def test_parts_add_up_to_the_whole(kind: str) -> None:
    draw = random.Random(1)
    whole, total, part = Histogram(kind), Histogram(kind), Histogram(kind)
    for _ in range(1000):
        seconds = draw.expovariate(1.0)
        whole.observe(seconds)
        part.observe(seconds)
        if draw.random() < 0.1:
            assert total.add(part.take())
    assert total.add(part.take()) and part.packed() == [0] * (len(BOUNDS[kind]) + 2)
    assert total.packed() == whole.packed()


def test_another_kind_is_refused_whole() -> None:
    histogram = Histogram("request")
    assert not histogram.add([1, 2, 3]) and not any(histogram.packed())


@pytest.mark.parametrize("kind", BOUNDS)
def test_bounds_rise(kind: str) -> None:
    assert list(BOUNDS[kind]) == sorted(set(BOUNDS[kind]))
