"""The ends of an instance: graceful, timed out, hurried, reloaded."""

import os
import signal
import time
from pathlib import Path

import pytest

from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted
from tests.system.streams import Stream

pytestmark = [pytest.mark.system, pytest.mark.slow]

ENDLESS = script(count=100_000, rate=50)


def test_what_outlives_the_timeout_is_cut_as_a_failure_and_the_status_says_so(tiny_model: Path) -> None:
    with scripted(tiny_model, "--shutdown-timeout", "1") as harness:
        endless, short = Stream(harness, ENDLESS).flowing(), Stream(harness, script(count=10, rate=50)).flowing()
        harness.signal(signal.SIGTERM)
        assert short.over().whole
        assert endless.over().failed and endless.error["type"] == "api_error"
        assert harness.wait_end(30) == 1, harness.output
        assert not harness.all_processes()


def test_while_draining_new_requests_are_refused_and_running_ones_finish(tiny_model: Path) -> None:
    with scripted(tiny_model) as harness:
        running = Stream(harness, script(count=100, rate=40)).flowing()
        waiting_connection = Stream(harness, script(count=100, rate=40)).flowing()
        harness.signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                return harness.chat("hello", timeout_s=5)[0] == 503
            except OSError:
                return True  # the listening socket is closed already

        wait_for(refused, 10, "refusing")
        assert running.over().whole and waiting_connection.over().whole
        assert harness.wait_end(30) == 0, harness.output


def test_a_second_signal_ends_at_once(tiny_model: Path) -> None:
    with scripted(tiny_model) as harness:
        stream = Stream(harness, ENDLESS).flowing()
        harness.signal(signal.SIGINT)
        wait_for(lambda: "ending" in harness.output, 10, "noticed")
        began = time.monotonic()
        harness.signal(signal.SIGINT)
        assert harness.wait_end(20) == 1, harness.output
        assert time.monotonic() - began < 15
        assert not stream.over().whole and not harness.all_processes()


def test_gunicorn_reload_keeps_open_streams(tiny_model: Path) -> None:
    with scripted(tiny_model) as harness:
        stream = Stream(harness, script(count=60, rate=30)).flowing()
        (master,), (old,) = harness.processes("gunicorn"), harness.processes("api")
        asked = [Stream(harness, script(count=2, rate=100))]
        os.kill(master.pid, signal.SIGHUP)
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            # One after the other, each on a connection of its own: nobody may notice the change.
            asked.append(Stream(harness, script(count=2, rate=100)).over())
        assert len(asked) > 10 and all(one.over().whole for one in asked), [one.__dict__ for one in asked if not one.whole]

        def replaced() -> bool:
            return any(process.pid != old.pid for process in harness.processes("api"))

        wait_for(replaced, 15, "a new api process")

        def answers() -> bool:
            try:
                return harness.chat(script(count=2))[0] == 200
            except OSError:
                return False

        wait_for(answers, 15, "answers")
        assert stream.over().whole and stream.pieces == 60
        wait_for(harness.idle, 10, "idle")


def test_an_idle_instance_with_silent_connections_ends_promptly(tiny_model: Path) -> None:
    import socket

    with scripted(tiny_model) as harness:
        silent = [socket.create_connection(("127.0.0.1", harness.port)) for _ in range(3)]
        silent[1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        wait_for(lambda: harness.get("/health")[0] == 200, 5, "serving")
        began = time.monotonic()
        harness.signal(signal.SIGTERM)
        assert harness.wait_end(30) == 0, harness.output
        assert time.monotonic() - began < 15
        for one in silent:
            one.close()


def test_an_api_process_that_recycles_itself_keeps_its_open_streams(tiny_model: Path) -> None:
    with scripted(tiny_model, GUNICORN_CMD_ARGS="--max-requests 5") as harness:
        (old,) = harness.processes("api")
        stream = Stream(harness, script(count=120, rate=30)).flowing()

        def recycled() -> bool:
            try:
                harness.get("/health", timeout_s=3)
            except OSError:
                return True  # with one process nobody listens while it ends
            return old.pid not in [process.pid for process in harness.processes("api")]

        wait_for(recycled, 15, "recycled")
        assert stream.over().whole and stream.pieces == 120

        def answers() -> bool:
            try:
                return harness.chat(script(count=2))[0] == 200
            except OSError:
                return False

        wait_for(answers, 20, "answers")
        wait_for(harness.idle, 10, "idle")


def test_what_a_reload_has_cut_is_not_held_against_the_end(tiny_model: Path) -> None:
    with scripted(tiny_model, "--shutdown-timeout", "1") as harness:
        stream = Stream(harness, ENDLESS).flowing()
        os.kill(harness.processes("gunicorn")[0].pid, signal.SIGHUP)
        assert stream.over().failed
        wait_for(harness.idle, 10, "idle")
        harness.signal(signal.SIGTERM)
        assert harness.wait_end(30) == 0, harness.output
