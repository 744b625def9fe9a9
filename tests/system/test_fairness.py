"""One key floods a real instance at ten times what it can serve; another key asks one thing at a time."""

import hashlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted

pytestmark = [pytest.mark.system, pytest.mark.slow]

SLOTS, QUEUE = 2, 6
# One request takes 0.4 s: two slots serve five a second.
RUN_S = 0.4
WORK = script(count=20, rate=50)
# Ten times the capacity: twenty clients would do if none was refused; those who are refused come back at once.
FLOODERS = 10 * SLOTS


def keys_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    path.write_text(
        "\n".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{more}'
            for name, more in (("flood", ""), ("quiet", "max_priority = 2"), ("heavy", "weight = 3"))
        )
    )
    return path


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    keys = keys_file(tmp_path_factory.mktemp("keys"))
    with scripted(tiny_model, "--slots", str(SLOTS), "--max-queue", str(QUEUE), "--api-keys-file", str(keys)) as harness:
        yield harness


def ask(harness: Harness, key: str, work: str = WORK, **fields: Any) -> tuple[int, dict[str, str], Any]:
    """Status, headers, and the reply: its JSON, or a stream's last event."""
    body = {"model": "m", "messages": [{"role": "user", "content": work}], **fields}
    request = urllib.request.Request(
        harness.url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            whole = reply.read()
            return reply.status, dict(reply.headers), whole[-20:] if fields.get("stream") else json.loads(whole)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.load(error)


def counts(harness: Harness) -> Counter[int]:
    """How requests ended, as statuses; nothing ends in other ways here."""
    snapshot = harness.snapshot()
    assert set(snapshot["finished"]) <= {"stop"} and set(snapshot["refused"]) <= {"queue_full"}, snapshot
    return Counter({200: snapshot["finished"].get("stop", 0), 529: snapshot["refused"].get("queue_full", 0)})


class Flood:
    """Clients of one key that never stop."""

    def __init__(self, harness: Harness, key: str, clients: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.refusals: list[tuple[dict[str, str], Any]] = []
        self._harness, self._key = harness, key
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _client(self) -> None:
        while not self._over.is_set():
            status, headers, reply = ask(self._harness, self._key)
            self.statuses[status] += 1
            if status != 200:
                self.refusals.append((headers, reply))
                self._over.wait(0.05)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a request never ended"


def test_a_single_request_waits_for_one_of_the_floods_also_when_the_queue_is_full(pool: Harness) -> None:
    before = counts(pool)
    flood = Flood(pool, "flood", FLOODERS)
    wait_for(lambda: flood.statuses[529] > 5, 20, "the queue is full")
    waited = []
    for _ in range(6):
        began = time.monotonic()
        status, _, reply = ask(pool, "quiet")
        assert status == 200, reply
        waited.append(time.monotonic() - began - RUN_S)
    # Of any one look: a place is empty for as long as it takes one of the refused to come again.
    wait_for(lambda: pool.snapshot()["models"][0]["waiting"] >= QUEUE - 1, 20, "the queue is full still")
    flood.end()
    # One request of the flood that runs, one step, and what this busy machine adds; in turn behind six it would be 1.2 s
    # more, behind those who come while it waits for ever.
    assert sorted(waited)[len(waited) // 2] < RUN_S + 0.2, waited
    assert max(waited) < 2 * RUN_S + 0.4, waited
    assert set(flood.statuses) == {200, 529} and flood.statuses[200] > 5
    for headers, reply in flood.refusals:
        assert reply["error"]["type"] == "overloaded_error" and reply["error"]["code"] == "queue_full"
        assert 1 <= int(headers["retry-after"]) <= 60
    wait_for(pool.idle, 10, "idle")
    # Every request that came has ended once, as its client was told.
    assert counts(pool) - before == {529: flood.statuses[529], 200: flood.statuses[200] + len(waited)}


def test_two_floods_are_served_by_weight_and_the_displaced_get_a_529(pool: Harness) -> None:
    ended = counts(pool)
    floods = {key: Flood(pool, key, FLOODERS // 2) for key in ("flood", "heavy")}
    wait_for(lambda: all(flood.statuses[529] for flood in floods.values()), 20, "the queue is full")
    before = {key: flood.statuses[200] for key, flood in floods.items()}
    wait_for(lambda: sum(flood.statuses[200] for flood in floods.values()) - sum(before.values()) >= 16, 30, "served")
    served = {key: flood.statuses[200] - before[key] for key, flood in floods.items()}
    for flood in floods.values():
        flood.end()
    assert 2 <= served["heavy"] / served["flood"] <= 4.5, served
    wait_for(pool.idle, 10, "idle")
    assert counts(pool) - ended == sum((flood.statuses for flood in floods.values()), Counter())


def test_a_displaced_stream_gets_its_529_while_it_waits(pool: Harness) -> None:
    results: dict[int, tuple[int, dict[str, str], Any]] = {}
    # Those that run are slow enough that nothing ends meanwhile.
    slow, quick = script(count=5, rate=50, delay_s=2.5), script(count=1)

    def client(number: int) -> None:
        results[number] = ask(pool, "flood", slow if number < SLOTS else quick, stream=number % 2 == 1)

    def one_more(number: int) -> threading.Thread:
        places = pool.snapshot()["models"][0]["places"]
        thread = threading.Thread(target=client, args=(number,), daemon=True)
        thread.start()
        wait_for(lambda: pool.snapshot()["models"][0]["places"] > places, 10, "a place")
        return thread

    threads = [one_more(number) for number in range(SLOTS + QUEUE)]
    assert ask(pool, "flood")[0] == 529
    quiet = threading.Thread(target=lambda: results.update({99: ask(pool, "quiet", priority=2)}), daemon=True)
    quiet.start()
    wait_for(lambda: results, 10, "somebody was displaced")
    ((number, (status, headers, reply)),) = results.items()
    # The youngest of those that waited.
    assert (number, status, reply["error"]["code"]) == (SLOTS + QUEUE - 1, 529, "queue_full"), results
    assert int(headers["retry-after"]) >= 1
    for thread in (*threads, quiet):
        thread.join(40)
    assert results[99][0] == 200 and Counter(status for status, *_ in results.values()) == {200: 8, 529: 1}
