"""What to send and when (pure: seeded randomness comes in from the caller).

Owns the mixes of lengths, the texts of prompts and the arrival times. Must never know sockets or answers. Invariant:
the same seed gives the same requests in the same order, whatever the server does, so that two runs can be compared.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# Words that nearly every tokenizer has as one token with their leading space, so that lengths in words are about
# lengths in tokens; what the server counted is reported beside what was asked.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason"
).split()


@dataclass(frozen=True)
class Mix:
    """Lengths to draw from: spans (low, high), each with its weight."""

    spans: Sequence[tuple[int, int]]
    weights: Sequence[float]

    def draw(self, chance: random.Random) -> int:
        """One length."""
        low, high = self.spans[0] if len(self.spans) == 1 else chance.choices(self.spans, self.weights)[0]
        return low if low == high else chance.randint(low, high)

    def __str__(self) -> str:
        pairs = zip(self.spans, self.weights, strict=True)
        return ",".join(
            f"{low}-{high}:{weight:g}" if high > low else f"{low}:{weight:g}" for (low, high), weight in pairs
        )

    @property
    def mean(self) -> float:
        """The average length."""
        total = sum(self.weights)
        return (
            sum(weight * (low + high) / 2 for (low, high), weight in zip(self.spans, self.weights, strict=True)) / total
        )


def parse_mix(text: str) -> Mix:
    """64, or 32-256 (any length between), or 32:3,400-600:1 (with weights). Raises ValueError."""
    spans, weights = [], []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?(?::(\d+(?:\.\d+)?))?\s*", part)
        if match is None:
            raise ValueError(f"{part!r} is no length, span or weighted one")
        low, high, weight = int(match[1]), int(match[2] or match[1]), float(match[3] or 1)
        if not 1 <= low <= high or weight <= 0:
            raise ValueError(f"{part!r} is empty")
        spans.append((low, high))
        weights.append(weight)
    return Mix(spans, weights)


@dataclass(frozen=True)
class Ask:
    """One request. leave_after: pieces after which the client hangs up; read_per_s: bytes that a slow reader takes."""

    number: int
    text: str
    reply_tokens: int
    leave_after: int | None = None
    read_per_s: int | None = None

    def body(self, model: str, stream: bool, extra: dict[str, Any]) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.reply_tokens,
        }
        if stream:
            # Millpond sends usage anyway; other servers only when asked.
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | extra


@dataclass(frozen=True)
class Shape:
    """Of what requests are made. Shares are from 0 to 1; ending: appended to each prompt."""

    prompt: Mix = field(default_factory=lambda: parse_mix("64"))
    reply: Mix = field(default_factory=lambda: parse_mix("64"))
    shared: float = 0.0
    prefixes: int = 1
    prefix_words: int = 256
    cancelled: float = 0.0
    slow: float = 0.0
    slow_bytes_per_s: int = 1000
    ending: str = ""


def asks(shape: Shape, seed: int) -> Iterator[Ask]:
    """Requests without end."""
    chance = random.Random(seed)
    prefixes = [_words(chance, shape.prefix_words) for _ in range(shape.prefixes)] if shape.shared else []
    number = 0
    while True:
        length, reply = shape.prompt.draw(chance), shape.reply.draw(chance)
        # Drawn for each request, also where it is not used, so that a share changes nothing else.
        kind, which = chance.random(), chance.randrange(1 << 16)
        shared = chance.random() < shape.shared
        text = _words(chance, length)
        if shared:
            text = prefixes[which % len(prefixes)] + "\n" + text
        if shape.ending:
            text += "\n" + shape.ending
        leaves, slow = kind < shape.cancelled, kind >= 1 - shape.slow
        yield Ask(
            number,
            text,
            reply,
            leave_after=which % reply if leaves else None,
            read_per_s=shape.slow_bytes_per_s if slow and not leaves else None,
        )
        number += 1


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times in [0, seconds) of a Poisson process."""
    chance = random.Random(seed)
    times: list[float] = []
    at = chance.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += chance.expovariate(rate)
    return times
