"""overload: what is left of the throughput when ten times as much comes as can be served, and how soon refusals come.

Scripted workers at a set pace, so that capacity is slots and not cores: a stage of the closed loop, whose clients just
keep every slot and a little of the line full without a refusal (peak), alternates with an open loop of ten times the
capacity (Poisson). Goodput counts the tokens, within a window, of replies that were whole; every other answer must be a
529 with its advice, or there is no figure.
"""

from collections.abc import Sequence

from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import scripted
from scripts.bench.load import MODEL, scripts
from scripts.bench.load import run as run_loop
from scripts.bench.meter import alternating
from scripts.harness import Harness, script
from scripts.loadtest import runner
from scripts.loadtest.client import Client, Target
from scripts.loadtest.figures import percentile
from scripts.loadtest.plan import Ask, poisson
from scripts.loadtest.reply import Reply
from scripts.loadtest.stage import Stage

WORKERS, SLOTS = 2, 10
RATE, TOKENS = 20, 20
# Replies a second: the first token comes at once, and the slot is free again with the last one.
CAPACITY = WORKERS * SLOTS * RATE / (TOKENS - 1)
TIMES = 10
# Waiting in the closed loop, so that a slot that comes free is filled at once; under the default --max-queue.
SPARE = 10
FLAGS = ("--workers", str(WORKERS), "--slots", str(SLOTS))
LEAST_GOODPUT, MOST_REFUSAL_MS = 0.95, 50.0


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, warm_s, seconds = (1, 1.5, 2.0) if quick else (3, 4.0, 16.0)
    with scripted(*FLAGS) as harness:
        bench = Overload(harness, warm_s, seconds)
        peaks, floods = alternating(rounds, bench.peak, bench.flood)
    refusals = [sorted(reply.total_s * 1000 for reply in _refused(stage.replies)) for _, stage in floods]
    shares = list(zip(refusals, floods, strict=True))
    offered = [len(stage.replies) / (warm_s + seconds) for _, stage in floods]
    figures = [
        Figure("goodput at capacity (peak), tokens/s", [goodput for goodput, _ in peaks], "{:.0f}"),
        Figure("goodput at ten times the capacity, tokens/s", [goodput for goodput, _ in floods], "{:.0f}"),
        Figure(
            "goodput / peak",
            [flood / peak for (flood, _), (peak, _) in zip(floods, peaks, strict=True)],
            "{:.3f}",
            least=LEAST_GOODPUT,
        ),
        Figure("a refusal, from when it was due, p50, ms", [percentile(times, 50) for times in refusals], "{:.1f}"),
        Figure(
            "a refusal, from when it was due, p99, ms",
            [percentile(times, 99) for times in refusals],
            "{:.1f}",
            most=MOST_REFUSAL_MS,
        ),
        Figure("offered, requests/s", offered, "{:.0f}"),
        Figure("refused, %", [100 * len(found) / len(stage.replies) for found, (_, stage) in shares], "{:.0f}"),
    ]
    notes = (
        f"{WORKERS} scripted workers of {SLOTS} slots, replies of {TOKENS} tokens at {RATE}/s: "
        f"{CAPACITY:.0f} replies/s; {seconds:.0f} s a stage after {warm_s:g} s. Kept connections, one key.",
    )
    return Report("overload", [table(f"{TIMES} times what can be served", figures, notes)], figures)


class Overload:
    """An instance under its two loads."""

    def __init__(self, harness: Harness, warm_s: float, seconds: float) -> None:
        self._target = Target(harness.url, MODEL)
        self._warm_s, self._seconds = warm_s, seconds
        self._seed = 0

    def peak(self) -> tuple[float, Stage]:
        """Goodput of the closed loop. Raises RuntimeError for any reply that is not whole."""
        clients = WORKERS * SLOTS + SPARE
        stage = Stage("peak", clients, "closed")
        count = int((self._warm_s + self._seconds) * CAPACITY) + 2 * clients

        async def work() -> None:
            client = Client(self._target)
            await runner.closed(stage, client, iter(_asks(count)), clients, count, self._warm_s + self._seconds)
            client.close()

        run_loop(work)
        if _refused(stage.replies):
            raise RuntimeError(f"{len(_refused(stage.replies))} refusals at capacity")
        return self._goodput(stage), stage

    def flood(self) -> tuple[float, Stage]:
        """Goodput of the open loop. Raises RuntimeError for any answer that is neither whole nor a proper refusal."""
        offered = CAPACITY * TIMES
        stage = Stage("flood", offered, "open")
        self._seed += 1
        due = poisson(offered, self._warm_s + self._seconds, self._seed)

        async def work() -> None:
            client = Client(self._target)
            await runner.arriving(stage, client, iter(_asks(len(due))), due, len(due))
            client.close()

        run_loop(work)
        return self._goodput(stage), stage

    def _goodput(self, stage: Stage) -> float:
        wrong = [reply for reply in stage.replies if not proper(reply)]
        if wrong:
            count = f"{len(wrong)} of {len(stage.replies)}"
            raise RuntimeError(f"{count} were neither whole nor properly refused: {wrong[0].problem}")
        return goodput(stage.replies, stage.began_at + self._warm_s, self._seconds)


def proper(reply: Reply) -> bool:
    """Whether an answer is one that a server under load may give."""
    if reply.outcome == "refused":
        return reply.http.status == 529 and reply.retry_after_s is not None and reply.http.whole
    return reply.outcome == "complete" and reply.tokens == reply.ask.reply_tokens


def goodput(replies: Sequence[Reply], from_at: float, seconds: float) -> float:
    """Tokens per second of the whole replies among these, of those that came within the window."""
    whole = [reply for reply in replies if reply.outcome == "complete"]
    return sum(from_at <= at < from_at + seconds for reply in whole for at in reply.pieces) / seconds


def _refused(replies: Sequence[Reply]) -> list[Reply]:
    return [reply for reply in replies if reply.outcome == "refused"]


def _asks(count: int) -> list[Ask]:
    return scripts([script(count=TOKENS, rate=RATE)] * count, TOKENS)
