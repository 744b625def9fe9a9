"""The worker's main thread: takes work, steps the engine, posts what comes out.

The only thread that touches the engine. Every Work that it takes ends in exactly one DONE, unless its session ended
first, and its row is released once on every way out. An engine whose step raises fails all its requests with a typed
error and is rebuilt, so one fault never ends the process; an engine that cannot be rebuilt does, and the pool starts
another.
"""

import logging
import queue
import time
from collections.abc import Callable

from common import logs
from common.envelope import Done, Message, Started, encode
from common.errors import ProtocolError
from common.histograms import Histogram
from common.generation import Piece, Summary, pack_summary, unpack_request
from common.ids import RequestId
from common.outcomes import Outcome
from worker import placement
from worker.engine import Committed, Ended, Engine, Prefilled, Unsupported
from worker.link import Halt, Item, Link, SessionOver, Vitals, Work
from worker.running import Finish, Running
from worker.seat import Seat

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
        self._running: dict[RequestId, Seat] = {}
        self._posted: list[tuple[int, bytes, bytes]] = []
        self._step_s = 0.0
        # What went wrong while a row was released; the engine is in no known state then.
        self._broken: Exception | None = None
        self._memory_at = 0.0
        self._memory_budget = memory_budget
        self._inter_token = Histogram("inter_token")
        self.leave_at: float | None = None
        self.draining = False

    def leave(self, within_s: float) -> None:
        """Finish what runs, but not for longer than this; a second call ends at once. From a signal handler."""
        self.leave_at = self._clock() + (within_s if self.leave_at is None else 0.0)

    def drain(self) -> None:
        """Take nothing new and leave when what runs has ended, however long that takes. From a signal handler."""
        self.draining = True

    def run(self) -> bool:
        """Serve until leave() or drain(). True: nothing was cut."""
        said_goodbye = False
        while True:
            if self.leave_at is not None or self.draining:
                if not said_goodbye:
                    said_goodbye = True
                    self._link.say_goodbye()
                if not self._running or (self.leave_at is not None and self._clock() >= self.leave_at):
                    break
            self._take_items()
            # Before the step: a prompt's first chunk takes long, and its STARTED lets the client have its 200.
            self._flush()
            if self._engine.busy:
                self._step()
                self._flush()
            self._note_vitals()
        clean = not self._running
        for seat in list(self._running.values()):
            self._end(seat, Outcome.SHUTDOWN)
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
                self._mend()
                item = self._link.inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, item: Item) -> None:
        match item:
            case Work():
                self._start(item)
            case Halt():
                seat = self._running.get(item.request)
                if seat is not None and seat.session == item.session and seat.running.attempt == item.attempt:
                    self._end(seat, Outcome.CANCELLED)
            case SessionOver():
                for id, seat in list(self._running.items()):
                    if seat.session <= item.session:
                        self._release(seat)
                        del self._running[id]

    def _start(self, work: Work) -> None:
        try:
            plan = placement.plan(unpack_request(work.payload), self._engine.facts, bool(self._running))
            request = plan.begin()
            # The engine has the last word: it also knows what of its lanes is free now, and its vocabulary.
            lane = self._engine.lane_for(request)
            markup = self._engine.facts.markup
            reasons = plan.reasons if lane == plan.lane else (*plan.reasons, f"{lane}: the engine's choice")
            running = Running(work.request, work.attempt, work.label, request, lane, self._clock(), markup, reasons)
            self._engine.start(work.request, request)
        except (Unsupported, ProtocolError) as error:
            logs.event("request refused", label=work.label, reason=str(error))
            # The need alone: the API names the field that asked for it.
            need = str(error).partition(":")[0] if isinstance(error, Unsupported) else ""
            self._post_end(work, Outcome.UNSUPPORTED, need[:200])
            return
        except Exception as error:
            # The engine could not even take it: this request fails, and the engine may be in any state.
            logging.getLogger("millpond").exception("the engine failed to start a request")
            self._post_end(work, Outcome.ENGINE_FAILED, type(error).__name__)
            self._fail_all(error)
            return
        logs.event("started", logging.DEBUG, label=work.label, lane=lane, reasons="; ".join(reasons))
        self._running[work.request] = Seat(work.session, running, plan)
        self._post(work.session, Started(work.request, work.attempt, lane, self._name))
        # Its prompt may take long to read.
        self._send_waiting()

    def _post_end(self, work: Work, outcome: Outcome, error: str) -> None:
        """The end of a request that never ran."""
        self._post(work.session, Done(work.request, work.attempt, outcome), pack_summary(Summary(error=error)))

    # -- what goes out

    def _step(self) -> None:
        if self._vitals.busy_since is None:
            self._vitals.busy_since = self._clock()
        began = self._clock()
        try:
            steps = self._engine.step()
        except Exception as error:
            logging.getLogger("millpond").exception("a step failed; all running requests end and the engine is rebuilt")
            self._fail_all(error)
            return
        now = self._clock()
        self._step_s = now - began
        self._vitals.busy_since = now if self._engine.busy else None
        committed: dict[RequestId, int] = {}
        for step in steps:
            seat = self._running.get(step.request)
            if seat is None:
                continue
            match step:
                case Committed():
                    committed[step.request] = committed.get(step.request, 0) + 1
                    seat.keep(seat.running.committed(step, now), now)
                    if seat.running.halted:
                        self._note_tokens(seat, committed.pop(step.request), now)
                        self._end(seat, Outcome.STOP)
                case Ended():
                    self._note_tokens(seat, committed.pop(step.request, 0), now)
                    # The engine let go of it by itself.
                    seat.plan.release()
                    self._finish(seat, *seat.running.ended(step, now))
                case Prefilled():
                    seat.running.prefilled(step, now)
        for id, count in committed.items():
            self._note_tokens(self._running[id], count, now)
        self._mend()
        self._send_due(now)

    def _note_tokens(self, seat: Seat, count: int, now: float) -> None:
        if not count:
            return
        self._vitals.counters["completion_tokens"] += count
        interval_s, times = seat.running.stepped(count, now)
        if times:
            self._inter_token.observe(interval_s, times)

    def _send_due(self, now: float) -> None:
        """Send what may not wait for the next step: its first piece, and what would then have waited too long."""
        if self._engine.facts.block > 1 or not self._engine.busy or not all(seat.running.decoding for seat in self._running.values()):
            # A prompt that is being read makes the next step as long as it likes; a block is a frame.
            self._send_waiting()
            return
        next_at = now + max(self._engine.due_in(), self._step_s)
        for seat in self._running.values():
            if seat.due(next_at):
                self._post(seat.session, *seat.frame())

    def _send_waiting(self) -> None:
        for seat in self._running.values():
            if seat.pieces:
                self._post(seat.session, *seat.frame())

    # -- how it ends

    def _end(self, seat: Seat, outcome: Outcome) -> None:
        """End a request that the engine still has."""
        trouble = self._release(seat)
        error = f"{trouble} while releasing" if trouble else ""
        self._finish(seat, *seat.running.finish(outcome, self._clock(), error))

    def _release(self, seat: Seat) -> str:
        """Give back what the request holds of the engine, once; the type name of what went wrong."""
        if not seat.plan.release():
            return ""
        try:
            self._engine.cancel(seat.running.id)
        except Exception as error:
            logging.getLogger("millpond").exception("the engine failed to release a request")
            self._broken = self._broken or error
            return type(error).__name__
        return ""

    def _finish(self, seat: Seat, pieces: list[Piece], finish: Finish) -> None:
        running, summary = seat.running, finish.summary
        del self._running[running.id]
        self._vitals.counters["accepted_draft_tokens"] += summary.accepted_draft_tokens
        self._vitals.counters["rejected_draft_tokens"] += summary.rejected_draft_tokens
        seat.keep(pieces, 0.0)
        if seat.pieces:
            self._post(seat.session, *seat.frame())
        done = Done(
            running.id,
            running.attempt,
            finish.outcome,
            summary.prompt_tokens,
            summary.cached_tokens,
            summary.completion_tokens,
        )
        self._post(seat.session, done, pack_summary(summary))

    def _mend(self) -> None:
        if self._broken is not None:
            self._fail_all(self._broken)

    def _fail_all(self, error: Exception) -> None:
        """End all requests with this error and rebuild the engine; what goes wrong then is told beside it."""
        self._broken = None
        name, second = type(error).__name__, None
        try:
            self._engine.rebuild()
        except Exception as another:
            logging.getLogger("millpond").exception("the engine cannot be rebuilt; this process ends")
            name, second = f"{name}, then {type(another).__name__} while rebuilding", another
        for seat in list(self._running.values()):
            seat.plan.release()
            self._finish(seat, *seat.running.finish(Outcome.ENGINE_FAILED, self._clock(), name))
        self._vitals.busy_since = None
        if second is not None:
            self._flush()
            self._link.close()
            raise second from error

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
