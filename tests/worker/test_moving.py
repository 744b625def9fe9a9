"""A long prompt's caches are made room for, and copied for the prompt cache, a part in each step that rows wait for."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.generation import GenerationRequest, Sampling
from tests.worker.driving import Reply, collect, drain, run, rid
from worker.engine import Prefilled
from worker.engines import mlx_lm_0_32
from worker.engines.batched import BatchedEngine

GREEDY = Sampling(temperature=0.0)
SHORT, LONG = rid(0), rid(1)


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> BatchedEngine:
    engine = BatchedEngine(tiny_model, slots=12, prefill_step=400, decode_stall_s=60.0)
    engine.load(lambda words: None)
    return engine


@pytest.fixture
def engine(loaded: BatchedEngine) -> Iterator[BatchedEngine]:
    """A step has no time for more than the least."""
    loaded._batch._most_moved_s = 0.0
    yield loaded
    loaded.rebuild()


def request(seed: int, length: int, max_tokens: int = 8, head: int = 0) -> GenerationRequest:
    """head: so many tokens of it are the same in all."""
    draws = random.Random(0), random.Random(seed)
    return GenerationRequest([draws[at >= head].randrange(3, 250) for at in range(length)], max_tokens, GREEDY)


def alone(engine: BatchedEngine, wanted: GenerationRequest) -> list[int]:
    engine._kept.clear()
    tokens = run(engine, {LONG: wanted})[LONG].tokens
    engine._kept.clear()
    return tokens


def beside_a_row(engine: BatchedEngine, seed: int = 7) -> dict[object, Reply]:
    """One row decodes for long."""
    replies = {SHORT: Reply()}
    engine.start(SHORT, request(seed, 5, 200))
    while not replies[SHORT].tokens:
        collect(replies, engine.step())
    engine._kept.clear()
    return replies


def widths(engine: BatchedEngine) -> list[int]:
    """Columns of each layer of the prompt that is read."""
    caches = engine._batch._reading[0].reading.prompt_cache
    return [0 if layer.keys is None else layer.keys.shape[2] for layer in caches]


def uncopied(engine: BatchedEngine) -> int:
    """Layers that wait to be copied for the prompt cache."""
    return sum(len(keeping.uncopied) for company in engine._batch._reading for keeping in company.keeping)


def test_one_layer_a_step_is_moved_and_the_rows_draw_a_token_in_each(engine: BatchedEngine) -> None:
    wanted = request(1, 700)
    expected, row = alone(engine, wanted), alone(engine, request(7, 5, 200))
    replies = beside_a_row(engine)
    replies[LONG] = Reply()
    engine.start(LONG, wanted)
    seen = []
    while not replies[LONG].tokens:
        before = len(replies[SHORT].tokens)
        collect(replies, engine.step())
        assert len(replies[SHORT].tokens) == before + 1
        if engine._batch.reads:
            seen.append((widths(engine), uncopied(engine)))
    layers = len(seen[0][0])
    # The first columns; room; the rest; the copies.
    assert seen[0] == ([256] * layers, 0)
    assert [step for step, _ in seen[1 : layers + 1]] == [
        [768] * done + [256] * (layers - done) for done in range(1, layers + 1)
    ]
    assert [left for _, left in seen[-layers:]] == [*range(layers, 0, -1)]
    assert all(step == [768] * layers for step, _ in seen[layers:])
    drain(engine, replies)
    assert (replies[LONG].tokens, replies[SHORT].tokens) == (expected, row)
    assert 699 in {len(entry.tokens) for entry in engine._kept._entries}


@pytest.mark.parametrize("unread", [0, 1, 300])
def test_what_was_read_before_is_moved_in_parts_as_well(engine: BatchedEngine, unread: int) -> None:
    wanted = request(2, 601 + unread, head=600)
    expected = alone(engine, wanted)
    run(engine, {rid(9): request(3, 601, head=600)})
    replies = beside_a_row_with_cache(engine)
    replies[LONG] = Reply()
    engine.start(LONG, wanted)
    seen = []
    while not replies[LONG].tokens:
        collect(replies, engine.step())
        if engine._batch.reads:
            seen.append(widths(engine))
    layers = len(seen[0])
    room = (601 + unread + 255) // 256 * 256
    assert seen[:layers] == [[room] * done + [600] * (layers - done) for done in range(1, layers + 1)]
    drain(engine, replies)
    assert replies[LONG].tokens == expected


def beside_a_row_with_cache(engine: BatchedEngine) -> dict[object, Reply]:
    entries = list(engine._kept._entries)
    replies = beside_a_row(engine)
    engine._kept._entries = entries
    return replies


def test_without_rows_that_wait_everything_is_moved_at_once(engine: BatchedEngine) -> None:
    replies = {LONG: Reply()}
    engine.start(LONG, request(4, 700))
    collect(replies, engine.step())
    assert set(widths(engine)) == {768}
    steps = 1
    while not replies[LONG].tokens:
        collect(replies, engine.step())
        steps += 1
    # Two chunks, then the first token.
    assert steps == 3
    drain(engine, replies)


def test_rows_that_end_meanwhile_leave_it_to_be_finished_at_once(engine: BatchedEngine) -> None:
    wanted = request(5, 700)
    expected = alone(engine, wanted)
    for moment in ("room", "copies"):
        engine._kept.clear()
        replies = beside_a_row(engine)
        replies[LONG] = Reply()
        engine.start(LONG, wanted)
        while not (uncopied(engine) if moment == "copies" else engine._batch.reads and 768 in widths(engine)):
            collect(replies, engine.step())
        engine.cancel(SHORT)
        replies[SHORT].reason = "cancelled"
        read = replies[LONG].reads
        collect(replies, engine.step())
        assert not uncopied(engine) and (not engine._batch.reads or set(widths(engine)) == {768})
        drain(engine, replies)
        assert replies[LONG].tokens == expected and read[-1] == (700, 700)


def test_a_cancel_at_any_moment_of_it_changes_no_row_and_keeps_nothing_that_is_wrong(engine: BatchedEngine) -> None:
    wanted, row = request(6, 700), alone(engine, request(7, 5, 200))
    expected = alone(engine, wanted)
    for steps in range(14):
        engine._kept.clear()
        replies = beside_a_row(engine)
        replies[LONG] = Reply()
        engine.start(LONG, wanted)
        for _ in range(steps):
            collect(replies, engine.step())
        engine.cancel(LONG)
        replies[LONG].reason = "cancelled"
        drain(engine, replies)
        assert replies[SHORT].tokens == row
        assert run(engine, {rid(2): wanted})[rid(2)].tokens == expected
    assert not engine.busy


def test_a_failure_while_it_is_copied_leaves_an_engine_that_can_be_rebuilt(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = request(8, 700)
    expected = alone(engine, wanted)
    beside_a_row(engine)
    engine.start(LONG, wanted)
    while not uncopied(engine):
        engine.step()
    monkeypatch.setattr(mlx_lm_0_32, "evaluate", lambda cache: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.rebuild()
    assert not engine.busy and alone(engine, wanted) == expected


def test_prompts_with_the_same_head_wait_while_it_is_copied(engine: BatchedEngine) -> None:
    wanted, other = request(10, 700), rid(5)
    follower = GenerationRequest([*wanted.prompt[:-1], 5, 6, 7], 8, GREEDY)
    expected = alone(engine, follower)
    replies = beside_a_row(engine)
    replies |= {LONG: Reply(), other: Reply()}
    engine.start(LONG, wanted)
    while not uncopied(engine):
        collect(replies, engine.step())
    engine.start(other, follower)
    collect(replies, engine.step())
    assert other in engine._waiting
    cached = 0
    while engine.busy:
        steps = engine.step()
        cached = max([cached, *(step.cached for step in steps if isinstance(step, Prefilled) and step.request == other)])
        collect(replies, steps)
    assert (replies[other].tokens, cached) == (expected, 699)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_any_coming_and_going_gives_each_row_what_it_gives_alone(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch, seed: int, cut: bool
) -> None:
    """Companies of several rows, several at once, heads that are kept in the middle, cancels at any time."""
    monkeypatch.setattr(mlx_lm_0_32, "can_be_cut", lambda model: cut)
    engine.rebuild()
    engine._batch._most_moved_s = 0.0
    draw = random.Random(seed)
    heads = [0, 0, 290, 310]
    wanted = {}
    for number in range(14):
        head = draw.choice(heads)
        length = head + draw.choice([3, 40, 280, 300, 500])
        made = request(100 * seed + number, length, draw.choice([1, 8, 30]), head)
        wanted[rid(number)] = GenerationRequest(made.prompt, made.max_tokens, GREEDY, system_tokens=head)
    expected = {id: alone(engine, one) for id, one in wanted.items()}
    replies: dict[object, Reply] = {}
    left, cancelled = list(wanted), set()
    while left or engine.busy:
        while left and draw.random() < 0.3:
            id = left.pop()
            replies[id] = Reply()
            engine.start(id, wanted[id])
        if replies and draw.random() < 0.03:
            id = draw.choice(list(replies))
            engine.cancel(id)
            if not replies[id].reason:
                replies[id].reason = "cancelled"
                cancelled.add(id)
        collect(replies, engine.step())
    assert len(cancelled) < len(wanted) // 2
    for id, reply in replies.items():
        assert reply.tokens == expected[id] or (id in cancelled and reply.tokens == expected[id][: len(reply.tokens)])


def test_equal_prompts_that_are_read_together_are_copied_once(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._batch._most_moved_s = math.inf
    put = []
    monkeypatch.setattr(engine._kept, "put", lambda tokens, cache: put.append(tokens) or keep(tokens, cache))
    keep = type(engine._kept).put.__get__(engine._kept)
    wanted = request(9, 40)
    replies = run(engine, {rid(number): wanted for number in range(6)})
    assert len({tuple(reply.tokens) for reply in replies.values()}) == 1
    assert put == [wanted.prompt[:-1]]
