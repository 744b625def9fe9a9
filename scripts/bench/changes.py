"""changes: what sixteen closed-loop clients notice of a rolling restart and of a swap.

Two scripted workers of eight slots at a set pace, so that throughput is a matter of who serves and not of this machine's
cores; a model takes two seconds to load. Tokens are counted in windows of a second; the figure is the least window from the
order to its end, over the average before it. Invariant: a reply that is not whole gives an error and no figure.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.client import BrokerClient
from scripts.bench import load
from scripts.bench.goals import Figure, Report, table
from scripts.harness import Harness, script
from scripts.loadtest.client import Client, Target
from scripts.loadtest.plan import Ask
from scripts.loadtest.reply import Reply

CLIENTS = 16
TOKENS, RATE = 40, 20
WINDOW_S, SAMPLES = 1.0, 10
FLAGS = (
    f"--engine scripted --workers 2 --slots 8 --scripted-load 2 --scripted-rate {RATE} --api-processes 1 "
    "--log-level error --queue-timeout 30"
).split()


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    from fixtures.tiny_model import build

    rounds, before_s = (1, 3.0) if quick else (3, 8.0)
    with tempfile.TemporaryDirectory() as folder:
        models = build(Path(folder) / "tiny"), build(Path(folder) / "other", family="sentencepiece")
        with Harness(*FLAGS, model=models[0]) as harness:
            rolled = [measured(harness, before_s, "roll", "") for _ in range(rounds)]
            swapped = [measured(harness, before_s, "swap", str(models[(n + 1) % 2])) for n in range(rounds)]
    figures = [
        Figure("rolling restart: least second / before", [least for least, _ in rolled], "{:.2f}", least=0.5),
        Figure("rolling restart takes, s", [took for _, took in rolled], "{:.1f}"),
        Figure("swap: least second / before", [least for least, _ in swapped], "{:.2f}", least=0.5),
        Figure("swap takes, s", [took for _, took in swapped], "{:.1f}"),
    ]
    notes = (f"No request failed in any run. Replies of {TOKENS} tokens at {RATE} tokens/s; a new worker loads for 2 s.",)
    return Report("changes", [table(f"{CLIENTS} closed-loop clients while workers are replaced", figures, notes)], figures)


def measured(harness: Harness, before_s: float, action: str, source: str) -> tuple[float, float]:
    """(least window over the average before, seconds that it took). Raises RuntimeError unless every reply was whole."""
    found: list[tuple[float, float]] = []

    async def work() -> None:
        found.append(await _measured(harness, before_s, lambda: ordered(harness, action, source)))

    load.run(work)
    return found[0]


async def _measured(harness: Harness, before_s: float, change: Callable[[], None]) -> tuple[float, float]:
    client = Client(Target(harness.url, load.MODEL))
    replies: list[Reply] = []
    counts: list[tuple[float, int]] = []
    over = False

    async def life(number: int) -> None:
        # Not all at the same beat.
        await asyncio.sleep(number * TOKENS / RATE / CLIENTS)
        while not over:
            replies.append(await client.send(Ask(len(replies), script(count=TOKENS), 8000)))

    async def count() -> None:
        while not over:
            counts.append((time.monotonic(), client.pieces))
            await asyncio.sleep(WINDOW_S / SAMPLES)

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(life(number))
        group.create_task(count())
        await asyncio.sleep(TOKENS / RATE + before_s)
        began = time.monotonic()
        await asyncio.to_thread(change)
        ended = time.monotonic()
        await asyncio.sleep(WINDOW_S)
        over = True
    client.close()
    wrong = [reply for reply in replies if reply.outcome != "complete"]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(replies)} replies were not whole: {wrong[0].problem}")
    first = next(n for n, (at, _) in enumerate(counts) if at >= began - before_s)
    order = next(n for n, (at, _) in enumerate(counts) if at >= began)
    usual = (counts[order][1] - counts[first][1]) / (counts[order][0] - counts[first][0])
    windows = [
        (b[1] - a[1]) / (b[0] - a[0])
        for a, b in zip(counts[order:], counts[order + SAMPLES :], strict=False)
        if a[0] <= ended
    ]
    return min(windows) / usual, ended - began


def ordered(harness: Harness, action: str, source: str) -> None:
    """Give an order and wait for its end. Raises RuntimeError when it was not done."""
    with BrokerClient(harness.place.front, "bench") as broker:
        reply = broker.admin(action, load.MODEL, 0, source, 120.0)
    if reply is None or not reply.done:
        raise RuntimeError(f"{action}: {reply.text if reply else 'still under way'}")
