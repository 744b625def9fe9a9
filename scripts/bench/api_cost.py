"""api: what the API process pays for one streamed chunk, for one refusal and for one short reply, in its own CPU time.

A scripted worker generates without computing, through the real broker. Chunks are counted while all streams flow, so
that no request begins or ends meanwhile: with tokens that come one by one, each at its own time, and with tokens that
come in the steps of an engine of sixteen rows. Refusals come from a full server over kept connections, one client after
the other.
"""

import asyncio

from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import scripted
from scripts.bench.load import MODEL, scripts
from scripts.bench.load import run as run_loop
from scripts.bench.meter import CpuMeter, rss_mb
from scripts.harness import Harness, script
from scripts.loadtest import runner
from scripts.loadtest.client import Client, Target
from scripts.loadtest.plan import Ask
from scripts.loadtest.stage import Stage

STREAMS = (32, 128)
# Slow enough that the worker gives each token a frame of its own (worker/seat).
RATE = 20
# Two workers of so many slots: each steps all its rows at once, at its own instants.
ROWS = 16
MOST_US = 45.0
MOST_REFUSAL_US = 450.0


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, seconds, requests = (1, 0.5, 100) if quick else (3, 5.0, 2000)
    chunks: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    stepped: list[float] = []
    short: list[float] = []
    with scripted("--slots", str(max(STREAMS)), "--max-queue", "100") as harness:
        bench = Api(harness)
        bench.replies(50)
        for _ in range(rounds):
            for streams in STREAMS:
                chunks[streams].append(bench.chunks(streams, seconds))
            short.append(bench.replies(requests // 2))
    with scripted("--workers", "2", "--slots", str(ROWS), "--max-queue", "100") as harness:
        bench = Api(harness)
        bench.replies(50)
        stepped += [bench.chunks(2 * ROWS, seconds, together=True) for _ in range(rounds)]
    with scripted("--slots", "1", "--max-queue", "0") as harness:
        bench = Api(harness)
        bench.refusals(50)
        refusals = [bench.refusals(requests) for _ in range(rounds)]
        rss = rss_mb(bench.process)
    figures = [
        *(
            Figure(f"per content chunk, {streams} streams of {RATE}/s, µs", chunks[streams], "{:.1f}", most=MOST_US)
            for streams in STREAMS
        ),
        Figure(
            f"per content chunk, {2 * ROWS} streams in steps of {ROWS} rows, {RATE} steps/s, µs",
            stepped,
            "{:.1f}",
            most=MOST_US,
        ),
        Figure("per refusal (529), µs", refusals, "{:.0f}", most=MOST_REFUSAL_US),
        Figure("per streamed reply of one token, µs", short, "{:.0f}"),
        Figure("memory after the refusals, MB", [rss], "{:.0f}"),
    ]
    return Report("api", [table("CPU time of one API process", figures)], figures)


class Api:
    """The API process of an instance."""

    def __init__(self, harness: Harness) -> None:
        self._target = Target(harness.url, MODEL)
        (self.process,) = harness.processes("api")

    def chunks(self, streams: int, seconds: float, *, together: bool = False) -> float:
        """µs per chunk while so many streams flow. together: a worker's rows give their tokens in the same steps."""
        endless = scripts(script(count=10**6, rate=RATE, together=together) for _ in range(streams))
        endless = [Ask(ask.number, ask.text, 10**6) for ask in endless]

        async def work() -> float:
            client = Client(self._target)
            tasks = [asyncio.create_task(client.send(ask)) for ask in endless]
            while client.pieces < 5 * streams:
                await asyncio.sleep(0.05)
            meter, before = CpuMeter(self.process), client.pieces
            await asyncio.sleep(seconds)
            span, pieces = meter.read(), client.pieces - before
            ended = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if ended:
                raise RuntimeError(f"{len(ended)} streams ended early: {ended[0].result().problem}")
            return span.cpu_s / pieces * 1e6

        return run_loop(work)

    def replies(self, count: int) -> float:
        """µs per streamed reply of one token."""
        return self._per_request([*scripts([script(count=1, rate=0)] * count)], "complete")

    def refusals(self, count: int) -> float:
        """µs per refusal; a stream of ours holds the only slot."""
        holding = Ask(0, script(count=10**6, rate=5), 10**6)

        async def work() -> float:
            client = Client(self._target)
            held = asyncio.create_task(client.send(holding))
            while not client.pieces:
                await asyncio.sleep(0.02)
            try:
                return await self._measured(client, scripts(["hello"] * count), "refused")
            finally:
                held.cancel()
                await asyncio.gather(held, return_exceptions=True)
                client.close()

        return run_loop(work)

    def _per_request(self, asks: list[Ask], outcome: str) -> float:
        async def work() -> float:
            client = Client(self._target)
            try:
                return await self._measured(client, asks, outcome)
            finally:
                client.close()

        return run_loop(work)

    async def _measured(self, client: Client, asks: list[Ask], outcome: str) -> float:
        stage = Stage("bench", 8, "closed")
        meter = CpuMeter(self.process)
        await runner.closed(stage, client, iter(asks), 8, len(asks), 0.0, patient=False)
        span = meter.read()
        others = [reply for reply in stage.replies if reply.outcome != outcome]
        if others:
            raise RuntimeError(
                f"{len(others)} of {len(asks)} were not {outcome}: {others[0].problem or others[0].outcome}"
            )
        return span.cpu_s / len(asks) * 1e6
