"""latency: what the way from engine to client adds to a token at a quarter of the capacity, and to a first token.

The scripted engine writes into each token when it made it, by the clock that all processes of one machine share; the
way ends when the client has read the bytes. First tokens are of requests to the idle instance whose engine answers at
once, one after the other over a kept connection.
"""

from scripts.bench import capacity
from scripts.bench.goals import Figure, Report, table
from scripts.bench.load import drive, scripts
from scripts.bench.stamped import RATE, Level, hold
from scripts.harness import Harness, script
from scripts.loadtest.figures import percentile

# A quarter of what `capacity` found on the reference machine.
STREAMS = 176
MOST_MEDIAN_MS, MOST_P99_MS = 1.5, 8.0


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    streams, rounds, seconds, requests = (8, 1, 1.0, 50) if quick else (STREAMS, 5, 8.0, 500)
    with capacity.instance(4 * streams) as harness:
        _firsts(harness, 50)
        levels, firsts = [], []
        for seed in range(rounds):
            levels.append(_held(harness, streams, seconds, seed))
            firsts.append(_firsts(harness, requests))
    figures = [
        Figure("made to read, p50, ms", [level.carried_ms(50) for level in levels], "{:.2f}", most=MOST_MEDIAN_MS),
        Figure("made to read, p99, ms", [level.carried_ms(99) for level in levels], "{:.2f}", most=MOST_P99_MS),
        Figure("request sent to first token, p50, ms", [percentile(times, 50) for times in firsts], "{:.2f}"),
        Figure("request sent to first token, p99, ms", [percentile(times, 99) for times in firsts], "{:.2f}"),
    ]
    rate = sum(level.tokens_per_s for level in levels) / rounds
    notes = (
        f"{streams} streams of {RATE}/s ({rate:.0f} tokens/s) over {capacity.API_PROCESSES} API processes and "
        f"{capacity.WORKERS} scripted workers, {seconds:.0f} s a round; first tokens from an idle instance.",
    )
    return Report("latency", [table("What the way adds", figures, notes)], figures)


def _held(harness: Harness, streams: int, seconds: float, seed: int) -> Level:
    level = hold(harness, streams, seconds, seed)
    if level.problems:
        raise RuntimeError(f"{len(level.problems)} of {streams} streams were not whole: {level.problems[0]}")
    return level


def _firsts(harness: Harness, requests: int) -> list[float]:
    """Milliseconds, sorted."""
    stage = drive(harness.url, scripts([script(count=1, rate=0)] * requests), 1)
    return sorted(reply.first_s * 1000 for reply in stage.replies)
