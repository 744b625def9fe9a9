"""Steady streams whose tokens say when they were due and when they were made, and how late a client had them.

Owns their opening, the window that counts and the judgement; what a level is held for is its caller's. The client keeps
only bytes and instants while streams flow and reads them afterwards, because its CPU is the server's on this machine.
Invariant: a stream counts as whole only if every token that was asked for came once, in order, with the proper end.
"""

import asyncio
import random
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import psutil

from scripts.bench.load import MODEL
from scripts.bench.load import run as run_loop
from scripts.bench.meter import CpuMeter
from scripts.harness import Harness, script
from scripts.loadtest.client import Target
from scripts.loadtest.figures import percentile
from scripts.loadtest.plan import Ask
from scripts.loadtest.reply import Reply

RATE = 20
# A request costs as much as some dozens of tokens, so opening is kept to a fraction of the machine.
OPENED_PER_S = 100.0
# From the last opening to the window.
SETTLE_S = 2.0
# From the window's end to the streams' own: no stream ends within the window.
REST_S = 0.5
# What is not whole so long after its end never will be.
GRACE_S = 10.0
END = b"0\r\n\r\n"
STAMP = re.compile(rb" (\d+):(\d+)")


@dataclass
class Level:
    """So many streams, held for a window of `seconds`. shares: of one core, by kind of process, within the window.

    In µs, sorted, of the tokens that were due within it: late, from due to read by the client; made_late, from due to
    made by the engine; carried, from made to read. problems: why streams were not whole, or not open in time.
    """

    streams: int
    seconds: float
    shares: dict[str, float] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    made_late: list[int] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """That were due within the window and came."""
        return len(self.late) / self.seconds

    def late_ms(self, share: float) -> float:
        """A percentile of what the client had late."""
        return percentile(self.late, share) / 1000

    def made_late_ms(self, share: float) -> float:
        """A percentile of what the engines made late."""
        return percentile(self.made_late, share) / 1000

    def carried_ms(self, share: float) -> float:
        """A percentile of the way from engine to client."""
        return percentile(self.carried, share) / 1000


class StampedReply(Reply):
    """A reply whose stamps are kept: (due, made, read), µs."""

    def __init__(self, ask: Ask, sent_at: float) -> None:
        super().__init__(ask, sent_at, sent_at)
        self.stamps: list[tuple[int, int, int]] = []

    def _take(self, data: bytes, now: float) -> None:
        super()._take(data, now)
        read = int(now * 1e6)
        self.stamps += [(int(due), int(made), read) for due, made in STAMP.findall(data)]

    def fault(self) -> str:
        """Why it is not what was asked for; "" if it is."""
        dues = [due for due, _, _ in self.stamps]
        if self.outcome != "complete":
            return self.problem or self.outcome
        if not self.tokens == len(dues) == self.ask.reply_tokens:
            return f"{self.ask.reply_tokens} tokens asked for, {self.tokens} counted, {len(dues)} came"
        return "" if all(a < b for a, b in pairwise(dues)) else "tokens out of order"


class Stream(asyncio.Protocol):
    """One stream on a connection of its own, kept as it came."""

    def __init__(self, request: bytes, ended: asyncio.Semaphore) -> None:
        self._request, self._ended = request, ended
        self._transport: asyncio.BaseTransport | None = None
        self._tail = b""
        self.sent_at = 0.0
        self.at: array[float] = array("d")
        self.data: list[bytes] = []
        self.over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.sent_at = time.monotonic()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.at.append(time.monotonic())
        self.data.append(data)
        self._tail = data if len(data) >= len(END) else (self._tail + data)[-len(END) :]
        # An event ends with bare newlines, so only the last chunk ends like this.
        if self._tail.endswith(END):
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        """Close; counted once."""
        if not self.over:
            self.over = True
            self._ended.release()
            if self._transport is not None:
                self._transport.close()

    def read(self, ask: Ask) -> StampedReply:
        """What came, judged."""
        reply = StampedReply(ask, self.sent_at)
        for at, data in zip(self.at, self.data, strict=True):
            reply.feed(data, at)
        reply.end(self.at[-1] if self.at else self.sent_at)
        return reply


def hold(harness: Harness, streams: int, seconds: float, seed: int = 0) -> Level:
    """Open so many streams, keep them all flowing for a window of so long, and judge them."""
    return run_loop(lambda: _hold(harness, streams, seconds, random.Random(seed)))


async def _hold(harness: Harness, streams: int, seconds: float, chance: random.Random) -> Level:
    target = Target(harness.url, MODEL)
    ended = asyncio.Semaphore(0)
    meters = {kind: CpuMeter(*processes) for kind, processes in kinds(harness).items()}
    began_at = time.monotonic()
    from_at = began_at + streams / OPENED_PER_S + SETTLE_S
    until_at = from_at + seconds
    opened: list[tuple[Ask, Stream]] = []
    problems: list[str] = []
    for number in range(streams):
        await _until(began_at + number / OPENED_PER_S)
        # Whatever the openings' beat, tokens come spread over the whole interval, as streams of many users do.
        phase = chance.random() / RATE
        count = int((until_at + REST_S - time.monotonic()) * RATE)
        ask = Ask(number, script(count=count, rate=RATE, delay_s=phase, stamp=True), count)
        try:
            opened.append((ask, await _opened(target, ask, ended)))
        except OSError as error:
            problems.append(f"no connection: {error}")
    await _until(from_at)
    unopened = sum(len(stream.at) < 2 for _, stream in opened)
    for meter in meters.values():
        meter.start()
    client_cpu = time.process_time()
    await _until(until_at)
    shares = {kind: meter.read().share for kind, meter in meters.items()}
    shares["client"] = (time.process_time() - client_cpu) / (time.monotonic() - from_at)
    try:
        async with asyncio.timeout(REST_S + GRACE_S):
            for _ in opened:
                await ended.acquire()
    except TimeoutError:
        problems.append("streams that never ended")
    for _, stream in opened:
        stream.close()
    if unopened:
        problems.append(f"{unopened} streams not open before the window")
    replies = [stream.read(ask) for ask, stream in opened]
    return judged(Level(streams, seconds, shares, problems=problems), replies, from_at, until_at)


async def _opened(target: Target, ask: Ask, ended: asyncio.Semaphore) -> Stream:
    request, loop = target.request(ask), asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(request, ended), target.host, target.port)
    return stream


def judged(level: Level, replies: Sequence[StampedReply], from_at: float, until_at: float) -> Level:
    """`level` with what its replies say of the window."""
    first, last = from_at * 1e6, until_at * 1e6
    for reply in replies:
        if fault := reply.fault():
            level.problems.append(fault)
        for due, made, read in reply.stamps:
            if first <= due < last:
                level.late.append(read - due)
                level.made_late.append(made - due)
                level.carried.append(read - made)
    for values in (level.late, level.made_late, level.carried):
        values.sort()
    return level


def kinds(harness: Harness) -> Mapping[str, Sequence[psutil.Process]]:
    """The processes on a token's way, as a table names them."""
    apis = {f"API {number}": [process] for number, process in enumerate(harness.processes("api"), 1)}
    return apis | {"broker": harness.processes("broker"), "workers": harness.processes("worker")}


async def _until(at: float) -> None:
    left = at - time.monotonic()
    if left > 0:
        await asyncio.sleep(left)
