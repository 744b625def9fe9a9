"""Real processes are scaled, restarted and swapped under sixteen clients: nobody's request fails, and work goes on."""

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.prompt import PromptSource
from common.client import BrokerClient
from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted
from tests.system.streams import Stream

pytestmark = [pytest.mark.system, pytest.mark.slow]

CLIENTS = 16


@pytest.fixture(scope="module")
def harness(tiny_model: Path) -> Iterator[Harness]:
    """Two workers of eight slots; loading takes a moment, as a model's does."""
    with scripted(tiny_model, "--workers", "2", "--slots", "8", "--scripted-load", "0.3", "--queue-timeout", "20") as harness:
        yield harness


class Load:
    """Closed-loop clients: each asks again when it is answered; half of them stream."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.ends: list[float] = []
        self.wrong: list[Any] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]

    def _client(self, number: int) -> None:
        asked = 0
        while not self._over.is_set():
            asked += 1
            content, expected = script(count=10, rate=20), " ".join(f"word{n}" for n in range(1, 11))
            if number % 2:
                stream = Stream(self.harness, content).over()
                if not stream.whole or stream.text != expected:
                    self.wrong.append((stream.status, stream.error, stream.text))
            else:
                status, reply = self.harness.chat(content)
                if status != 200 or reply["choices"][0]["message"]["content"] != expected:
                    self.wrong.append((status, reply))
            self.ends.append(time.monotonic())

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.ends) >= CLIENTS, 20, "the load runs")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def during(self, *order: Any) -> str:
        """Give an order meanwhile; nothing may fail, nor stand still. What it said."""
        began = time.monotonic()
        done, text = ordered(self.harness, *order)
        ended = time.monotonic()
        assert done, text
        marks = sorted([began, *(end for end in self.ends if began < end < ended), ended])
        longest = max(b - a for a, b in zip(marks, marks[1:], strict=False))
        assert longest < 2.0, f"nobody was answered for {longest:.1f} s"
        assert not self.wrong, self.wrong[:3]
        return text


def ordered(harness: Harness, action: str, target: str = "", count: int = 0, source: str = "") -> tuple[bool, str]:
    """What a command would get to hear at the end."""
    with BrokerClient(harness.place.front, "test") as client:
        reply = client.admin(action, target, count, source, 60.0)
    assert reply is not None, "still under way after a minute"
    return reply.done, reply.text


def names(harness: Harness) -> list[str]:
    return sorted(row["name"] for row in harness.snapshot()["workers"] if row["state"] == "ready")


def model(harness: Harness) -> dict[str, Any]:
    return harness.snapshot()["models"][0]


def test_a_rolling_restart_and_a_swap_lose_no_request(harness: Harness, tiny_sentencepiece_model: Path) -> None:
    before = {row["pid"] for row in harness.snapshot()["workers"]}
    fingerprint = harness.get("/v1/models/m")[1]["system_fingerprint"]
    with Load(harness) as load:
        said = load.during("roll")
        assert "restarted m-0, m-1, one after the other" in said
        assert not before & {row["pid"] for row in harness.snapshot()["workers"]}
        load.during("swap", "m", 0, str(tiny_sentencepiece_model))
    assert not load.wrong, load.wrong[:3]
    now = harness.get("/v1/models/m")[1]["system_fingerprint"]
    assert now != fingerprint
    # The tokenizer is the new one wherever it is asked for.
    ids = PromptSource(tiny_sentencepiece_model).text("hello world", 100)
    body = b'{"model": "m", "prompt": "hello world"}'
    assert _post(harness, "/tokenize", body)["tokens"] == ids
    assert harness.chat("x")[1]["system_fingerprint"] == now
    # An API process that starts afterwards, and a pool, know it too.
    harness.processes("gunicorn")[0].send_signal(signal.SIGHUP)
    harness.processes("pool")[0].kill()
    wait_for(lambda: len(names(harness)) == 2 and f"fp_{model(harness)['fingerprint']}" == now, 30, "the pool is back")
    assert harness.chat("x")[1]["system_fingerprint"] == now


def _post(harness: Harness, path: str, body: bytes) -> Any:
    with urllib.request.urlopen(urllib.request.Request(harness.url + path, body), timeout=10) as reply:
        return json.load(reply)


def test_scaling_and_draining_under_load_lose_no_request_and_move_the_limit(harness: Harness) -> None:
    with Load(harness) as load:
        assert "m has 3 workers" in load.during("scale", "m", 3)
        assert model(harness)["max_inflight"] == 24 and len(names(harness)) == 3
        victim = names(harness)[0]
        assert f"{victim} has left" in load.during("drain", victim)
        assert model(harness)["max_inflight"] == 16 and victim not in names(harness)
        load.during("scale", "m", 1)
        assert model(harness)["max_inflight"] == 8
    assert not load.wrong
    assert ordered(harness, "scale", "m", 2) == (True, "m has 2 workers")
    assert ordered(harness, "scale", "m", 2) == (True, "it is so already")


def test_what_waits_for_a_swapped_model_is_rendered_again(
    tiny_model: Path, tiny_sentencepiece_model: Path
) -> None:
    with scripted(tiny_model, "--slots", "1", "--max-inflight", "1", "--scripted-load", "0.2") as harness:
        running = Stream(harness, script(count=200, rate=50)).flowing()
        waiting = []
        for number in range(3):
            waiting.append(Stream(harness, script(tokens=[f"<{number}>"] * 3, rate=100)))
            wait_for(lambda: harness.snapshot()["queue"]["waiting"] == len(waiting), 10, "queued")
        assert ordered(harness, "swap", "m", 0, str(tiny_sentencepiece_model))[0]
        assert running.over().whole
        assert [stream.over().text for stream in waiting] == ["<0>" * 3, "<1>" * 3, "<2>" * 3]
        assert [stream.whole for stream in waiting] == [True] * 3


def test_a_model_that_does_not_load_changes_nothing(harness: Harness, tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "tokenizer.json").write_text("{}")
    before = names(harness), model(harness)["fingerprint"]
    done, text = ordered(harness, "swap", "m", 0, str(broken))
    assert not done and text.endswith("it is as it was before") and "tokenizer.json" in text, text
    assert (names(harness), model(harness)["fingerprint"]) == before
    assert harness.chat(script(count=2))[0] == 200


def test_orders_that_cannot_be_are_refused_with_their_cause(harness: Harness) -> None:
    for order, said in [
        (("scale", "other", 2), "there is no model 'other'; there are m"),
        (("scale", "m", 0), "m needs at least one worker"),
        (("drain", "m-77"), "there is no worker 'm-77'"),
        (("restart", "m-77"), "there is no model or worker 'm-77'"),
        (("swap", "m", 0, "/nowhere"), "there is no folder /nowhere"),
        (("cancel", "nobody"), "no request 'nobody'"),
    ]:
        done, text = ordered(harness, *order)  # type: ignore[arg-type]
        assert not done and said in text, (order, text)
    command = harness.command("scale", "other", "2")
    assert command.returncode == 1 and "there is no model 'other'" in command.stderr and not command.stdout


def test_one_change_at_a_time_and_a_command_that_does_not_wait_is_told_so(harness: Harness) -> None:
    stream = Stream(harness, script(count=1000, rate=100)).flowing()
    worker = stream.headers["x-millpond-worker"]
    command = harness.command("restart", "--rolling", worker, "--timeout", "3")
    assert command.returncode == 3 and "still under way" in command.stderr
    assert command.stdout.splitlines()[-1] == f"{worker} finishes what it has"
    done, text = ordered(harness, "scale", "m", 4)
    assert not done and text == "another change is under way: 1 of 1 new workers ready, 1 old ones left"
    assert harness.command("cancel", stream.headers["x-request-id"]).returncode == 0
    assert stream.over().failed
    wait_for(lambda: worker not in names(harness) and len(names(harness)) == 2, 10, "the rest of it")
