"""A real instance on a free port, for system tests, benchmarks and chaos.

Starts `millpond serve` as a user would, in a runtime folder and a session of its own, keeps its output, and ends everything
that it started by pid, also when the test fails. Waiting is for conditions, never for a time.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from common import runtime
from common.client import BrokerClient
from common.processes import DEATH_PIPE, DeathPipe


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "") -> Any:
    """The first true value of `condition`. Raises AssertionError that names it."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition.__name__}")
        time.sleep(0.01)


def script(**what: Any) -> str:
    """A user message that tells the scripted engine what to say."""
    return "@script " + json.dumps(what)


class Harness:
    """One `millpond serve`. Use as a context manager."""

    def __init__(
        self,
        *flags: str,
        model: Path | None = None,
        environment: dict[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> None:
        """program: what is started in place of this interpreter's `millpond serve`, such as scripts/serve."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Short: socket paths are limited, and pytest's folders are long.
        self.folder = tempfile.mkdtemp(prefix="mp-", dir="/tmp")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_") or name == "MILLPOND_HOME"}
        self.environment = inherited | {"MILLPOND_RUNTIME": self.folder} | (environment or {})
        self.program = list(program) or [sys.executable, "-m", "scripts.millpond", "serve"]
        self.flags = ["--port", str(self.port), *(["--model", f"m={model}"] if model else []), *flags]
        self.lines: list[str] = []
        # A test run that is killed takes its instances with it.
        self._pipe = DeathPipe()
        self.process: subprocess.Popen[str] | None = None

    @property
    def place(self) -> runtime.Runtime:
        """The instance's runtime folder."""
        return runtime.runtime(self.port, self.folder)

    def __enter__(self) -> "Harness":
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start and return at once."""
        self.process = subprocess.Popen(
            [*self.program, *self.flags],
            env=self.environment | {DEATH_PIPE: str(self._pipe.read_end)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(self._pipe.read_end,),
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            self.lines.extend(process.stdout)

    @property
    def output(self) -> str:
        """All that it printed so far."""
        return "".join(self.lines)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Until it says that it is ready. Raises AssertionError with its output when it ends before."""

        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            return "Millpond is ready" in self.output

        try:
            wait_for(ready, timeout_s, "ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    # -- processes

    def all_processes(self) -> list[psutil.Process]:
        """Every living process of this instance, by its environment: also those whose parent is gone."""
        found = []
        for process in psutil.process_iter():
            try:
                variables = process.environ()
                if variables.get("MILLPOND_RUNTIME") == self.folder and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # gone, or not ours
        return found

    def processes(self, kind: str) -> list[psutil.Process]:
        """serve, broker, pool, api (gunicorn's workers), gunicorn (its master) or worker."""
        found = []
        for process in self.all_processes():
            try:
                line = " ".join(process.cmdline())
                parent = process.ppid()
            except psutil.Error:
                continue
            if "gunicorn" in line:
                master = not any("gunicorn" in " ".join(p.cmdline()) for p in process.parents()[:1])
                name = "gunicorn" if master else "api"
            else:
                words = {"serve": "scripts.millpond", "broker": "-m broker", "pool": "-m worker.pool", "worker": "-m worker"}
                name = next((key for key, word in words.items() if line.endswith(word) or (key == "serve" and word in line)), "")
            if name == kind and parent is not None:
                found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def signal(self, number: int) -> None:
        """Signal `serve`."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait_end(self, timeout_s: float = 60.0) -> int:
        """Until it has ended; the exit status."""
        assert self.process is not None
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None
        self._reader.join(10)
        return status

    def kill(self) -> None:
        """End everything that is left, by pid."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in self.all_processes():
            try:
                process.kill()
            except psutil.Error:
                continue
        self._reader.join(10)
        self._pipe.close()

    # -- questions

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`millpond ARGUMENTS` against this instance."""
        return subprocess.run(
            [sys.executable, "-m", "scripts.millpond", *arguments, "--port", str(self.port)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def plan(self) -> dict[str, Any]:
        """`millpond plan --json` with the flags of this instance, running or not."""
        program = [sys.executable, "-m", "scripts.millpond", "plan", "--json", *self.flags]
        done = subprocess.run(program, env=self.environment, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        return self._http(urllib.request.Request(self.url + path), timeout_s)

    def chat(self, content: str, timeout_s: float = 60.0, **fields: Any) -> tuple[int, Any]:
        """Status and JSON of a whole chat."""
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return self._http(request, timeout_s)

    def _http(self, request: urllib.request.Request, timeout_s: float) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def snapshot(self) -> dict[str, Any]:
        """The broker's snapshot, asked of the broker itself."""
        with BrokerClient(self.place.front, "harness") as client:
            return client.snapshot(10.0)

    def idle(self) -> bool:
        """Whether no place and no slot is taken."""
        snapshot = self.snapshot()
        queue = snapshot["queue"]
        return not (queue["waiting"] or queue["reserved"] or queue["running"]) and not any(
            worker["running"] for worker in snapshot["workers"]
        )
