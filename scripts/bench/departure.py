"""departure: how soon a worker stops after its client has gone, streaming or waiting for a whole reply.

A scripted worker at a quiet pace; the client closes its socket in the middle. The worker's own last mark and the client's
close are instants of one machine's monotonic clock (docs/decisions.md, 18), read back through `millpond trace`'s question.
"""

import json
import socket
import time

from common.client import BrokerClient
from common.generation import unpack_summary
from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import scripted
from scripts.bench.load import MODEL
from scripts.harness import Harness, script, wait_for

MOST_MS = 20.0
RATE = 50


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds = 5 if quick else 40
    with scripted("--slots", "4") as harness:
        found = {
            stream: [departure(harness, f"{stream}-{number}", stream) for number in range(rounds)]
            for stream in (True, False)
        }
    figures = [
        Figure(f"of a {'streamed' if stream else 'whole'} reply, ms", times, "{:.1f}", most=MOST_MS)
        for stream, times in found.items()
    ]
    return Report("departure", [table("From the client's close to the worker's stop", figures)], figures)


def departure(harness: Harness, label: str, stream: bool) -> float:
    """Milliseconds for one request."""
    content = script(count=10**6, rate=RATE)
    body = json.dumps(
        {"model": MODEL, "stream": stream, "max_tokens": 8000, "messages": [{"role": "user", "content": content}]}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {label}\r\ncontent-length: {len(body)}\r\n\r\n"
    with BrokerClient(harness.place.front, "bench") as broker:
        with socket.create_connection(("127.0.0.1", harness.port)) as client:
            client.sendall(head.encode() + body)
            wait_for(lambda: any(name == "first_tokens" for trace in broker.traces(label) for name, _ in trace["marks"]), 20)
            # Somewhere between two tokens.
            time.sleep(0.3 / RATE)
            closed = time.monotonic()

        def stopped() -> float:
            payload = broker.traces(label)[0]["worker_payload"]
            return next((at for name, at in unpack_summary(payload).marks if name == "done"), 0.0) if payload else 0.0

        wait_for(lambda: stopped() > 0, 20)
        return (stopped() - closed) * 1000
