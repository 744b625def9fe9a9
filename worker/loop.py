"""The worker's main thread: takes work, steps the engine, posts what comes out.

The only thread that touches the engine. Every Work that it takes ends in exactly one DONE, unless its session ended first;
an engine whose step raises fails all its requests with a typed error and is rebuilt, so one fault never ends the process.
"""

import logging
import queue
import time
from collections.abc import Callable

from common import logs
from common.envelope import Done, Message, Started, Tokens, encode
from common.errors import ProtocolError
from common.histograms import Histogram
from common.generation import Piece, Summary, pack_pieces, pack_summary, unpack_request
from common.ids import RequestId
from common.outcomes import Outcome
from worker.engine import Committed, Ended, Engine, Prefilled, Unsupported
from worker.link import Halt, Item, Link, SessionOver, Vitals, Work
from worker.running import Finish, Running

# How often memory is read for REPORT: reading it is not free on every backend.
MEMORY_S = 0.5
# Longest sleep: leave() only sets an instant, and nothing rings for it.
LOOK_UP_S = 0.25


class WorkerLoop:
    """Runs an engine for a link until told to leave."""

    def __init__(
        self,
        engine: Engine,
        link: Link,
        vitals: Vitals,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        memory_budget: int = 0,
    ) -> None:
        """memory_budget: bytes that this worker may use, reported beside what it does; 0: not known."""
        self._engine = engine
        self._link = link
        self._vitals = vitals
        self._name = name
        self._clock = clock
        self._running: dict[RequestId, tuple[int, Running]] = {}
        self._posted: list[tuple[int, bytes, bytes]] = []
        self._memory_at = 0.0
        self._memory_budget = memory_budget
        self._inter_token = Histogram("inter_token")
        self.leave_at: float | None = None

    def leave(self, within_s: float) -> None:
        """Finish what runs, but not for longer than this; a second call ends at once. From a signal handler."""
        self.leave_at = self._clock() + (within_s if self.leave_at is None else 0.0)

    def run(self) -> bool:
        """Serve until leave(). True: nothing was cut."""
        said_goodbye = False
        while True:
            if self.leave_at is not None:
                if not said_goodbye:
                    said_goodbye = True
                    self._link.say_goodbye()
                if not self._running or self._clock() >= self.leave_at:
                    break
            self._take_items()
            # Before the step: a prompt's first chunk takes long, and its STARTED lets the client have its 200.
            self._flush()
            if self._engine.busy:
                self._step()
                self._flush()
            self._note_vitals()
        clean = not self._running
        for session, running in list(self._running.values()):
            self._engine.cancel(running.id)
            self._finish(session, running, [], running.finish(Outcome.SHUTDOWN, self._clock()))
        self._flush()
        return clean

    # -- what comes in

    def _take_items(self) -> None:
        """Everything that waits; sleeps for it while there is nothing to step."""
        timeout = min(self._engine.due_in(), LOOK_UP_S) if self._engine.busy else LOOK_UP_S
        try:
            item: Item = self._link.inbox.get(block=timeout > 0, timeout=timeout or None)
            while True:
                self._take(item)
                item = self._link.inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, item: Item) -> None:
        match item:
            case Work():
                self._start(item)
            case Halt():
                held = self._running.get(item.request)
                if held is not None and held[0] == item.session and held[1].attempt == item.attempt:
                    self._engine.cancel(item.request)
                    self._finish(*held, [], held[1].finish(Outcome.CANCELLED, self._clock()))
            case SessionOver():
                for id, (session, _) in list(self._running.items()):
                    if session <= item.session:
                        self._engine.cancel(id)
                        del self._running[id]

    def _start(self, work: Work) -> None:
        try:
            request = unpack_request(work.payload)
            lane = self._engine.lane_for(request)
            self._engine.start(work.request, request)
        except (Unsupported, ProtocolError) as error:
            logs.event("request refused", label=work.label, reason=str(error))
            self._post(
                work.session,
                Done(work.request, work.attempt, Outcome.UNSUPPORTED),
                pack_summary(Summary(error=str(error)[:200])),
            )
            return
        except Exception as error:
            # The engine could not even take it: this request fails, and the engine may be in any state.
            logging.getLogger("millpond").exception("the engine failed to start a request")
            self._post(
                work.session,
                Done(work.request, work.attempt, Outcome.ENGINE_FAILED),
                pack_summary(Summary(error=type(error).__name__)),
            )
            self._fail_all(error)
            return
        running = Running(work.request, work.attempt, work.label, request, lane, self._clock())
        self._running[work.request] = work.session, running
        self._post(work.session, Started(work.request, work.attempt, lane, self._name))

    # -- what goes out

    def _step(self) -> None:
        if self._vitals.busy_since is None:
            self._vitals.busy_since = self._clock()
        try:
            steps = self._engine.step()
        except Exception as error:
            logging.getLogger("millpond").exception("a step failed; all running requests end and the engine is rebuilt")
            self._fail_all(error)
            return
        now = self._clock()
        self._vitals.busy_since = now if self._engine.busy else None
        # A whole step's pieces for one request travel in one frame.
        pieces: dict[RequestId, list[Piece]] = {}
        finished: dict[RequestId, Finish] = {}
        committed: dict[RequestId, int] = {}
        for step in steps:
            held = self._running.get(step.request)
            if held is None or step.request in finished:
                continue
            running = held[1]
            match step:
                case Committed():
                    committed[step.request] = committed.get(step.request, 0) + 1
                    pieces.setdefault(step.request, []).extend(running.committed(step, now))
                    if running.halted:
                        self._engine.cancel(step.request)
                        finished[step.request] = running.finish(Outcome.STOP, now)
                case Ended():
                    last, finish = running.ended(step, now)
                    pieces.setdefault(step.request, []).extend(last)
                    finished[step.request] = finish
                case Prefilled():
                    running.prefilled(step, now)
        self._vitals.counters["completion_tokens"] += sum(committed.values())
        for id, count in committed.items():
            interval_s, times = self._running[id][1].stepped(count, now)
            if times:
                self._inter_token.observe(interval_s, times)
        for id, ready in pieces.items():
            if id not in finished:
                self._send_pieces(*self._running[id], ready)
        for id, finish in finished.items():
            self._finish(*self._running[id], pieces.get(id, []), finish)

    def _send_pieces(self, session: int, running: Running, pieces: list[Piece]) -> None:
        if pieces:
            self._post(session, Tokens(running.id, running.attempt, running.sequence), pack_pieces(pieces))
            running.sequence += 1

    def _finish(self, session: int, running: Running, pieces: list[Piece], finish: Finish) -> None:
        del self._running[running.id]
        self._send_pieces(session, running, pieces)
        summary = finish.summary
        done = Done(
            running.id,
            running.attempt,
            finish.outcome,
            summary.prompt_tokens,
            summary.cached_tokens,
            summary.completion_tokens,
        )
        self._post(session, done, pack_summary(summary))

    def _fail_all(self, error: Exception) -> None:
        for session, running in list(self._running.values()):
            self._finish(
                session, running, [], running.finish(Outcome.ENGINE_FAILED, self._clock(), type(error).__name__)
            )
        self._engine.rebuild()
        self._vitals.busy_since = None

    def _post(self, session: int, message: Message, payload: bytes = b"") -> None:
        self._posted.append((session, encode(message), payload))

    def _flush(self) -> None:
        # Once per turn: each hand-over wakes the link thread.
        if self._posted:
            self._link.post(self._posted)
            self._posted = []

    def _note_vitals(self) -> None:
        self._vitals.running = len(self._running)
        if not self._engine.busy:
            self._vitals.busy_since = None
        now = self._clock()
        if now >= self._memory_at:
            self._memory_at = now + MEMORY_S
            if any(self._inter_token.counts):
                self._vitals.histograms.append(("inter_token", self._inter_token.take()))
            self._vitals.memory = self._engine.memory() | {"budget": self._memory_budget}
