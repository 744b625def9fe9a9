"""Processes that a benchmark starts: a real broker, and peers that are told what to do line by line.

Owns their starting and ending; must never know what is measured. Invariant: everything started here ends with its
context manager, and a child whose benchmark was killed ends by itself (end of file on its stdin or its death pipe).
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import psutil

from common import runtime
from common.client import BrokerClient
from common.processes import DeathPipe, kill_session, python, spawn

# Longer than any single phase of a benchmark; a child that says nothing for so long is stuck.
ANSWER_S = 120.0


class Broker:
    """A broker of its own in a temporary runtime folder. Use as a context manager."""

    PORT = 8080  # names the folder only; a broker opens no port

    def __init__(self, **settings: object) -> None:
        self._settings = {f"MILLPOND_{name.upper()}": str(value) for name, value in settings.items()}

    def __enter__(self) -> "Broker":
        # Short: socket paths are limited.
        self._folder = tempfile.mkdtemp(prefix="mp-", dir="/tmp")
        self.place = runtime.runtime(self.PORT, self._folder)
        own = {"MILLPOND_RUNTIME": self._folder, "MILLPOND_PORT": str(self.PORT), "MILLPOND_LOG_LEVEL": "error"}
        self._pipe = DeathPipe()
        self._popen = spawn(python("-m", "broker"), {**plain_environment(), **own, **self._settings}, self._pipe)
        self.process = psutil.Process(self._popen.pid)
        runtime.create(self.place)
        with BrokerClient(self.place.front, "bench") as client:
            client.snapshot(20.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:
            kill_session(self._popen)
            self._popen.wait()
        self._pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def snapshot(self) -> dict[str, Any]:
        """What the broker says of itself."""
        with BrokerClient(self.place.front, "bench") as client:
            return client.snapshot(20.0)


class Child:
    """A process that takes one JSON command a line and answers each with one JSON line. Use as a context manager."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._popen = subprocess.Popen(
            python("-m", module, *arguments),
            env={**plain_environment(), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process = psutil.Process(self._popen.pid)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()

    def tell(self, **command: Any) -> None:
        """Give a command and do not wait."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command) + "\n")
        self._popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError when the child has ended instead."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.process.cmdline() or ['a child'])} ended: status {self._popen.wait()}")
        return dict(json.loads(line))

    def ask(self, **command: Any) -> dict[str, Any]:
        """tell() and answer()."""
        self.tell(**command)
        return self.answer()


def plain_environment() -> dict[str, str]:
    """Ours without Millpond's settings, so that a benchmark measures the defaults it names."""
    kept = ("MILLPOND_HOME",)
    return {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_") or name in kept}
