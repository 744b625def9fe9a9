"""What a load test sends: mixes, requests and arrivals, drawn from a seed."""

import random
from itertools import islice

import pytest

from scripts.loadtest.plan import Ask, Shape, asks, parse_mix, poisson


@pytest.mark.parametrize(
    ("text", "spans", "weights", "mean"),
    [
        ("64", [(64, 64)], [1], 64),
        ("32-256", [(32, 256)], [1], 144),
        ("10:3,100-200:1", [(10, 10), (100, 200)], [3, 1], 45),
        (" 1 , 3:1.5 ", [(1, 1), (3, 3)], [1, 1.5], 2.2),
    ],
)
def test_a_mix_is_lengths_spans_and_weights(text: str, spans: list, weights: list, mean: float) -> None:
    mix = parse_mix(text)
    assert list(mix.spans) == spans and list(mix.weights) == weights
    assert mix.mean == pytest.approx(mean)


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "x", "3:0", "3,,4", "1e3", "3:-1", "99999999"])
def test_what_is_no_mix_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_mix(text)


def test_draws_follow_the_weights() -> None:
    mix, chance = parse_mix("10:3,100-200:1"), random.Random(0)
    drawn = [mix.draw(chance) for _ in range(4000)]
    assert all(length == 10 or 100 <= length <= 200 for length in drawn)
    assert 0.7 < sum(length == 10 for length in drawn) / 4000 < 0.8


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    shape = Shape(parse_mix("5-50"), parse_mix("1-9"), shared=0.5, cancelled=0.2, slow=0.2)
    first, again, other = (list(islice(asks(shape, seed), 50)) for seed in (1, 1, 2))
    assert first == again and first != other
    assert [ask.number for ask in first] == list(range(50))
    assert len({ask.text for ask in first}) == 50


def test_shares_are_kept_and_do_not_change_the_rest() -> None:
    plain = list(islice(asks(Shape(), 3), 2000))
    mixed = list(islice(asks(Shape(cancelled=0.1, slow=0.2), 3), 2000))
    assert [ask.text for ask in plain] == [ask.text for ask in mixed]
    assert all(ask.leave_after is None and ask.read_per_s is None for ask in plain)
    leaving = [ask for ask in mixed if ask.leave_after is not None]
    slow = [ask for ask in mixed if ask.read_per_s is not None]
    assert 150 < len(leaving) < 250 and 330 < len(slow) < 470
    assert not any(ask.read_per_s for ask in leaving)
    assert all(0 <= ask.leave_after < ask.reply_tokens for ask in leaving)


def test_shared_prefixes_come_from_a_small_set() -> None:
    shape = Shape(parse_mix("5"), shared=0.5, prefixes=3, prefix_words=20)
    heads = [ask.text.split("\n")[0] for ask in islice(asks(shape, 4), 600) if "\n" in ask.text]
    assert 240 < len(heads) < 360 and len(set(heads)) == 3
    assert all(len(head.split()) == 20 for head in heads)


def test_prompts_have_the_asked_length_and_the_ending() -> None:
    ask = next(asks(Shape(parse_mix("12"), ending="@script {}"), 5))
    words, ending = ask.text.split("\n")
    assert len(words.split()) == 12 and ending == "@script {}"


def test_the_body_asks_for_usage_in_streams_and_takes_more_fields() -> None:
    ask = Ask(0, "hello", 7)
    body = ask.body("m", True, {"temperature": 0, "max_tokens": 3})
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["messages"] == [{"role": "user", "content": "hello"}] and body["temperature"] == 0
    assert body["max_tokens"] == 3
    assert "stream" not in ask.body("m", False, {})


def test_arrivals_are_sorted_within_the_time_and_as_many_as_the_rate_says() -> None:
    times = poisson(50.0, 100.0, 1)
    assert times == sorted(times) and 0 < times[0] and times[-1] < 100
    assert 4700 < len(times) < 5300
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    # Exponential gaps: the deviation equals the mean.
    assert deviation == pytest.approx(mean, rel=0.1)
    assert poisson(0.001, 0.1, 1) == []
