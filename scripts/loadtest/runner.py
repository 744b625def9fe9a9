"""Stages of load: closed loop (so many clients, each with one request at a time) and open loop (arrivals on time).

Owns who sends when. An open loop never waits for the server: latency counts from the due time, so a server that stalls
pays for every request that it delays. Invariant: every request that was begun has ended when a stage returns.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from scripts.loadtest.client import Client
from scripts.loadtest.plan import Ask
from scripts.loadtest.reply import Reply
from scripts.loadtest.stage import Stage

# Without advice a refused client waits this long before its next request.
REFUSED_WAIT_S = 1.0


@contextmanager
def _timed(stage: Stage) -> Iterator[None]:
    stage.began_at, cpu = time.monotonic(), time.process_time()
    try:
        yield
    finally:
        stage.wall_s = time.monotonic() - stage.began_at
        stage.client_cpu_s = time.process_time() - cpu


async def _one(stage: Stage, client: Client, ask: Ask, due_at: float | None = None) -> Reply:
    stage.open += 1
    try:
        reply = await client.send(ask, due_at)
    finally:
        stage.open -= 1
    stage.replies.append(reply)
    return reply


async def closed(
    stage: Stage,
    client: Client,
    asks: Iterator[Ask],
    clients: int,
    requests: int,
    seconds: float,
    *,
    patient: bool = True,
) -> None:
    """`clients` at once until `requests` are sent or `seconds` are over (0: no limit). patient: heed retry-after."""
    left = requests or 2**62
    ends_at = time.monotonic() + (seconds or 1e9)

    async def life() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < ends_at:
            left -= 1
            reply = await _one(stage, client, next(asks))
            if patient and reply.outcome == "refused" and left > 0:
                wait_s = reply.retry_after_s or REFUSED_WAIT_S
                await asyncio.sleep(max(0.0, min(wait_s, ends_at - time.monotonic())))

    with _timed(stage):
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(life())


async def arriving(stage: Stage, client: Client, asks: Iterator[Ask], due: Sequence[float], most_open: int) -> None:
    """One request at each of the instants in `due` (seconds from now), whatever the server does."""
    with _timed(stage):
        async with asyncio.TaskGroup() as group:
            for offset in due:
                due_at = stage.began_at + offset
                ask = next(asks)
                if (left := due_at - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                if stage.open >= most_open:
                    stage.skipped += 1
                    continue
                group.create_task(_one(stage, client, ask, due_at))


async def watched(
    stage: Stage, client: Client, work: asyncio.Task[None], show: Callable[[Stage, float], None], every_s: float
) -> None:
    """Until `work` is done, show the stage and its pieces per second now and then."""
    pieces, at = client.pieces, time.monotonic()
    while not work.done():
        await asyncio.wait([work], timeout=every_s)
        now = time.monotonic()
        show(stage, (client.pieces - pieces) / max(1e-9, now - at))
        pieces, at = client.pieces, now
    await work
