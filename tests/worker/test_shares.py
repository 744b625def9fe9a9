"""Which workers run where, and what each may use."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from common.errors import ConfigError
from tests.worker.test_plan import FACTS, GIB, MIB
from worker.plan import FLOAT32, KEEP
from worker.shares import Device, Kind, Placed, Wish, place

CUDA, CPU, METAL = Kind(one_each=True), Kind(on_cpu=True), Kind()
LARGE = replace(FACTS, stored_bytes=30 * GIB, float32_bytes=120 * GIB)


def devices(*budgets_gib: float) -> list[Device]:
    return [Device(index, f"gpu{index}", int(size * GIB)) for index, size in enumerate(budgets_gib)]


def used(placed: Sequence[Placed], device: int) -> int:
    return sum(one.plan.share_bytes * one.devices.count(device) for one in placed)


def test_one_model_on_one_device_gets_all_of_it() -> None:
    (one,) = place(devices(64), [Wish("a", FACTS)], METAL)
    assert one.devices == (0,) and one.plan.share_bytes == 64 * GIB and one.plan.workers == 1
    assert one.fits == (64 * GIB // (600 * MIB + 512 * MIB + int(1.5 * 1281 * 23_040)),)


def test_auto_is_one_worker_on_each_gpu_and_one_alone_elsewhere() -> None:
    (one,) = place(devices(24, 24, 24), [Wish("a", FACTS)], CUDA)
    assert one.devices == (0, 1, 2) and one.plan.workers == 3 and one.plan.share_bytes == 24 * GIB
    for kind in (CPU, METAL):
        (one,) = place(devices(24), [Wish("a", FACTS)], kind)
        assert one.devices == (0,)


def test_workers_are_spread_and_all_alike() -> None:
    (one,) = place(devices(24, 12), [Wish("a", FACTS, workers=3)], CUDA)
    assert sorted(one.devices) == [0, 0, 1]
    # The two that share a device have no more than the one on the smaller device.
    assert one.plan.share_bytes == 12 * GIB


def test_a_model_that_fits_one_device_only_runs_there() -> None:
    placed = place(devices(40, 24), [Wish("small", FACTS), Wish("large", LARGE)], CUDA)
    assert placed[1].devices == (0,) and set(placed[0].devices) == {0, 1}
    assert placed[1].fits == (1, 0)
    for index, budget in ((0, 40), (1, 24)):
        assert used(placed, index) <= budget * GIB


def test_given_shares_are_kept_and_the_rest_goes_by_need() -> None:
    a, b, c = place(
        devices(40), [Wish("a", FACTS, share=0.5), Wish("b", FACTS, workers=2), Wish("c", FACTS, context=100)], METAL
    )
    assert a.plan.share_bytes == 20 * GIB
    assert b.plan.share_bytes > 3 * c.plan.share_bytes
    assert used([a, b, c], 0) == pytest.approx(40 * GIB, abs=10)
    assert c.context == 100 and c.plan.limit == "slots"


def test_shares_that_are_too_small_or_too_much_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MILLPOND_SHARE: .* add up to 1.2"):
        place(devices(40), [Wish("a", FACTS, share=0.6), Wish("b", FACTS, share=0.6)], METAL)
    with pytest.raises(ConfigError, match=r"worker 1 of 1 of model 'a' needs 1.13 GiB, .* 0.73 GiB too little"):
        place(devices(4), [Wish("a", FACTS, share=0.1)], METAL)
    # What is left beside the share of another.
    with pytest.raises(ConfigError, match=r"'b' .*beside the other models: 0.73 GiB too little"):
        place(devices(4), [Wish("a", FACTS, share=0.9), Wish("b", FACTS)], METAL)


def test_what_does_not_fit_is_an_error_with_figures() -> None:
    with pytest.raises(ConfigError, match=r"worker 3 of 3 of model 'a' .* 3.00 GiB: 0.38 GiB too little"):
        place(devices(3), [Wish("a", FACTS, workers=3)], METAL)
    with pytest.raises(ConfigError, match="on each of 2 devices"):
        place(devices(3, 3), [Wish("a", LARGE)], CUDA)


def test_float32_is_taken_on_a_cpu_where_it_fits_beside_the_others() -> None:
    pair = [Wish("a", FACTS), Wish("b", FACTS)]
    assert [one.plan.precision for one in place(devices(40), pair, CPU)] == [FLOAT32] * 2
    assert [one.plan.precision for one in place(devices(5), pair, CPU)] == [KEEP] * 2
    with pytest.raises(ConfigError):
        place(devices(5), pair, Kind(on_cpu=True, cpu_weights=FLOAT32))


def test_no_device_is_ever_given_away_twice() -> None:
    random = Random(5)
    done = 0
    for _ in range(300):
        budgets = [random.uniform(1, 80) for _ in range(random.randint(1, 4))]
        wishes = [
            Wish(
                name,
                replace(FACTS, stored_bytes=random.randint(1, 20 * GIB)),
                random.choice([None, 1, 2, 3]),
                random.choice([None, None, 0.2, 0.4]),
                random.randint(1, 32),
            )
            for name in "abc"[: random.randint(1, 3)]
        ]
        try:
            placed = place(devices(*budgets), wishes, random.choice([CUDA, METAL]))
        except ConfigError:
            continue
        done += 1
        for index, budget in enumerate(budgets):
            assert used(placed, index) <= budget * GIB
        for one, wish in zip(placed, wishes, strict=True):
            assert len(one.devices) == one.plan.workers >= (wish.workers or 1)
            assert one.plan.kv_tokens >= 1024
    assert done > 100
