"""Draws follow the distribution they are asked for, and the shortcut for large vocabularies changes nothing."""

import math

import pytest

import mlx.core as mx

from common.generation import Sampling
from worker.engines.sampling import Draw, RowLogits, SeededDraw, changes_logits, draw, greedy, is_greedy

WIDTH = 5000


def logprobs(seed: int, spread: float = 3.0, rows: int = 1) -> "mx.array":
    logits = mx.random.normal((rows, WIDTH), key=mx.random.key(seed)) * spread
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def drawn(row: "mx.array", settings: Sampling, count: int = 400, candidates: int = 64) -> list[int]:
    """`count` draws from one row, as a batch of equal rows."""
    mx.random.seed(1)
    return Draw(settings, candidates)(mx.broadcast_to(row, (count, WIDTH))).tolist()


def ranked(row: "mx.array", temperature: float = 1.0) -> list[tuple[int, float]]:
    """(token, probability), likeliest first."""
    shares = mx.softmax(row[0] / temperature).tolist()
    return sorted(enumerate(shares), key=lambda pair: -pair[1])


def nucleus(row: "mx.array", top_p: float, temperature: float = 1.0) -> set[int]:
    kept, mass = set(), 0.0
    for token, share in ranked(row, temperature):
        if mass >= top_p:
            break
        kept.add(token)
        mass += share
    return kept


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_draws_from_the_nucleus_after_temperature(top_p: float, temperature: float) -> None:
    row = logprobs(3)
    kept = nucleus(row, top_p, temperature)
    tokens = set(drawn(row, Sampling(temperature=temperature, top_p=top_p)))
    assert tokens <= kept
    assert len(tokens) >= min(len(kept), 4)


def test_a_nucleus_larger_than_the_candidates_is_not_cut() -> None:
    row = logprobs(3, spread=0.3)
    kept = nucleus(row, 0.9)
    assert len(kept) > 64
    tokens = drawn(row, Sampling(top_p=0.9), count=1000)
    best = {token for token, _ in ranked(row)[:64]}
    assert set(tokens) <= kept and len(set(tokens) - best) > 500


def test_top_k_and_min_p_keep_what_they_say() -> None:
    row = logprobs(4)
    order = [token for token, _ in ranked(row)]
    assert set(drawn(row, Sampling(top_k=5, temperature=2.0))) == set(order[:5])
    best = ranked(row)[0][1]
    allowed = {token for token, share in ranked(row) if share >= 0.1 * best}
    assert set(drawn(row, Sampling(min_p=0.1))) <= allowed
    assert set(drawn(row, Sampling(min_p=1.0))) == {order[0]}
    assert set(drawn(row, Sampling(top_k=WIDTH + 5, top_p=0.0001))) == {order[0]}


@pytest.mark.parametrize(
    "settings",
    [Sampling(), Sampling(top_p=0.9999), Sampling(top_k=200), Sampling(min_p=0.001), Sampling(temperature=0.5)],
)
def test_frequencies_follow_the_probabilities(settings: Sampling) -> None:
    row = weighted({4000: 0.45, 3: 0.3, 900: 0.2, 2: 0.05})
    tokens = drawn(row, settings, count=1500)
    for token, share in ranked(row, settings.temperature)[:4]:
        assert tokens.count(token) / 1500 == pytest.approx(share, abs=0.04)


def test_the_token_that_completes_the_nucleus_belongs_to_it() -> None:
    row = weighted({4000: 0.4, 3: 0.3, 900: 0.2, 2: 0.1})
    for top_p, kept in ((0.39, {4000}), (0.41, {4000, 3}), (0.69, {4000, 3}), (0.71, {4000, 3, 900})):
        assert set(drawn(row, Sampling(top_p=top_p))) == kept


def weighted(shares: dict[int, float]) -> "mx.array":
    """Log-probabilities of a few tokens; the others have next to none."""
    row = [-30.0] * WIDTH
    for token, share in shares.items():
        row[token] = math.log(share)
    return mx.array([row])


@pytest.mark.parametrize("settings", [Sampling(seed=9), Sampling(seed=9, top_p=0.9), Sampling(seed=9, top_k=100)])
def test_a_seeded_draw_survives_the_noise_of_batching(settings: Sampling) -> None:
    row = logprobs(6)
    noisy = row + mx.random.uniform(-7e-5, 7e-5, row.shape, key=mx.random.key(0))
    first, second = SeededDraw(settings, 64, 0), SeededDraw(settings, 64, 0)
    assert [first(row).item() for _ in range(30)] == [second(noisy).item() for _ in range(30)]


def test_a_seeded_draw_does_not_depend_on_how_many_candidates_were_looked_at() -> None:
    row = logprobs(6)
    few, many = (SeededDraw(Sampling(seed=3, top_p=0.8), candidates, 0) for candidates in (256, WIDTH))
    assert [few(row).item() for _ in range(30)] == [many(row).item() for _ in range(30)]


def test_a_seeded_draw_survives_that_two_candidates_change_places() -> None:
    one, other = weighted({7: 0.5, 4001: 0.4999}), weighted({7: 0.4999, 4001: 0.5})
    first, second = (SeededDraw(Sampling(seed=5, top_p=0.95), 64, 0) for _ in range(2))
    tokens = [first(one).item() for _ in range(60)]
    assert tokens == [second(other).item() for _ in range(60)] and set(tokens) == {7, 4001}


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_seeded_draws_are_spread_like_unseeded_ones(top_p: float) -> None:
    row = weighted({4000: 0.45, 3: 0.3, 900: 0.25})
    seeded = SeededDraw(Sampling(seed=11, top_p=top_p), 64, 0)
    tokens = [seeded(row).item() for _ in range(500)]
    for token, share in ranked(row)[:3]:
        assert tokens.count(token) / 500 == pytest.approx(share, abs=0.07)


@pytest.mark.parametrize("temperature", [1e-9, 0.0, 5e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert is_greedy(Sampling(temperature=temperature))


def test_the_lowest_temperature_that_is_drawn_gives_no_nonsense() -> None:
    row = logprobs(7)
    assert set(drawn(row, Sampling(temperature=1.01e-4, top_p=0.9))) == {greedy(row).item()}
    assert set(drawn(row, Sampling(temperature=1.01e-4))) == {greedy(row).item()}


def test_bfloat16_logits_can_be_drawn_from() -> None:
    row = logprobs(7).astype(mx.bfloat16)
    assert len(set(drawn(row, Sampling(top_p=0.9)))) > 5


def test_a_draw_that_fails_says_so_and_gives_a_token() -> None:
    failing = Draw(Sampling(top_p=0.5), candidates="x")  # type: ignore[arg-type]
    assert failing(logprobs(1)).shape == (1,)
    assert failing.error == "TypeError"


def test_penalties_look_at_the_reply_and_repetition_at_all() -> None:
    flat = mx.zeros((1, 10))
    tokens = mx.array([1, 2, 2, 3, 3, 3])  # the prompt is 1, 2
    presence = RowLogits(Sampling(presence_penalty=0.5), 2)(tokens, flat + 0).tolist()[0]
    assert presence[:5] == [0, 0, -0.5, -0.5, 0]
    frequency = RowLogits(Sampling(frequency_penalty=0.5), 2)(tokens, flat + 0).tolist()[0]
    assert frequency[:5] == [0, 0, -0.5, -1.5, 0]
    repetition = RowLogits(Sampling(repetition_penalty=2.0), 2)(tokens, flat + 1).tolist()[0]
    assert repetition[:5] == [1, 0.5, 0.5, 0.5, 1]
    assert not changes_logits(Sampling(temperature=0.3, top_p=0.5, seed=1))


def test_a_batch_of_rows_is_drawn_row_by_row() -> None:
    rows = mx.concatenate([logprobs(1, spread=30.0), logprobs(2, spread=30.0)])
    noise = lambda shape, tokens: mx.zeros(shape)  # noqa: E731
    for settings in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=3)):
        assert draw(rows, settings, 16, noise).tolist() == greedy(rows).tolist()
