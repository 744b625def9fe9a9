"""`python -m worker.pool`: the supervisor of all workers of one port.

Plans, starts, watches and restarts worker processes and tells the broker their state; never touches a request. The decisions
are worker/supervision's; here are processes, pipes and the clock. Exit status 0 after SIGTERM, 1 when the first worker never
became ready (its last log lines are printed), 2 when settings or models cannot work.
"""

import dataclasses
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from common import changes, logs, runtime, settings, sockets
from common.client import TICK_S, Peer, Received, hello
from common.envelope import AdminReply, Goodbye, Order, PoolState
from common.errors import ConfigError
from common.models import check_folder
from common.processes import DeathPipe, end_with_parent, kill_session, python, spawn
from common.session import Joined
from worker.changes import Changes
from worker.layout import Layout, lay_out, seated
from worker.settings import WorkerSettings
from worker.supervision import Drain, Effect, GiveUp, Kill, Start, Supervision, Terminate, Told

STATE_S = 1.0


@dataclass
class Process:
    """A running child: its pipes and what is left of half lines."""

    popen: subprocess.Popen[bytes]
    rest: dict[int, bytes] = field(default_factory=dict)


class Pool:
    """The supervisor's shell."""

    def __init__(self, chosen: WorkerSettings, supervision: Supervision, layout: Layout) -> None:
        self._chosen = chosen
        self._core = supervision
        self._pipe = DeathPipe()
        self._processes: dict[str, Process] = {}
        self._selector = selectors.DefaultSelector()
        self._changed = True
        self._state_at = 0.0
        self._signals = 0
        self._status = 0
        self._kill_at: float | None = None
        context = sockets.context()
        self._context = context
        place = runtime.runtime(chosen.port, chosen.runtime)
        self._peer = Peer(context, place.back, hello("pool", "pool"))
        self._bell_read, bell_write = os.pipe()
        for end in (self._bell_read, bell_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(bell_write, warn_on_full_buffer=False)
        self._selector.register(self._bell_read, selectors.EVENT_READ, None)
        self._changes = Changes(chosen, supervision, layout, place, lambda: _ring(bell_write))
        self._watched = self._peer.socket
        self._watched_fd = self._peer.fileno()
        self._selector.register(self._watched_fd, selectors.EVENT_READ, None)

    def signalled(self) -> None:
        """SIGTERM: end the workers; again: kill them."""
        self._signals += 1

    def run(self) -> int:
        """Until told to end, or until there is no hope."""
        seen_signals = 0
        while True:
            now = time.monotonic()
            if self._signals > seen_signals:
                seen_signals = self._signals
                self._begin_stop(now, at_once=seen_signals > 1)
            if not self._core.stopping:
                self._carry_out(self._changes.advance(now))
            self._carry_out(self._core.tick(now))
            if self._core.stopping:
                if not self._core.living:
                    break
                if self._kill_at is not None and now >= self._kill_at:
                    self._kill_at = None
                    for process in self._processes.values():
                        kill_session(process.popen)
            self._wait(now)
            self._reap()
            self._speak()
        self._peer.send(Goodbye("ends"))
        self._peer.close()
        self._context.term()
        return self._status

    def _begin_stop(self, now: float, *, at_once: bool) -> None:
        # The workers have shutdown_timeout for what runs; after it they cut it themselves, and need a moment to say so.
        self._kill_at = now + (0.0 if at_once else self._chosen.shutdown_timeout + 5.0)
        if not self._core.stopping:
            self._carry_out(self._changes.abandon("the pool was told to end"))
            self._carry_out(self._core.stop())
            self._changed = True

    # -- processes

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._changed = True
            match effect:
                case Start(name):
                    self._start(name)
                case Kill(name):
                    logs.event("worker killed", logging.WARNING, worker=name)
                    kill_session(self._processes[name].popen)
                case Terminate(name):
                    self._processes[name].popen.terminate()
                case Drain(name):
                    self._processes[name].popen.send_signal(signal.SIGUSR1)
                case Told(question, done, text, final):
                    logs.event("change", done=int(done), final=int(final), text=text)
                    # Without a session the command asks again when it has one, and is answered then.
                    self._peer.send(AdminReply(question, done, text[:512], final))
                case GiveUp(name, code, lines):
                    self._status = 1
                    logs.event("the first worker never became ready", logging.ERROR, worker=name, exit=code)
                    reason = lines[-1] if lines else f"it ended with status {code} and said nothing"
                    print(f"millpond pool: worker {name} failed to start: {reason}", file=sys.stderr)
                    self._begin_stop(time.monotonic(), at_once=True)

    def _start(self, name: str) -> None:
        own = {settings.environment_name("worker_name"): name}
        environment = {**os.environ, **self._changes.environment(self._core.children[name].seat.key), **own}
        popen = spawn(
            python("-m", "worker"), environment, self._pipe, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process = Process(popen)
        self._processes[name] = process
        for stream in (popen.stdout, popen.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, name)
        self._core.started(name, popen.pid, time.monotonic())
        logs.event("worker started", worker=name, pid=popen.pid)

    def _reap(self) -> None:
        for name, process in list(self._processes.items()):
            code = process.popen.poll()
            if code is None:
                continue
            # What it started (a compiler) ends with it.
            kill_session(process.popen)
            for stream in (process.popen.stdout, process.popen.stderr):
                assert stream is not None
                self._read(name, stream.fileno())
                self._selector.unregister(stream)
                stream.close()
            del self._processes[name]
            self._changed = True
            level = logging.INFO if self._core.stopping else logging.WARNING
            logs.event("worker exited", level, worker=name, exit=code)
            self._carry_out(self._core.exited(name, code, time.monotonic()))

    def _read(self, name: str, descriptor: int) -> None:
        process = self._processes[name]
        try:
            while data := os.read(descriptor, 65536):
                *lines, rest = (process.rest.get(descriptor, b"") + data).split(b"\n")
                # A line without an end must not grow for ever.
                process.rest[descriptor] = rest[-65536:]
                for line in lines:
                    self._line(name, process, descriptor, line.decode("utf-8", "replace"))
        except BlockingIOError:
            return

    def _line(self, name: str, process: Process, descriptor: int, line: str) -> None:
        assert process.popen.stdout is not None
        if descriptor == process.popen.stdout.fileno():
            if line == "ready":
                self._core.ready(name)
                self._changed = True
            return
        self._core.said(name, line)
        print(line, file=sys.stderr, flush=True)

    # -- the outside

    def _wait(self, now: float) -> None:
        if self._watched is not self._peer.socket:
            # Compared by socket: the new one's descriptor may carry the old one's number.
            self._selector.unregister(self._watched_fd)
            self._watched, self._watched_fd = self._peer.socket, self._peer.fileno()
            self._selector.register(self._watched_fd, selectors.EVENT_READ, None)
        wake_at = min(now + TICK_S, self._core.next_at() or now + TICK_S)
        for key, _ in self._selector.select(max(0.0, wake_at - now)):
            if key.data is not None:
                self._read(key.data, key.fd)
            elif key.fd == self._bell_read:
                os.read(self._bell_read, 4096)

    def _speak(self) -> None:
        while True:
            for event in self._peer.pump():
                if isinstance(event, Joined):
                    self._changed = True
                elif isinstance(event, Received) and isinstance(event.message, Order):
                    self._obey(event.message)
            if not self._peer.backlog():
                break
        now = time.monotonic()
        if self._peer.live and (self._changed or now - self._state_at >= STATE_S):
            self._changed = False
            self._state_at = now
            self._peer.send(PoolState(self._core.model_plans(), self._core.child_rows()))

    def _obey(self, order: Order) -> None:
        logs.event("order", logging.WARNING, action=order.action, target=order.target, reason=order.reason)
        match order.action:
            case "kill":
                self._carry_out(self._core.kill(order.target, order.count))
            case _ if not self._core.stopping:
                self._carry_out(self._changes.obey(order, time.monotonic()))


def _ring(bell: int) -> None:
    try:
        os.write(bell, b"!")
    except BlockingIOError:
        return  # full: it rings already


def main() -> int:
    """Plan, then supervise."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        chosen = settings.load(WorkerSettings, os.environ)
        place = runtime.runtime(chosen.port, chosen.runtime)
        runtime.create(place)
        logs.start("pool", chosen.log_level, chosen.log_format, place.logs)
        changed = changes.read(place)
        chosen = dataclasses.replace(chosen, model=changed.models(chosen.model))
        if changed.workers:
            chosen = dataclasses.replace(chosen, workers=list(changed.workers.items()))
        for model in chosen.model:
            check_folder(model)
        layout = lay_out(chosen, 0)
    except ConfigError as error:
        print(f"millpond pool: {error}", file=sys.stderr)
        return 2
    pool = Pool(chosen, seated(layout), layout)
    signal.signal(signal.SIGTERM, lambda *_: pool.signalled())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to ring the wakeup descriptor
    return pool.run()


if __name__ == "__main__":
    sys.exit(main())
