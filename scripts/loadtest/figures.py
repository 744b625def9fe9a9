"""Percentiles and summaries of what a load did (pure).

Latencies count complete replies of ordinary readers only: one who hangs up or reads slowly measures himself. Goodput
counts complete replies within every limit that was given. Invariant: the outcomes of a summary add up to its requests.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.loadtest.reply import OUTCOMES, Reply
from scripts.loadtest.stage import Stage

SHARES = (50.0, 90.0, 95.0, 99.0)


def percentile(values: Sequence[float], share: float) -> float:
    """The `share`-th percentile (0 to 100) of sorted values, between neighbours by straight line; nan of nothing."""
    if not values:
        return math.nan
    place = (len(values) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


@dataclass(frozen=True)
class Limits:
    """What a good reply keeps to; None: anything. token_s: mean time per token after the first."""

    first_s: float | None = None
    token_s: float | None = None
    total_s: float | None = None

    def kept(self, reply: Reply) -> bool:
        """Whether a complete reply is good."""
        pairs = ((self.first_s, reply.first_s), (self.token_s, reply.token_s), (self.total_s, reply.total_s))
        return all(limit is None or value <= limit for limit, value in pairs)

    def words(self) -> str:
        """For a heading; "" without limits."""
        named = (("first token", self.first_s), ("per token", self.token_s), ("whole reply", self.total_s))
        return ", ".join(f"{name} ≤ {limit:g} s" for name, limit in named if limit is not None)


@dataclass(frozen=True)
class Spread:
    """One quantity over many replies. curve: a hundred percentiles, for a plot."""

    count: int
    mean: float
    worst: float
    percentiles: dict[str, float]
    curve: list[float]


def spread(values: Iterable[float]) -> Spread | None:
    """None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    named = {f"p{share:g}": percentile(ordered, share) for share in SHARES}
    curve = [percentile(ordered, share) for share in range(101)]
    return Spread(len(ordered), math.fsum(ordered) / len(ordered), ordered[-1], named, curve)


@dataclass(frozen=True)
class Summary:
    """One stage in figures. Seconds, and rates per second of wall time."""

    label: str
    x: float
    kind: str
    wall_s: float
    requests: int
    outcomes: dict[str, int]
    skipped: int
    prompt_tokens: int
    tokens: int
    tokens_per_s: float
    replies_per_s: float
    good: int
    good_per_s: float
    good_tokens_per_s: float
    first: Spread | None
    gap: Spread | None
    per_token: Spread | None
    total: Spread | None
    refusal: Spread | None
    refusals: dict[str, int]
    retry_after_s: dict[str, float]
    without_advice: int
    served_by: dict[str, int]
    finishes: dict[str, int]
    client_share: float
    latest_send_s: float
    problems: dict[str, int]
    examples: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summary(stage: Stage, limits: Limits) -> Summary:
    """A finished stage in figures."""
    replies = stage.replies
    outcomes = Counter(reply.outcome for reply in replies)
    whole = [reply for reply in replies if reply.outcome == "complete"]
    timed = [reply for reply in whole if reply.pieces and reply.ask.read_per_s is None]
    refused = [reply for reply in replies if reply.outcome == "refused"]
    failed = [reply for reply in replies if reply.outcome == "failed"]
    good = [reply for reply in timed if limits.kept(reply)]
    advice = sorted(reply.retry_after_s for reply in refused if reply.retry_after_s is not None)
    # A slow reader's tail is his own; the stage is over when the last ordinary one has ended.
    ordinary = [reply.ended_at for reply in replies if reply.ask.read_per_s is None]
    wall = max(max(ordinary) - stage.began_at if ordinary else stage.wall_s, 1e-9)
    # What was generated counts whoever took it; what was cut off before its usage counts by its pieces.
    tokens = sum(reply.tokens for reply in replies)
    return Summary(
        label=stage.label,
        x=stage.x,
        kind=stage.kind,
        wall_s=wall,
        requests=len(replies),
        outcomes={name: outcomes[name] for name in OUTCOMES},
        skipped=stage.skipped,
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        tokens=tokens,
        tokens_per_s=tokens / wall,
        replies_per_s=len(whole) / wall,
        good=len(good),
        good_per_s=len(good) / wall,
        good_tokens_per_s=sum(reply.tokens for reply in good) / wall,
        first=spread(reply.first_s for reply in timed),
        gap=spread(gap for reply in timed for gap in reply.gaps),
        per_token=spread(reply.token_s for reply in timed if len(reply.pieces) > 1),
        total=spread(reply.total_s for reply in timed),
        refusal=spread(reply.total_s for reply in refused),
        refusals=dict(Counter(f"{reply.http.status} {reply.code}".rstrip() for reply in refused)),
        retry_after_s={"least": advice[0], "median": percentile(advice, 50), "most": advice[-1]} if advice else {},
        without_advice=len(refused) - len(advice),
        served_by=dict(Counter(filter(None, (reply.http.headers.get("x-millpond-worker") for reply in replies)))),
        finishes=dict(Counter(reason for reply in whole for reason in reply.finishes.values())),
        client_share=stage.client_cpu_s / max(stage.wall_s, 1e-9),
        latest_send_s=max((reply.sent_at - reply.due_at for reply in replies), default=0.0),
        problems=dict(Counter(reply.problem for reply in failed)),
        examples=[f"{reply.http.headers.get('x-request-id', 'no id')}: {reply.problem}" for reply in failed[:5]],
    )
