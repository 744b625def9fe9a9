"""prefix: what it is worth to send a prompt to the worker that has read its head.

Conversations on two one-thread workers of the demo model: several at once, each with a system prompt that it shares with
another one, each turn the whole history and a new question. Replies and pauses differ in length, as they do: equal ones
keep step, and then even the idlest worker is by chance always the same one. Two instances, with the routing and without,
take turns; no round repeats another's words, and both get the same.
"""

import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import demo
from scripts.bench.meter import CpuMeter, alternating, median
from scripts.harness import Harness
from scripts.loadtest.plan import WORDS

CONVERSATIONS = 5
SYSTEMS = 2
SYSTEM_WORDS, QUESTION_WORDS = 150, 50
REPLY_TOKENS = (4, 24)
PAUSE_S = (0.0, 4.0)


@dataclass(frozen=True)
class Question:
    """One turn: what is asked after which pause, and how long the answer may be."""

    text: str
    reply_tokens: int
    pause_s: float


@dataclass
class Round:
    """What one round found. turn_s: of every turn but the first of each conversation, which nobody has read."""

    turn_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, turns = (1, 2) if quick else (3, 5)
    flags = ("--workers", "2", "--threads", "1", "--prefix-routing")
    with demo(*flags, "1") as routed, demo(*flags, "0") as plain:
        loads = Load(routed, turns), Load(plain, turns)
        for load in loads:
            load.warm_up()
        found = alternating(rounds, *loads)
        routing = routed.snapshot()["models"][0]["prefix_routing"]
    turn = [[median(one.turn_s) for one in kind] for kind in found]
    wall = [[one.wall_s for one in kind] for kind in found]
    cpu = [[one.cpu_s for one in kind] for kind in found]
    cached = [[one.cached_tokens / one.prompt_tokens for one in kind] for kind in found]
    read = [[float(one.prompt_tokens - one.cached_tokens) for one in kind] for kind in found]
    figures = [
        Figure("prompt tokens read, with", read[0], "{:.0f}"),
        Figure("prompt tokens read, without", read[1], "{:.0f}"),
        Figure("prompt tokens read, with / without", [a / b for a, b in zip(*read, strict=True)], "{:.2f}", most=0.8),
        Figure("share of prompt tokens from the cache, with", cached[0], "{:.2f}"),
        Figure("share of prompt tokens from the cache, without", cached[1], "{:.2f}"),
        Figure("a turn after the first, with, median s", turn[0], "{:.2f}"),
        Figure("a turn after the first, without, median s", turn[1], "{:.2f}"),
        Figure("the workers' CPU in a round, with, s", cpu[0], "{:.1f}"),
        Figure("the workers' CPU in a round, without, s", cpu[1], "{:.1f}"),
        Figure("the workers' CPU, with / without", [a / b for a, b in zip(*cpu, strict=True)], "{:.2f}"),
        Figure("a turn, with / without", [a / b for a, b in zip(*turn, strict=True)], "{:.2f}", most=0.95),
        Figure("a whole round, with / without", [a / b for a, b in zip(*wall, strict=True)], "{:.2f}"),
    ]
    title = f"{CONVERSATIONS} conversations of {turns} turns at once, {REPLY_TOKENS[0]} to {REPLY_TOKENS[1]} tokens a reply"
    counted = ", ".join(f"{count} {result}" for result, count in routing.items())
    return Report("prefix", [table(title, figures, [f"Dispatches with routing: {counted}."])], figures)


class Load:
    """Conversations with one instance, none of them twice."""

    def __init__(self, harness: Harness, turns: int) -> None:
        self._harness = harness
        self._turns = turns
        self._rounds = 0

    def __call__(self) -> Round:
        """One round."""
        # The same words for both instances.
        chance = random.Random(self._rounds)
        self._rounds += 1
        systems = [_words(chance, SYSTEM_WORDS) for _ in range(SYSTEMS)]
        questions = [
            [
                Question(_words(chance, QUESTION_WORDS), chance.randint(*REPLY_TOKENS), chance.uniform(*PAUSE_S))
                for _ in range(self._turns)
            ]
            for _ in range(CONVERSATIONS)
        ]
        result = Round()
        meter = CpuMeter(*self._harness.processes("worker"))
        with ThreadPoolExecutor(CONVERSATIONS) as executor:
            talks = [
                executor.submit(self._talk, result, systems[number % SYSTEMS], asked)
                for number, asked in enumerate(questions)
            ]
            for talk in talks:
                talk.result()
        used = meter.read()
        result.wall_s, result.cpu_s = used.wall_s, used.cpu_s
        return result

    def warm_up(self) -> None:
        """Let every worker have compiled what it needs."""
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda n: self._ask([{"role": "user", "content": f"Hello {n}"}], 16), range(4)))

    def _talk(self, result: Round, system: str, questions: list[Question]) -> None:
        messages = [{"role": "system", "content": system}]
        for number, question in enumerate(questions):
            messages.append({"role": "user", "content": question.text})
            time.sleep(question.pause_s)
            began = time.monotonic()
            reply = self._ask(messages, question.reply_tokens)
            if number:
                result.turn_s.append(time.monotonic() - began)
            result.prompt_tokens += reply["usage"]["prompt_tokens"]
            result.cached_tokens += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})

    def _ask(self, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
        body = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            self._harness.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))
