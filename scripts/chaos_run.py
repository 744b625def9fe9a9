"""`scripts/chaos [--seconds 60] [--seed 1]`: random kills, freezes, hang-ups, floods and changes against real processes.

An instance with the scripted engine, clients that know what each reply must be, and one hand that breaks things. Checked at
every client: a request ends exactly once and in time, no foreign text, no hole, a prefix when it fails, a known status and
error shape. Every change that is ordered ends in the truth, though it may be undone. Checked at the end: all counts are zero, every worker is ready, SIGTERM ends everything with status 0. What is
done and when follows from the seed; how processes interleave does not. Load goes to 127.0.0.1 only and stops by itself.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import httpx
import psutil

from common.client import BrokerClient
from common.errors import MillpondError
from fixtures.tiny_model import build
from scripts.harness import Harness, script, wait_for

CLIENTS = 24
REQUEST_TIMEOUT_S = 15.0
# Beyond the request's own limit: a cut stream's last words, a killed API's accept queue, a busy machine.
HANG_S = REQUEST_TIMEOUT_S * 3
REFUSALS = {503, 504, 529}
FLAGS = (
    "--engine scripted --workers 3 --slots 3 --max-queue 12 --api-processes 2 --silence 2 --stuck 2 "
    f"--queue-timeout 5 --request-timeout {REQUEST_TIMEOUT_S:g} --scripted-rate 100 --shutdown-timeout 5 --log-level warning"
).split()


class Violation(Exception):
    """A promise that was not kept."""


class Chaos:
    """One run."""

    def __init__(self, harness: Harness, seed: int, seconds: float, model: Path, other: Path) -> None:
        """other: a second model to swap to and back."""
        self.harness = harness
        self.seed = seed
        self.until = time.monotonic() + seconds
        self.ends: Counter[str] = Counter()
        self.deeds: Counter[str] = Counter()
        self.violations: list[str] = []
        self.numbers = 0
        # When an API process was last killed, frozen or reloaded: only then may a connection break without a word.
        self.api_hurt_at = 0.0
        # For the report of a violation.
        self.latest: deque[str] = deque(maxlen=8)
        self.frozen: dict[int, float] = {}
        self.last: dict[str, Any] = {}
        self.models = [model, other]
        # What changes of the pool led to: done, or the first words of why not.
        self.changes: Counter[str] = Counter()

    async def run(self) -> None:
        """Everything at once until the time is over, then the reckoning."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.harness.url, timeout=HANG_S, limits=limits) as http, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self.client(http, random.Random(self.seed * 1000 + number)))
            group.create_task(self.hand(random.Random(self.seed)))
        await asyncio.to_thread(self.reckon)

    # -- clients

    async def client(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """One client: request after request."""
        while time.monotonic() < self.until:
            burst = draw.choice([1] * 12 + [20])
            if burst > 1:
                self.deeds["flood"] += 1
            await asyncio.gather(*(self.request(http, draw) for _ in range(burst)))
            await asyncio.sleep(draw.choice([0, 0, 0.05, 0.3]))

    async def request(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """One request, checked."""
        self.numbers += 1
        tag = f"<{self.numbers}>"
        count = draw.choice([1, 3, 10, 40])
        words = [f"{tag}{n} " for n in range(count)]
        fault = draw.choices(["", "fail_at", "raise_at", "crash_at", "hang_at", "refuse"], [90, 3, 2, 1, 1, 2])[0]
        what: dict[str, Any] = {"tokens": words, "rate": draw.choice([50, 200, 1000]), "delay_s": draw.choice([0, 0, 0.3])}
        if fault == "refuse":
            what["refuse"] = True
        elif fault:
            what[fault] = draw.randrange(count)
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": script(**what)}],
            "stream": draw.random() < 0.7,
            "n": draw.choice([1] * 9 + [2]),
        }
        leave_after = draw.choice([None, None, None, 0, 2])
        began = time.monotonic()
        try:
            kind = await self.exchange(http, body, "".join(words), leave_after, tag)
        except Violation as error:
            self.violations.append(f"{error} (request {tag}, {fault or 'no fault'}, {body['stream']=}, n {body['n']})")
            kind = "violation"
        except (httpx.HTTPError, OSError) as error:
            kind = f"broken: {type(error).__name__}"
            if isinstance(error, httpx.TimeoutException) and time.monotonic() - began >= HANG_S - 1:
                self.violations.append(f"hung for {HANG_S:g} s (request {tag}; latest deeds: {', '.join(self.latest)})")
            elif began < self.api_hurt_at + 3 or time.monotonic() - self.api_hurt_at < 8:
                kind = "broken with its api process"
            else:
                now = time.monotonic()
                self.violations.append(
                    f"{error!r} without a reason (request {tag}, begun {now - began:.2f} s ago, "
                    f"{now - self.api_hurt_at:.1f} s after the last harm to an API process; "
                    f"latest deeds: {', '.join(self.latest)})"
                )
        self.ends[kind] += 1

    async def exchange(
        self, http: httpx.AsyncClient, body: dict[str, Any], expected: str, leave_after: int | None, tag: str
    ) -> str:
        """One HTTP exchange; how it ended. Raises Violation."""
        headers = {"x-request-id": tag}
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
            if reply.status_code != 200:
                return self.refusal(reply.status_code, await reply.aread())
            if body["stream"]:
                return await self.stream(reply, expected, leave_after, body["n"])
            whole = json.loads(await reply.aread())
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        if texts != [expected] * body["n"]:
            raise Violation(f"a whole reply is {texts!r:.200}, not {expected!r:.60}")
        return "whole"

    def refusal(self, status: int, content: bytes) -> str:
        error = json.loads(content)["error"]
        if list(error) != ["message", "type", "code", "param"]:
            raise Violation(f"error shape {list(error)}")
        if status not in REFUSALS and not (status == 400 and "script" in error["message"].lower() or status == 400):
            raise Violation(f"status {status}: {error}")
        return f"{status} {error['code'] or error['message'][:40]}"

    async def stream(self, reply: httpx.Response, expected: str, leave_after: int | None, n: int) -> str:
        texts = [""] * n
        finished: set[int] = set()
        error = done = False
        seen = 0
        try:
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if done or error:
                    raise Violation(f"{line[:80]!r} after the end")
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line[6:])
                error = "error" in event
                for choice in event.get("choices", ()):
                    index = choice["index"]
                    if index in finished:
                        raise Violation("a delta after the finish")
                    texts[index] += choice["delta"].get("content") or ""
                    if choice["finish_reason"]:
                        finished.add(index)
                    if not expected.startswith(texts[index]):
                        raise Violation(f"{texts[index]!r:.200} is no prefix of {expected!r:.60}")
                seen += 1
                if leave_after is not None and seen > leave_after:
                    return "left"
        except httpx.RemoteProtocolError:
            if error:
                return "failed with an error event"
            raise
        if error:
            raise Violation("an error event and then a proper end")
        if not done or len(finished) != n or any(text != expected for text in texts):
            raise Violation(f"ended without being whole: {done=} {finished=} {texts!r:.200}")
        return "whole stream"

    # -- the hand

    async def hand(self, draw: random.Random) -> None:
        """Breaks one thing after the other."""
        deeds = {
            "kill worker": 6,
            "freeze worker": 3,
            "freeze broker": 1,
            "freeze api": 2,
            "kill api": 2,
            "kill broker": 1,
            "kill pool": 1,
            "reload api": 1,
            "roll pool": 3,
            "swap pool": 3,
            "scale pool": 3,
            "drain pool": 1,
        }
        while time.monotonic() < self.until:
            await asyncio.sleep(draw.uniform(0.3, 2.5))
            deed = draw.choices(list(deeds), list(deeds.values()))[0]
            try:
                await asyncio.to_thread(self.do, deed, draw)
            except psutil.Error:
                continue  # it was gone already
        for pid in list(self.frozen):
            self.thaw(pid)

    def do(self, deed: str, draw: random.Random) -> None:
        """One deed on one process of a kind."""
        verb, kind = deed.split()
        now = time.monotonic()
        for pid, at in list(self.frozen.items()):
            if now >= at:
                self.thaw(pid)
        self.lift()
        if kind == "pool" and verb != "kill":
            self.deeds[deed] += 1
            self.change(verb, draw)
            return
        found = self.harness.processes("gunicorn" if verb == "reload" else kind)
        if not found:
            return
        victim = draw.choice(found)
        self.deeds[deed] += 1
        self.latest.append(f"{deed} {victim.pid} at {now:.1f}")
        if kind == "api":
            self.hurt_api(now + (2.0 if verb == "freeze" else 0.0))
        if verb == "kill":
            victim.send_signal(signal.SIGKILL)
        elif verb == "reload":
            self.hurt_api(now + 10.0)
            victim.send_signal(signal.SIGHUP)
        else:
            # Short enough to be forgiven, or long enough to be found.
            self.frozen[victim.pid] = now + draw.choice([0.3, 1.0, 6.0] if kind == "worker" else [0.3, 1.0])
            victim.send_signal(signal.SIGSTOP)

    def hurt_api(self, until: float) -> None:
        """An API process may break connections until then; a later deed makes that no shorter."""
        self.api_hurt_at = max(self.api_hurt_at, until)

    def change(self, verb: str, draw: random.Random) -> None:
        """Order something of the pool and do not wait for it: the next blow falls in the middle of it."""
        target, count, source = "m", 0, ""
        if verb == "scale":
            count = draw.choice([1, 2, 3, 4])
        elif verb == "swap":
            source = str(draw.choice(self.models))
        elif verb == "drain":
            target = f"m-{draw.randrange(4)}"
        self.order(verb, target, count, source, draw.choice([0.2, 3.0]))

    def order(self, verb: str, target: str, count: int, source: str, timeout_s: float) -> bool:
        """Whether it is so now."""
        try:
            with BrokerClient(self.harness.place.front, "chaos") as broker:
                reply = broker.admin(verb, target, count, source, timeout_s)
        except MillpondError:
            reply = None  # the broker or the pool is down or frozen just now, or a plan is made
        self.changes["not waited for" if reply is None else "done" if reply.done else " ".join(reply.text.split()[:4])] += 1
        return reply is not None and reply.done

    def thaw(self, pid: int) -> None:
        self.frozen.pop(pid, None)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    def lift(self) -> None:
        """Three early deaths fail a model; the operator restarts it."""
        try:
            with BrokerClient(self.harness.place.front, "chaos") as broker:
                if any(worker["state"] == "failed" for worker in broker.snapshot(2.0)["workers"]):
                    self.deeds["restart"] += 1
                    broker.admin("restart", timeout_s=1.0)
        except MillpondError:
            return  # the broker is down or frozen just now

    # -- the reckoning

    def reckon(self) -> None:
        """Nothing may be left of all that."""

        def recovered() -> bool:
            self.lift()
            self.order("scale", "m", 3, "", 5.0)
            try:
                self.last = self.harness.snapshot()
                rows = self.last["workers"]
                return len(rows) == 3 and all(row["state"] == "ready" for row in rows) and self.harness.idle()
            except MillpondError:
                return False

        try:
            wait_for(recovered, 60, "three ready workers and every count at zero")
            snapshot = self.harness.snapshot()
            assert snapshot["queue"] == {"waiting": 0, "reserved": 0, "running": 0, "oldest_ms": 0}, snapshot["queue"]
            assert snapshot["malformed"] == 0, f"{snapshot['malformed']} malformed messages"
            status, reply = self.harness.chat(script(count=2))
            assert status == 200, reply
            self.harness.signal(signal.SIGTERM)
            assert self.harness.wait_end(60) == 0, "SIGTERM did not end with status 0"
            left = self.harness.all_processes()
            assert not left, f"left behind: {left}"
        except AssertionError as error:
            self.violations.append(f"at the end: {error}; {json.dumps(self.last)}")


def run(seed: int, seconds: float, model: Path, other: Path) -> Chaos:
    """One run against a fresh instance."""
    with Harness(*FLAGS, model=model) as harness:
        chaos = Chaos(harness, seed, seconds, model, other)
        asyncio.run(chaos.run())
        if chaos.violations:
            print(harness.output[-20_000:], file=sys.stderr)
        return chaos


def main(arguments: list[str]) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        models = build(Path(folder) / "tiny"), build(Path(folder) / "other", family="sentencepiece")
        chaos = run(chosen.seed, min(chosen.seconds, 7200.0), *models)
    print(f"seed {chosen.seed}, {chosen.seconds:g} s")
    print(f"requests: {dict(chaos.ends.most_common())}")
    print(f"deeds: {dict(chaos.deeds.most_common())}")
    print(f"changes: {dict(chaos.changes.most_common())}")
    for violation in chaos.violations:
        print(f"VIOLATION: {violation}")
    print(f"{len(chaos.violations)} violations")
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
