"""CONTRACT §8 over real sockets and a real pool: readers that are slow, clients that leave, prompts that are huge.

What needs no pool (bodies, pipelines, HTTP/1.0, Expect, early refusals) is in tests/api/test_transport.
"""

import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from fixtures import tiny_model
from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted
from tests.system.streams import Stream

pytestmark = [pytest.mark.system, pytest.mark.slow]

CONTEXT = 2_000_000
# 5 MB that fit the context, so that they are really tokenized.
HUGE = "the world and all of the water " * 170_000


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """One worker of four slots, whose model takes enormous prompts."""
    model: Path = tiny_model.build(tmp_path_factory.mktemp("models") / "large", context=CONTEXT)
    with scripted(model, "--workers", "1", "--slots", "4", "--max-prompt", str(CONTEXT)) as harness:
        yield harness


def asked(harness: Harness, content: str, label: str, small_buffers: bool = False, **fields: object) -> socket.socket:
    """A connection on which a chat has been sent."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()
    connection = socket.socket()
    if small_buffers:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", harness.port))
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"X-Request-Id: {label}", f"Content-Length: {len(body)}"]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def api_memory(harness: Harness) -> int:
    """What the API process holds."""
    (process,) = harness.processes("api")
    return psutil.Process(process.pid).memory_info().rss


# Slow readers


def test_a_slow_reader_is_ended_with_a_prefix_and_costs_the_others_nothing(pool: Harness) -> None:
    pool.chat(script(count=1))
    before = api_memory(pool)
    tokens = [f"{number:04d}" + "x" * 400 for number in range(8)]
    # Forty megabytes: far more than any buffer between the two.
    endless = script(tokens=tokens, count=100_000, rate=1000)
    slow = asked(pool, endless, "slow-reader", small_buffers=True, stream=True, max_tokens=100_000)
    got, stop = bytearray(), threading.Event()

    def read_a_kilobyte_a_second() -> None:
        while not stop.wait(0.1):
            got.extend(slow.recv(100))

    reader = threading.Thread(target=read_a_kilobyte_a_second)
    reader.start()
    try:
        wait_for(lambda: pool.snapshot()["queue"]["running"], 10, "running")
        began = time.monotonic()
        fast = [Stream(pool, script(count=150, rate=75)) for _ in range(3)]
        wait_for(lambda: pool.snapshot()["finished"].get("cancelled"), 20, "the slow reader's slot is free")
        # Its place is back while it is still connected and reads on.
        assert len(got) < 10_000
        for stream in fast:
            assert stream.over().whole and stream.pieces == 150
        # Two seconds of tokens; twice that is a machine that is busy with other things.
        assert max(stream.ended_at for stream in fast) - began < 4
        assert api_memory(pool) - before < 30 * 2**20
        wait_for(pool.idle, 10, "idle")
    finally:
        stop.set()
        reader.join(10)
    while part := slow.recv(65536):
        got.extend(part)
    slow.close()
    body = bytes(got).partition(b"\r\n\r\n")[2].decode()
    pieces = [part.partition('"')[0] for part in body.split('"delta":{"content":"')[1:]]
    # Only what was cut by the end itself may be incomplete.
    assert 100 < len(pieces) < 20_000
    assert pieces[:-1] == [tokens[number % 8] for number in range(len(pieces) - 1)]
    assert "[DONE]" not in body and '"error"' not in body and '"finish_reason":"' not in body
    wait_for(lambda: "outcome=slow_reader" in pool.output, 10, "the log says so")


# Departures


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


LEAVING: list[Callable[[socket.socket], None]] = [close, reset, half_close]


def rendering(snapshot: dict) -> bool:
    return snapshot["queue"]["reserved"] == 1


def queued(snapshot: dict) -> bool:
    return snapshot["queue"]["waiting"] == 1


def running(snapshot: dict) -> bool:
    return snapshot["queue"]["running"] == 1


PHASES = {
    "rendering": (HUGE[:1_000_000], rendering),
    "queued": (script(count=3), queued),
    "prefilling": (script(count=3, delay_s=60), running),
    "decoding": (script(count=1000, rate=20), running),
}


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_gives_everything_back(
    pool: Harness, phase: str, stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    content, reached = PHASES[phase]
    label = f"{phase}-{leave.__name__}-{stream}"
    wait_for(pool.idle, 20, "idle")
    crowd = [asked(pool, script(count=100, rate=1), "crowd") for _ in range(4 if phase == "queued" else 0)]
    wait_for(lambda: pool.snapshot()["queue"]["running"] == len(crowd), 20, "the slots are taken")
    with asked(pool, content, label, stream=stream) as connection:
        wait_for(lambda: reached(pool.snapshot()), 20, phase)
        if phase == "decoding" and stream:
            while b'"content":"word1"' not in connection.recv(65536):
                continue
        leave(connection)
        left = time.monotonic()
        wait_for(lambda: not reached(pool.snapshot()), 10, "given back")
        assert time.monotonic() - left < 2
    (line,) = wait_for(lambda: [line for line in pool.lines if f"id={label} " in line], 10, "logged")
    assert "status=499" in line and "outcome=client_gone" in line and "warning" not in line and "error" not in line
    for one in crowd:
        one.close()


# Huge prompts


def test_a_prompt_of_five_megabytes_leaves_health_responsive(pool: Harness) -> None:
    wait_for(pool.idle, 20, "idle")
    waits = []
    with httpx.Client(base_url=pool.url) as client:
        client.get("/health")
        with asked(pool, HUGE + script(count=2), "huge", max_tokens=2):
            wait_for(lambda: rendering(pool.snapshot()), 20, "rendering")
            # Until it is handed over, packed and all.
            while rendering(pool.snapshot()):
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                waits.append(time.monotonic() - began)
                time.sleep(0.005)
            wait_for(lambda: not rendering(pool.snapshot()) and pool.snapshot()["queue"]["running"], 20, "running")
    assert len(waits) > 20, "it was over before anything could be seen"
    assert statistics.median(waits) < 0.05 and max(waits) < 1.0, sorted(waits)[-5:]
    wait_for(pool.idle, 20, "idle")
