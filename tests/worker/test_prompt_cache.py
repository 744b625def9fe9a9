"""The prompt cache: a warm reply is the cold one, nothing in it is spoilt, and it never grows past its bytes."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from tests.worker.driving import Reply, collect, drain, run, rid
from worker.engine import Prefilled
from worker.engines import mlx_lm_0_32
from worker.engines.batched import BatchedEngine
from worker.engines.prompt_cache import SHORTEST, PromptCache

GREEDY = Sampling(temperature=0.0)


def tokens(seed: int, length: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(3, 250) for _ in range(length)]


def layers(length: int, kind: type = KVCache, value: float = 1.0) -> list[Any]:
    """A cache of two layers that has read `length` tokens: 64 bytes a token."""
    made = [kind() if kind is KVCache else RotatingKVCache(8) for _ in range(2)]
    for layer in made:
        layer.update_and_fetch(mx.full((1, 1, length, 4), value), mx.full((1, 1, length, 4), value))
        if kind is KVCache:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    mlx_lm_0_32.evaluate(made)
    return made


BYTES = 64


# --- The entries ------------------------------------------------------------------------------------------------------


def test_the_longest_common_head_is_found_and_the_last_token_left_to_read() -> None:
    kept = PromptCache(10**6)
    one, other = tokens(1, 50), tokens(2, 80)
    kept.put(one, layers(50))
    kept.put(other, layers(80))
    for prompt, count in (
        (one, 49), (one + [7], 50), (one[:40] + [7, 7, 7], 40), (other[:30] + one, 30), (other, 79),
        (one[: SHORTEST + 1], SHORTEST),
    ):  # fmt: skip
        cache, cached = kept.find(prompt)
        assert cached == count and cache is not None and {layer.offset for layer in cache} == {count}
    for prompt in (tokens(3, 50), one[:SHORTEST], one[: SHORTEST - 1] + [9] * 40, [5]):
        assert kept.find(prompt) == (None, 0)


def test_a_hit_is_a_copy_and_leaves_the_entry_as_it_was() -> None:
    kept = PromptCache(10**6)
    kept.put(tokens(1, 50), layers(50))
    for _ in range(3):
        cache, cached = kept.find(tokens(1, 50)[:30] + [1])
        assert cache is not None and cached == 30
        for layer in cache:
            layer.update_and_fetch(mx.zeros((1, 1, 5, 4)), mx.zeros((1, 1, 5, 4)))
        mlx_lm_0_32.evaluate(cache)
        cache, cached = kept.find(tokens(1, 50) + [1])
        assert cache is not None and cached == 50
        assert all(mx.all(layer.keys_and_values()[0] == 1).item() for layer in cache)


@pytest.mark.parametrize(("head", "held"), [(100, 256), (256, 256), (257, 512), (590, 600)])
def test_a_short_head_of_a_long_entry_is_found_without_the_rest(head: int, held: int) -> None:
    kept = PromptCache(10**6)
    long = tokens(1, 600)
    kept.put(long, layers(600))
    cache, cached = kept.find(long[:head] + [1])
    assert cache is not None and cached == head
    assert sum(layer.nbytes for layer in cache) == held * BYTES and {layer.offset for layer in cache} == {head}
    for layer in cache:
        layer.update_and_fetch(mx.zeros((1, 1, 5, 4)), mx.zeros((1, 1, 5, 4)))
        keys, values = layer.keys_and_values()
        assert mx.all(keys[..., :head, :] == 1).item() and mx.all(values[..., head:, :] == 0).item()
    kept.put(long[:head] + [1] * 5, cache)
    # Kept at its own size, and the long one is as it was.
    assert kept.nbytes <= (600 + head + 5 + KVCache.step) * BYTES
    assert kept.find(long + [1])[1] == 600


def test_it_is_bounded_in_bytes_whatever_is_put_in_and_the_least_used_leaves_first() -> None:
    kept = PromptCache(100 * BYTES)
    chooser = random.Random(0)
    for number in range(200):
        length = chooser.randrange(SHORTEST, 140)
        kept.put(tokens(number, length), layers(length))
        assert kept.nbytes <= kept.limit_bytes
        assert kept.nbytes == sum(len(entry.tokens) * BYTES for entry in kept._entries)
    kept.clear()
    assert (len(kept), kept.nbytes) == (0, 0)
    for number in range(5):
        kept.put(tokens(number, 20), layers(20))
    kept.find(tokens(0, 20))
    assert not kept.wants(tokens(1, 20))
    kept.put(tokens(9, 60), layers(60))
    # Found, and found again without being wanted: both count as use.
    assert [kept.find(tokens(number, 20))[1] for number in (0, 1, 2, 3, 4)] == [19, 19, 0, 0, 0]


def test_what_does_not_fit_is_not_kept_and_costs_the_others_nothing() -> None:
    kept = PromptCache(100 * BYTES)
    kept.put(tokens(1, 50), layers(50))
    kept.put(tokens(2, 101), layers(101))
    assert len(kept) == 1 and kept.find(tokens(1, 50))[1] == 49
    assert not PromptCache(0).wants(tokens(1, 50))


def test_what_can_be_cut_from_another_is_not_kept_twice() -> None:
    kept = PromptCache(10**6)
    kept.put(tokens(1, 80)[:30], layers(30))
    kept.put(tokens(1, 80), layers(80))
    assert len(kept) == 1
    assert not kept.wants(tokens(1, 80)[:50]) and not kept.wants(tokens(1, 80))
    assert kept.wants(tokens(1, 80) + [5]) and not kept.wants([1] * (SHORTEST - 1))


def test_a_cache_that_cannot_be_cut_serves_only_prompts_that_go_on_from_it() -> None:
    kept = PromptCache(10**6)
    head = tokens(1, 40)
    kept.put(head, layers(40, RotatingKVCache))
    assert kept.find(head[:30] + [1])[1] == kept.find(head)[1] == 0
    assert kept.find(head + [1])[1] == 40
    assert kept.wants(head[:30])
    kept.put(head[:30], layers(30, RotatingKVCache))
    assert len(kept) == 2 and kept.find(head)[1] == 30


# --- In the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> BatchedEngine:
    engine = BatchedEngine(tiny_model, slots=8, prefill_step=32, decode_stall_s=60.0, prompt_cache_bytes=10**6)
    engine.load(lambda words: None)
    return engine


@pytest.fixture
def engine(loaded: BatchedEngine) -> Iterator[BatchedEngine]:
    yield loaded
    loaded.rebuild()


def request(prompt: list[int], sampling: Sampling = GREEDY, **options: Any) -> GenerationRequest:
    return GenerationRequest(prompt, 16, sampling, **options)


def cold(engine: BatchedEngine, wanted: GenerationRequest) -> Reply:
    engine._kept.clear()
    reply = run(engine, {rid(0): wanted})[rid(0)]
    engine._kept.clear()
    return reply


def warm(engine: BatchedEngine, wanted: GenerationRequest) -> tuple[Reply, int]:
    """The reply, and how many of its prompt's tokens came from the cache."""
    replies, cached = {rid(0): Reply()}, 0
    engine.start(rid(0), wanted)
    while engine.busy:
        steps = engine.step()
        cached = max([cached, *(step.cached for step in steps if isinstance(step, Prefilled))])
        collect(replies, steps)
    return replies[rid(0)], cached


def test_warm_replies_are_the_cold_ones_again_diverging_going_on_and_again(engine: BatchedEngine) -> None:
    head = tokens(1, 90)
    prompts = [head, head, head + tokens(2, 20), head[:60] + tokens(3, 20), head[:40], head]
    penalized = Sampling(temperature=0.8, seed=4, repetition_penalty=1.2, presence_penalty=0.5)
    for sampling in (GREEDY, penalized):
        expected = [cold(engine, request(prompt, sampling)).tokens for prompt in prompts]
        found = [warm(engine, request(prompt, sampling)) for prompt in prompts]
        assert [reply.tokens for reply, _ in found] == expected
        assert [cached for _, cached in found] == [0, 89, 89, 60, 39, 89]
        engine._kept.clear()


def test_many_warm_rows_at_once_are_the_cold_ones(engine: BatchedEngine) -> None:
    head = tokens(1, 70)
    requests = {rid(n): request(head + tokens(n, 3 + 5 * n), Sampling(seed=n) if n % 2 else GREEDY) for n in range(8)}
    expected = {id: cold(engine, wanted).tokens for id, wanted in requests.items()}
    warm(engine, request(head + [1]))
    assert {id: reply.tokens for id, reply in run(engine, requests).items()} == expected


def test_a_cancel_at_any_moment_spoils_nothing(engine: BatchedEngine) -> None:
    head = tokens(1, 120)
    prompts = [head, head[:100] + tokens(5, 30)]
    expected = [cold(engine, request(prompt)).tokens for prompt in prompts]
    for steps in range(9):
        for number in range(2):
            engine.start(rid(number), request(prompts[number]))
        for _ in range(steps):
            engine.step()
        engine.cancel(rid(0))
        engine.step()
        engine.cancel(rid(1))
        assert not engine.busy
        assert [warm(engine, request(prompt))[0].tokens for prompt in prompts] == expected
        assert engine._kept.nbytes <= engine._kept.limit_bytes
        if steps % 2:
            engine._kept.clear()


def test_the_engines_cache_stays_within_its_bytes(tiny_model: Path) -> None:
    engine = BatchedEngine(tiny_model, slots=4, prompt_cache_bytes=200_000)
    engine.load(lambda words: None)
    assert len(engine._kept) == 0
    for number in range(12):
        warm(engine, request(tokens(number, 60 + number)))
        assert 0 < engine._kept.nbytes <= 200_000
    assert len(engine._kept) > 2
    warm(engine, request(tokens(99, 400)))
    assert engine._kept.nbytes <= 200_000
    engine.close()


def test_a_cache_of_one_kind_that_cannot_be_cut_is_kept_where_the_system_part_ends(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm_0_32, "can_be_cut", lambda model: False)
    engine.rebuild()
    system, first, second = tokens(1, 50), tokens(2, 30), tokens(3, 30)
    expected = cold(engine, request(system + second)).tokens
    reads = warm(engine, request(system + first, system_tokens=50))[0].reads
    assert [done for done, _ in reads] == [32, 50, 80]
    assert {len(entry.tokens) for entry in engine._kept._entries} >= {79}
    reply, cached = warm(engine, request(system + second, system_tokens=50))
    assert (reply.tokens, cached) == (expected, 50)
    monkeypatch.undo()


def test_a_failed_step_forgets_what_was_read(engine: BatchedEngine) -> None:
    warm(engine, request(tokens(1, 50)))
    assert len(engine._kept) == 1
    engine.rebuild()
    assert len(engine._kept) == 0


def test_rows_that_wait_join_while_others_hit(engine: BatchedEngine) -> None:
    head = tokens(1, 40)
    requests = {rid(n): request(head + [n]) for n in range(20)}
    expected = {id: cold(engine, wanted).tokens for id, wanted in requests.items()}
    replies = {id: Reply() for id in requests}
    for id, wanted in requests.items():
        engine.start(id, wanted)
    assert {id: reply.tokens for id, reply in drain(engine, replies).items()} == expected


def test_prompts_that_come_together_are_read_once(engine: BatchedEngine) -> None:
    head = tokens(1, 200)
    prompts = [head, head, head + tokens(2, 30), tokens(3, 40), head[:150] + tokens(4, 5)]
    expected = [cold(engine, request(prompt)).tokens for prompt in prompts]
    replies = {rid(number): Reply() for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.start(rid(number), request(prompt))
    cached: dict[object, int] = {}
    while engine.busy:
        steps = engine.step()
        cached |= {step.request: step.cached for step in steps if isinstance(step, Prefilled)}
        collect(replies, steps)
    assert [replies[rid(number)].tokens for number in range(len(prompts))] == expected
    assert [cached[rid(number)] for number in range(len(prompts))] == [0, 199, 199, 0, 150]


def test_nobody_waits_for_a_prompt_that_is_cancelled_or_much_longer(engine: BatchedEngine) -> None:
    head = tokens(1, 100)
    engine.start(rid(0), request(head + tokens(2, 10)))
    engine.step()
    engine.start(rid(1), request(head))
    engine.step()
    assert not engine._rows or rid(1) not in {row.id for row in engine._rows.values()}
    engine.cancel(rid(0))
    reply = drain(engine, {rid(1): Reply()})[rid(1)]
    engine._kept.clear()
    assert reply.tokens == cold(engine, request(head)).tokens
    engine.start(rid(2), request(head + tokens(3, 900)))
    engine.step()
    engine.start(rid(3), request(head))
    engine.step()
    assert rid(3) in {row.id for row in engine._rows.values()}
