"""One running instance: broker, pool and API as children of this process.

Starts them, waits until a chat can be answered, says so once, restarts whichever dies later, and ends them in the order in
which requests flow: the API drains first, then the workers, the broker last. Until the instance was ready once, any child's
end is the instance's: a setting that cannot work is reported, not retried.
"""

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common import logs
from common.client import BrokerClient, NoBroker
from common.processes import DeathPipe, end_with_parent, kill_session, python, spawn
from common.runtime import Runtime
from scripts.banner import banner

# Restarts of a dead part: at once, then doubling; a part that lived for a minute starts over.
BACKOFF_FIRST_S, BACKOFF_MOST_S, STEADY_S = 0.1, 10.0, 60.0
POLL_S = 0.1
# What a part needs beyond the drain to end by itself: gunicorn's arbiter polls once a second, workers close their device.
MARGIN_S = 8.0


@dataclass
class Part:
    """One child process over its restarts."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    in_a_row: int = 0


class Instance:
    """The process group of `millpond serve`."""

    def __init__(
        self, environment: Mapping[str, str], place: Runtime, host: str, port: int, shutdown_timeout_s: float
    ) -> None:
        self._environment = environment
        self._place = place
        self._host, self._port = host, port
        self._shutdown_timeout_s = shutdown_timeout_s
        self._pipe = DeathPipe()
        self._signals = 0
        self._parts = [
            Part("broker", python("-m", "broker")),
            Part("pool", python("-m", "worker.pool")),
            Part("api", python("-m", "gunicorn", "-c", "python:api.gunicorn_conf", "api.app:create_app()")),
        ]

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM. 0: nothing was cut; 1: something was, or a part could not start; 2: settings."""
        end_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        level, form = (self._environment.get(f"MILLPOND_LOG_{name}", default) for name, default in (("LEVEL", "info"), ("FORMAT", "text")))
        # Those of API processes carry pids; the earlier instance's would stay for ever.
        for old in self._place.logs.glob("api-*.log*"):
            old.unlink(missing_ok=True)
        # A new life begins with its settings.
        self._place.changes.unlink(missing_ok=True)
        logs.start("serve", level, form, self._place.logs)
        status = 0
        try:
            ready = False
            for part in self._parts:
                self._start(part)
            while not self._signals:
                failed = self._watch(ready)
                if failed is not None:
                    status = failed
                    break
                if not ready and self._answers_ready():
                    ready = True
                    self._announce()
                time.sleep(POLL_S)
            cut = self._end()
            return status or (1 if cut else 0)
        finally:
            for part in self._parts:
                if part.process is not None and part.process.poll() is None:
                    kill_session(part.process)
                    part.process.wait()

    def _signalled(self, *_: object) -> None:
        self._signals += 1

    # -- parts

    def _start(self, part: Part) -> None:
        part.process = spawn(part.command, self._environment, self._pipe)
        part.started_at = time.monotonic()

    def _watch(self, ready: bool) -> int | None:
        """Restart what died. Before the instance was ready: the status that it ends with."""
        now = time.monotonic()
        for part in self._parts:
            if part.process is None:
                if now >= part.restart_at:
                    self._start(part)
                continue
            code = part.process.poll()
            if code is None:
                continue
            kill_session(part.process)
            part.process = None
            if not ready:
                logs.event(f"{part.name} ended before the instance was ready", exit=code)
                return code if code in (1, 2) else 1
            lived = now - part.started_at
            part.in_a_row = 0 if lived > STEADY_S else part.in_a_row + 1
            wait = 0.0 if part.in_a_row <= 1 else min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2**part.in_a_row)
            part.restart_at = now + wait
            logs.event(f"{part.name} died and is restarted", exit=code, lived_s=lived, wait_s=wait)
        return None

    # -- ready

    def _answers_ready(self) -> bool:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        connection = http.client.HTTPConnection(host, self._port, timeout=2)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()

    def _announce(self) -> None:
        snapshot = self._ask(lambda client: client.snapshot())
        if snapshot is not None:
            print(banner(self._host, self._port, snapshot), flush=True)

    def _ask(self, question: Callable[[BrokerClient], Any]) -> Any:
        try:
            with BrokerClient(self._place.front, "serve") as client:
                return question(client)
        except NoBroker:
            return None

    # -- the end

    def _end(self) -> bool:
        """Drain and stop everything, in order. True: something was cut."""
        logs.event("ending; again to end at once")
        seen = self._signals
        self._ask(lambda client: client.admin("drain", timeout_s=1.0))
        cut = False
        for name in ("api", "pool", "broker"):
            (part,) = (part for part in self._parts if part.name == name)
            cut |= self._stop(part, seen)
        return cut

    def _stop(self, part: Part, seen: int) -> bool:
        process = part.process
        if process is None or process.poll() is not None:
            return False
        process.terminate()
        deadline = time.monotonic() + self._shutdown_timeout_s + MARGIN_S
        while process.poll() is None:
            if self._signals > seen or time.monotonic() > deadline:
                kill_session(process)
                process.wait()
                return True
            time.sleep(0.02)
        # Whatever it left in its session (a gunicorn worker that outlived its master) ends too.
        kill_session(process)
        return process.returncode not in (0, None)
