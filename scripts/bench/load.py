"""Load for benchmarks: the load test's own client, driven from plain code.

Owns nothing but the bridge; what is sent comes in as Asks. Invariant: a benchmark's figure is never taken from a run in
which a reply was not whole: drive() raises instead.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from scripts.loadtest import runner
from scripts.loadtest.client import Client, Target
from scripts.loadtest.command import loop_factory
from scripts.loadtest.plan import WORDS, Ask
from scripts.loadtest.stage import Stage

MODEL = "m"
T = TypeVar("T")


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine on a loop of its own, as `millpond loadtest` does."""
    with asyncio.Runner(loop_factory=loop_factory()) as loop:
        return loop.run(_awaited(work))


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def drive(url: str, asks: Sequence[Ask], clients: int, model: str = MODEL, **body: object) -> Stage:
    """All of `asks`, `clients` at once. Raises RuntimeError unless every reply was whole."""
    stage = Stage("bench", clients, "closed")

    async def work() -> None:
        client = Client(Target(url, model, extra=body))
        await runner.closed(stage, client, iter(asks), clients, len(asks), 0.0)
        client.close()

    run(work)
    wrong = [reply for reply in stage.replies if reply.outcome != "complete"]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(asks)} replies were not whole: {wrong[0].problem}")
    return stage


def tokens_per_s(stage: Stage) -> float:
    """All tokens over the time from the first request to the last end."""
    return sum(reply.tokens for reply in stage.replies) / stage.wall_s


def stories(first: int, count: int, tokens: int) -> list[Ask]:
    """Requests whose replies of a small model run to their limit; no two alike, so that no cache of prompts helps."""
    return [
        Ask(
            number,
            f"Story {number}. Write a very long story about a {WORDS[number % len(WORDS)]} that never ends.",
            tokens,
        )
        for number in range(first, first + count)
    ]


def scripts(texts: Iterable[str], tokens: int = 8000) -> list[Ask]:
    """Requests for the scripted engine."""
    return [Ask(number, text, tokens) for number, text in enumerate(texts)]
