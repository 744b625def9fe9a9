"""The division of a memory budget."""

from dataclasses import replace

import pytest

from common.errors import ConfigError
from worker.cache_layout import CacheBytes, CacheLayout
from worker.model_files import ModelFacts
from worker.plan import (
    BUFFER_CACHE_SHARE,
    FLOAT32,
    KEEP,
    KV_PEAK,
    KV_STEP,
    OVERHEAD_BYTES,
    PROMPT_CACHE_SHARE,
    SHORTEST_USEFUL,
    Needs,
    fit,
    held_precision,
    needs,
    plan,
)

MIB, GIB = 2**20, 2**30

FACTS = ModelFacts(
    kind="llama",
    parameters=1_000_000_000,
    stored_bytes=600 * MIB,
    float32_bytes=4_000_000_000,
    quantization="4-bit",
    context=8192,
    layers=30,
    kv_heads=3,
    head_size=64,
    cache=CacheLayout(11_520),
    value_bytes=2,
    eos_ids=(2,),
    defaults={},
    estimated=False,
)


def test_a_large_budget_gives_all_slots_their_whole_context() -> None:
    made = plan(64 * GIB, FACTS, 1, 16)
    assert (made.slots, made.kv_tokens, made.precision) == (16, 16 * 8192, KEEP)
    assert (made.weight_bytes, made.kv_bytes_per_token) == (600 * MIB, 23_040)


@pytest.mark.parametrize("budget", [2 * GIB, 3 * GIB, 7 * GIB, 20 * GIB])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_is_planned_stays_inside_its_share(budget: int, workers: int, on_cpu: bool) -> None:
    try:
        made = plan(budget, FACTS, workers, 16, on_cpu=on_cpu)
    except ConfigError:
        assert budget // workers < 2 * GIB
        return
    # Each row's buffers may be a step of the cache longer than what was asked for.
    held = made.kv_tokens + made.slots * KV_STEP
    used = made.weight_bytes + OVERHEAD_BYTES + KV_PEAK * held * made.kv_bytes_per_token
    assert used <= made.share_bytes == budget // workers
    assert made.kv_tokens >= 1024 and 1 <= made.slots <= 16
    assert made.slots * KV_STEP <= made.kv_tokens


def test_two_workers_get_half_each() -> None:
    one, two = plan(8 * GIB, FACTS, 1, 64), plan(8 * GIB, FACTS, 2, 64)
    assert two.share_bytes == 4 * GIB
    assert 2 * two.kv_tokens < one.kv_tokens


def test_float32_is_held_on_a_cpu_where_it_fits() -> None:
    assert plan(16 * GIB, FACTS, 1, 16, on_cpu=True).precision == FLOAT32
    assert plan(16 * GIB, FACTS, 1, 16, on_cpu=True).kv_bytes_per_token == 46_080
    assert plan(2 * GIB, FACTS, 1, 16, on_cpu=True).precision == KEEP
    assert plan(16 * GIB, FACTS, 1, 16, on_cpu=True, cpu_weights=KEEP).precision == KEEP
    assert held_precision(FLOAT32, FACTS, GIB, on_cpu=True) == FLOAT32
    assert held_precision(FLOAT32, FACTS, 16 * GIB, on_cpu=False) == KEEP


def test_what_does_not_fit_is_an_error_that_says_by_how_much() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(2 * GIB, FACTS, 2, 16)
    text = str(caught.value)
    needed = 600 * MIB + OVERHEAD_BYTES + KV_PEAK * (1024 + KV_STEP + 1) * 23_040
    assert f"{(needed - GIB) / GIB:.2f} GiB too little" in text and "2 workers" in text and "1.00 GiB" in text
    with pytest.raises(ConfigError, match="1 worker is"):
        plan(2 * GIB, FACTS, 1, 16, on_cpu=True, cpu_weights=FLOAT32)


def test_a_wanted_context_bounds_the_cache_and_never_exceeds_the_models() -> None:
    assert plan(64 * GIB, FACTS, 1, 4, 1000).kv_tokens == 4000
    assert plan(64 * GIB, FACTS, 1, 4, 10**6).kv_tokens == 4 * 8192
    assert plan(64 * GIB, replace(FACTS, context=100), 1, 4).slots == 4


def test_a_model_whose_cache_is_unknown_gets_what_its_slots_ask_for() -> None:
    made = plan(64 * GIB, replace(FACTS, cache=CacheLayout(0, known=False), estimated=True), 1, 4)
    assert made.kv_tokens == 4 * 8192


def test_the_prompt_cache_is_part_of_the_share() -> None:
    small, large = (plan(4 * GIB, FACTS, 1, 16, prompt_cache_bytes=size) for size in (1, 2 * GIB))
    assert large.prompt_cache_bytes == 2 * GIB and large.kv_tokens < small.kv_tokens
    for made in (small, large, plan(4 * GIB, FACTS, 1, 16)):
        kv = KV_PEAK * (made.kv_tokens + made.slots * KV_STEP) * made.kv_bytes_per_token
        assert made.weight_bytes + OVERHEAD_BYTES + made.prompt_cache_bytes + kv <= made.share_bytes
    assert plan(4 * GIB, FACTS, 1, 16).prompt_cache_bytes == 4 * GIB // PROMPT_CACHE_SHARE


def test_a_prompt_cache_never_takes_the_room_of_the_last_conversation() -> None:
    assert plan(4 * GIB, FACTS, 1, 16, prompt_cache_bytes=100 * GIB).kv_tokens >= SHORTEST_USEFUL


# --- Caches that do not grow with every token -------------------------------------------------------------------------

# Like gemma3: five layers in six keep 1,024 tokens.
WINDOWED = replace(FACTS, cache=CacheLayout(2_000, ((1024, 10_000),)))
# Like qwen3_next: three layers in four keep a state.
STATES = replace(FACTS, cache=CacheLayout(2_000, row=100_000, row_float32=2_000_000))


@pytest.mark.parametrize("facts", [FACTS, WINDOWED, STATES])
@pytest.mark.parametrize("budget", [2 * GIB, 3 * GIB, 8 * GIB])
def test_rows_of_any_length_within_the_kv_tokens_stay_inside_the_share(facts: ModelFacts, budget: int) -> None:
    made = plan(budget, facts, 1, 16)
    assert made.kv_tokens >= SHORTEST_USEFUL
    for rows in range(1, made.slots + 1):
        # What the broker lets in: rows x longest.
        longest = made.kv_tokens // rows
        row = made.kv.total(longest + KV_STEP, 1)
        held = made.weight_bytes + made.overhead_bytes + made.prompt_cache_bytes + KV_PEAK * rows * row
        assert held <= made.share_bytes


def test_a_window_leaves_room_for_more_tokens_than_full_attention_and_a_state_for_fewer_rows() -> None:
    full = replace(FACTS, cache=CacheLayout(12_000))
    assert plan(3 * GIB, WINDOWED, 1, 16).kv_tokens > 2 * plan(3 * GIB, full, 1, 16).kv_tokens
    small = replace(FACTS, cache=CacheLayout(2_000))
    assert plan(3 * GIB, STATES, 1, 256).slots < plan(3 * GIB, small, 1, 256).slots
    assert plan(2 * GIB, replace(FACTS, cache=CacheLayout(0, row=1000)), 1, 16).limit == "slots"


def test_the_plan_says_what_bounds_it_and_what_is_a_guess() -> None:
    assert plan(64 * GIB, FACTS, 1, 16).limit == "slots" and plan(3 * GIB, FACTS, 1, 16).limit == "memory"
    assert not plan(64 * GIB, FACTS, 1, 16).estimated
    assert plan(64 * GIB, replace(FACTS, estimated=True), 1, 16).estimated
    assert plan(64 * GIB, FACTS, 1, 16).cache_bytes == 64 * GIB // BUFFER_CACHE_SHARE


def test_wide_models_need_more_beside_their_weights() -> None:
    wide = replace(FACTS, width=8192, inner=28672, vocabulary=128_000)
    assert needs(FACTS, KEEP, 16).overhead == OVERHEAD_BYTES
    assert needs(wide, KEEP, 16).overhead > 700 * MIB > needs(wide, KEEP, 1).overhead - OVERHEAD_BYTES
    assert needs(wide, FLOAT32, 16).overhead > needs(wide, KEEP, 16).overhead


def test_what_was_measured_is_divided_like_what_was_planned() -> None:
    made = plan(3 * GIB, FACTS, 1, 16)
    same = fit(Needs(made.weight_bytes, made.overhead_bytes, made.kv), made.share_bytes, 16, 8192)
    assert (same.slots, same.kv_tokens, same.prompt_cache_bytes) == (made.slots, made.kv_tokens, made.prompt_cache_bytes)
    larger = fit(Needs(made.weight_bytes, made.overhead_bytes, CacheBytes(46_080)), made.share_bytes, 16, 8192)
    assert larger.kv_tokens == pytest.approx(made.kv_tokens / 2, rel=0.2)
