"""A chat through the whole pool: client, API, broker, worker and back."""

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted

pytestmark = [pytest.mark.system, pytest.mark.slow]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def client(harness: Harness, **more: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=harness.url + "/v1", api_key="none", max_retries=0, timeout=60, **more)  # type: ignore[arg-type]


@pytest.mark.demo
def test_the_demo_model_knows_the_capital_of_france(demo: Harness) -> None:
    with client(demo) as ai:
        whole = ai.chat.completions.create(model="m", messages=CAPITAL, temperature=0)
        assert "Paris" in whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        chunks = list(ai.chat.completions.create(model="m", messages=CAPITAL, temperature=0, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


@pytest.mark.demo
def test_sixteen_clients_at_once_are_served_by_both_workers(demo: Harness) -> None:
    def ask(number: int) -> tuple[str, str, str]:
        body = {"model": "m", "messages": [{"role": "user", "content": f"Say the number {number}."}], "max_tokens": 12}
        reply = httpx.post(demo.url + "/v1/chat/completions", json=body, timeout=100)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"], reply.headers["x-millpond-worker"]

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ask, range(16)))
    assert all(text for text, _, _ in replies) and {reason for _, reason, _ in replies} <= {"stop", "length"}
    assert set(Counter(worker for _, _, worker in replies)) == {"m-0", "m-1"}
    wait_for(demo.idle, 10, "idle")


@pytest.mark.demo
def test_workers_run_on_openblas_with_their_share_of_threads(demo: Harness) -> None:
    import os

    threads = max(1, (os.cpu_count() or 1) // 2)
    for worker in demo.snapshot()["workers"]:
        assert worker["blas"].startswith("openblas") and f"({threads} thread" in worker["blas"]
    assert "openblas" in demo.output


def test_the_whole_reply_is_the_concatenated_stream(instance: Harness) -> None:
    messages = [{"role": "user", "content": script(tokens=["Hé", "llo ", "👍", "\n", "wörld"])}]
    with client(instance) as ai:
        whole = ai.chat.completions.create(model="m", messages=messages)
        chunks = list(ai.chat.completions.create(model="m", messages=messages, stream=True))
    assert whole.choices[0].message.content == "Héllo 👍\nwörld"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Héllo 👍\nwörld"


def test_concurrent_replies_never_mix(instance: Harness) -> None:
    def ask(number: int) -> None:
        word = f"w{number:04d}"
        status, reply = instance.chat(script(tokens=[word] * 20, rate=400))
        assert status == 200, reply
        assert reply["choices"][0]["message"]["content"] == word * 20

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))
    wait_for(instance.idle, 10, "idle")


def test_a_client_that_leaves_frees_its_slot(instance: Harness) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": script(count=10_000, rate=20)}], "stream": True}
    with httpx.stream("POST", instance.url + "/v1/chat/completions", json=body, timeout=30) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            next(lines)
        assert instance.snapshot()["queue"]["running"] == 1
    left = time.monotonic()
    wait_for(instance.idle, 5, "idle")
    assert time.monotonic() - left < 2.5
    assert instance.snapshot()["finished"]["cancelled"] >= 1


def test_more_than_places_is_refused_with_529_and_a_retry_after(tiny_model: Path) -> None:
    with scripted(tiny_model, "--slots", "1", "--max-queue", "1") as harness:
        def ask(_: int) -> tuple[int, str | None, dict]:
            body = {"model": "m", "messages": [{"role": "user", "content": script(count=20, rate=20)}]}
            reply = httpx.post(harness.url + "/v1/chat/completions", json=body, timeout=30)
            return reply.status_code, reply.headers.get("retry-after"), reply.json()

        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(ask, range(6)))
        statuses = Counter(status for status, _, _ in replies)
        assert statuses == {200: 2, 529: 4}
        for status, retry_after, body in replies:
            if status == 529:
                assert 1 <= int(retry_after or 0) <= 60
                assert body["error"]["type"] == "overloaded_error" and body["error"]["code"] == "queue_full"
        wait_for(harness.idle, 10, "idle")


def test_health_models_and_pool(instance: Harness) -> None:
    assert instance.get("/health")[0] == 200
    assert instance.get("/health/ready")[0] == 200
    status, models = instance.get("/v1/models")
    assert status == 200 and [entry["id"] for entry in models["data"]] == ["m"]
    status, pool = instance.get("/v1/pool")
    assert status == 200 and {worker["state"] for worker in pool["workers"]} == {"ready"}
    assert pool["limits"] == {"max_inflight": 8, "max_queue": 32}


def test_sigterm_ends_everything_with_status_0(tiny_model: Path) -> None:
    with scripted(tiny_model, "--workers", "2") as harness:
        kinds = ("serve", "broker", "pool", "gunicorn", "api", "worker")
        assert [len(harness.processes(kind)) for kind in kinds] == [1, 1, 1, 1, 1, 2]
        harness.signal(signal.SIGTERM)
        assert harness.wait_end(30) == 0, harness.output
        assert harness.all_processes() == []


def test_sigterm_lets_a_running_reply_finish(tiny_model: Path) -> None:
    with scripted(tiny_model) as harness:
        result: list[tuple[int, dict]] = []
        thread = threading.Thread(target=lambda: result.append(harness.chat(script(count=60, rate=40))))
        thread.start()
        wait_for(lambda: harness.snapshot()["queue"]["running"], 10, "running")
        harness.signal(signal.SIGTERM)
        assert harness.wait_end(30) == 0, harness.output
        thread.join()
        assert result[0][0] == 200 and result[0][1]["usage"]["completion_tokens"] == 60
