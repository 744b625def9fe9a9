"""capacity: how many streams at once the machine carries, and which process is full when it carries no more.

Two API processes, four scripted workers, twenty tokens a second to a stream. The number is doubled until a level fails,
then bisected. A level passes when every stream is whole and no token of its window reached the client later than
LATEST_MS after the engine's timetable said that it was due: so whatever makes it late counts, a worker without CPU too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import scripted
from scripts.bench.stamped import RATE, Level, hold
from scripts.harness import Harness, wait_for
from scripts.loadtest.table import Table

API_PROCESSES, WORKERS = 2, 4
LATEST_MS = 250.0
FIRST, MOST = 64, 2048
# A level this much beyond the last one that passed is not worth another run.
FINEST = 1 / 8
KINDS = ("API 1", "API 2", "broker", "workers", "client")


def instance(streams: int) -> AbstractContextManager[Harness]:
    """With room for so many streams on any of its workers."""
    room = str(streams)
    limits = ("--slots", room, "--max-queue", room, "--max-inflight", room)
    return scripted("--workers", str(WORKERS), *limits, api_processes=API_PROCESSES)


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    first, most, seconds = (8, 16, 1.0) if quick else (FIRST, MOST, 10.0)
    levels: list[Level] = []

    def passes(streams: int) -> bool:
        levels.append(hold(harness, streams, seconds))
        if not passed(levels[-1]) and not hopeless(levels[-1]):
            _settled(harness)
            # Once more: a single stall that came from outside must not decide.
            levels.append(hold(harness, streams, seconds))
        _settled(harness)
        return passed(levels[-1])

    with instance(most) as harness:
        most_streams = search(passes, first, most)
    return _report(levels, most_streams, seconds)


def search(passes: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number that passes, by doubling and bisecting; 0 if `first` does not."""
    low, high = 0, first
    while high <= most and passes(high):
        low, high = high, 2 * high
    # Beyond `most` nothing is tried.
    while low and high <= most and high - low > low * FINEST:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def passed(level: Level) -> bool:
    """Whether the level was carried."""
    return not level.problems and bool(level.late) and level.late_ms(100) <= LATEST_MS


def hopeless(level: Level) -> bool:
    """Whether it failed by so much that no accident can be the cause."""
    return bool(level.problems) or not level.late or level.late_ms(50) > LATEST_MS


def _settled(harness: Harness) -> None:
    wait_for(harness.idle, 60.0, "idle after a level")


def _report(levels: list[Level], streams: int, seconds: float) -> Report:
    best = [level for level in levels if level.streams == streams and passed(level)]
    if not best:
        raise RuntimeError(f"{levels[0].streams} streams were not carried: {_verdict(levels[0])}")
    figures = [
        Figure("streams at once", [streams], "{:.0f}"),
        Figure("tokens/s", [best[-1].tokens_per_s], "{:.0f}"),
        Figure("a token's lateness at the client, p99, ms", [best[-1].late_ms(99)], "{:.1f}"),
        Figure("the latest token, ms", [best[-1].late_ms(100)], "{:.0f}", most=LATEST_MS),
    ]
    notes = (
        f"{API_PROCESSES} API processes, {WORKERS} scripted workers, {RATE} tokens/s to a stream, "
        f"{seconds:.0f} s a level.",
    )
    rows = [
        (
            str(level.streams),
            _verdict(level),
            f"{level.tokens_per_s:.0f}",
            f"{level.late_ms(99):.0f}",
            f"{level.made_late_ms(99):.0f}",
            *(f"{level.shares.get(kind, 0.0):.0%}" for kind in KINDS),
            f"{sum(level.shares.values()):.0%}",
        )
        for level in sorted(levels, key=lambda level: level.streams)
    ]
    header = ("streams", "", "tokens/s", "late p99, ms", "made late p99, ms", *KINDS, "all")
    shares = "Shares are of one core; made late: by the worker itself."
    tried = Table("Every level that was tried", header, rows, (shares,))
    return Report("capacity", [table("The most streams that were carried", figures, notes), tried], figures)


def _verdict(level: Level) -> str:
    if level.problems:
        return f"{len(level.problems)} not whole: {level.problems[0]}"
    return "carried" if passed(level) else f"up to {level.late_ms(100):.0f} ms late"
