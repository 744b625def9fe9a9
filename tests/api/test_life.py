"""The API process's own life: health, the broker's absence, the end."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.envelope import Cancel, Goodbye, Refused, Report, Submit
from tests.api.conftest import Server, http_request, read_all, read_until, wait_until
from tests.api.fake_broker import FakeBroker, only_reserve, ready_snapshot, start_and_wait, words

pytestmark = pytest.mark.system
MakeServer = Callable[..., Server]


def worker_of(server: Server) -> Path:
    """The folder in /proc of the one gunicorn worker."""
    parent = f"PPid:\t{server.process.pid}\n"
    return next(path for path in Path("/proc").glob("[0-9]*") if parent in (path / "status").read_text())


def test_models_are_listed_with_what_the_broker_knows(server: Server) -> None:
    status, _, body = server.get("/v1/models")
    listed = json.loads(body)
    assert status == 200 and listed["object"] == "list"
    (entry,) = listed["data"]
    assert (entry["id"], entry["object"], entry["context_length"], entry["state"]) == ("tiny", "model", 4096, "ready")
    assert entry["lanes"] == ["batched"] and isinstance(entry["created"], int) and entry["owned_by"] == "millpond"
    assert json.loads(server.get("/v1/models/tiny")[2]) == entry
    status, _, body = server.get("/v1/models/other/one")
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


def test_a_model_without_workers_stays_listed(server: Server, broker: FakeBroker) -> None:
    broker.snapshot = ready_snapshot() | {"models": [], "workers": []}
    (entry,) = json.loads(server.get("/v1/models")[2])["data"]
    assert (entry["id"], entry["state"]) == ("tiny", "none")


def test_the_pool_is_the_brokers_snapshot(server: Server, broker: FakeBroker) -> None:
    assert json.loads(server.get("/v1/pool")[2]) == broker.snapshot


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"draining": True}, "draining"),
        ({"workers": []}, "there is none"),
        ({"state": "loading"}, "demo-0 loading"),
        ({"state": "draining"}, "demo-0 draining"),
        ({"step_age_ms": 500_000}, "no worker is ready"),
    ],
)
def test_ready_needs_a_worker_that_is_ready_and_steps(
    server: Server, broker: FakeBroker, change: dict[str, object], cause: str
) -> None:
    assert server.get("/health/ready")[0] == 200
    snapshot = ready_snapshot()
    of_worker = {name: value for name, value in change.items() if name in snapshot["workers"][0]}  # type: ignore[index]
    snapshot["workers"][0].update(of_worker)  # type: ignore[index]
    broker.snapshot = snapshot | {name: value for name, value in change.items() if name not in of_worker}
    status, _, body = server.get("/health/ready")
    assert status == 503 and cause in json.loads(body)["error"]["message"]
    assert server.get("/health")[0] == 200


@pytest.mark.slow
def test_a_broker_that_dies_ends_what_runs_and_a_new_one_is_found(own_server: MakeServer) -> None:
    server = own_server()
    assert server.broker is not None
    server.broker.script = start_and_wait("Hel")
    with server.open_chat(stream=True) as streaming, server.open_chat() as whole:
        read_until(streaming, b'"Hel"')
        server.broker.wait_for(Submit, 2)
        server.broker.fall_silent(Refused("another life"))
        body = read_all(streaming)
        assert b"broker_lost" in body and b"[DONE]" not in body and not body.endswith(b"0\r\n\r\n")
        assert read_until(whole, b"}}").startswith(b"HTTP/1.1 503 ")
    assert server.get("/health")[0] == 503
    status, headers, reply = server.chat()
    assert (status, reply["error"]["type"]) == (503, "api_error") and "retry-after" in headers
    assert server.get("/health/ready")[0] == 503 and server.get("/v1/pool")[0] == 503
    assert server.get("/v1/models")[0] == 200
    server.broker.close()
    server.broker = FakeBroker(server.runtime.front)
    wait_until(lambda: server.get("/health")[0] == 200)
    assert server.chat()[0] == 200


def terminate(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_a_drain_lets_running_replies_finish_and_refuses_new_ones(own_server: MakeServer) -> None:
    server = own_server()
    broker = server.broker
    assert broker is not None
    broker.script = start_and_wait("Hel")
    with server.connect() as idle, server.open_chat(stream=True) as running, server.connect() as fresh:
        idle.sendall(http_request("GET", "/health"))
        read_until(idle, b'"ok"}')
        (submit,) = broker.wait_for(Submit)
        head = read_until(running, b'"Hel"')
        fresh.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        terminate(server)
        assert idle.recv(10) == b"", "an idle connection is closed"
        assert fresh.recv(10) == b"", "so is one that has sent no whole request"
        broker.tokens(submit.request, 1, words("lo"))
        broker.done(submit.request)
        body = head.partition(b"\r\n\r\n")[2] + read_until(running, b"[DONE]")
        assert b'"lo"' in body
    assert server.process.wait(10) == 0
    broker.wait_for(Goodbye)
    assert "cut" not in server.log()


@pytest.mark.slow
def test_a_request_on_an_open_connection_is_refused_while_draining(own_server: MakeServer) -> None:
    server = own_server()
    broker = server.broker
    assert broker is not None
    broker.script = only_reserve
    with server.open_chat() as queued:
        (submit,) = broker.wait_for(Submit)
        # Behind the one that is served, on the same connection: read when that one is over.
        queued.sendall(http_request("POST", "/v1/chat/completions", b"{}"))
        terminate(server)
        wait_until(lambda: "draining" in server.log())
        broker.start(submit.request)
        broker.done(submit.request)
        reply = read_all(queued)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert server.process.wait(10) == 0


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_cut_as_a_failure(own_server: MakeServer) -> None:
    server = own_server(shutdown_timeout=0.3)
    broker = server.broker
    assert broker is not None
    broker.script = start_and_wait("Hel")
    with server.open_chat(stream=True) as streaming, server.open_chat() as whole:
        read_until(streaming, b'"Hel"')
        broker.wait_for(Submit, 2)
        terminate(server)
        body = read_all(streaming)
        assert b'{"error":{"message":"Generation failed (shutdown)' in body and b"[DONE]" not in body
        assert read_all(whole).startswith(b"HTTP/1.1 503 ")
    broker.wait_for(Cancel, 2)
    assert server.process.wait(10) == 1


@pytest.mark.slow
def test_a_second_signal_ends_at_once(own_server: MakeServer) -> None:
    server = own_server(shutdown_timeout=30)
    broker = server.broker
    assert broker is not None
    broker.script = start_and_wait("Hel")
    with server.open_chat(stream=True) as streaming:
        read_until(streaming, b'"Hel"')
        terminate(server)
        wait_until(lambda: "draining" in server.log())
        began = time.monotonic()
        terminate(server)
        assert b"shutdown" in read_all(streaming)
    assert server.process.wait(10) == 1
    assert time.monotonic() - began < 5


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_process_never_imports_what_workers_need(own_server: MakeServer) -> None:
    server = own_server()
    assert server.chat()[0] == 200
    loaded = (worker_of(server) / "maps").read_text()
    assert "tokenizers" in loaded
    assert not [name for name in ("libmlx", "libtorch", "numpy") if name in loaded]


@pytest.mark.slow
def test_a_setting_that_cannot_work_stops_the_process_with_one_line(tiny_model: Path) -> None:
    with pytest.raises(AssertionError, match="MILLPOND_MAX_PROMPT='lots': allowed is a whole number"):
        Server(tiny_model, max_prompt="lots")


def test_reports_carry_what_the_api_refused(server: Server, broker: FakeBroker) -> None:
    server.get("/nope")
    server.chat(n=0)

    def counted() -> bool:
        counters = [report.counters for report in broker.wait_for(Report)]
        sums = {name: sum(c.get(name, 0) for c in counters) for name in ("refused_404", "refused_400")}
        return all(sums.values())

    wait_until(counted)


@pytest.mark.slow
def test_an_end_that_is_asked_for_while_a_worker_starts_is_not_lost(own_server: MakeServer) -> None:
    server = own_server(app="tests.api.slow_app", wait=False)
    wait_until(lambda: "starting slowly" in server.log())
    began = time.monotonic()
    terminate(server)
    # The graceful timeout, after which the master kills, is 33 s.
    assert server.process.wait(40) == 0
    assert time.monotonic() - began < 20


def test_http_2_is_refused_at_start(
    own_server: MakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # gunicorn itself refuses it where this package is missing, which somebody may have installed.
    (tmp_path / "h2").mkdir()
    (tmp_path / "h2" / "__init__.py").write_text('__version__ = "99.0.0"')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--http-protocols h2,h1")
    server = own_server(wait=False)
    assert server.process.wait(20) == 1
    assert "millpond speaks HTTP/1.1 only" in server.log() and "Traceback" not in server.log()
