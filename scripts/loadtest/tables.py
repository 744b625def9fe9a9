"""What a load test found, as tables (pure)."""

from collections.abc import Sequence

from scripts.loadtest.figures import Spread, Summary
from scripts.loadtest.reply import OUTCOMES
from scripts.loadtest.table import Table

# Past this share of a core the client's own work begins to show in what it measures.
BUSY_CLIENT = 0.8


def tables(summaries: Sequence[Summary], limits: str) -> list[Table]:
    """Rates, latencies, ends, and what else is worth a word."""
    found = [_rates(summaries, limits), _latencies(summaries), _ends(summaries)]
    return [*found, *([_refusals(summaries)] if any(one.outcomes["refused"] for one in summaries) else [])]


def warnings(summaries: Sequence[Summary]) -> list[str]:
    """What makes the figures doubtful or the server's work incomplete."""
    lines = []
    for one in summaries:
        if one.client_share > BUSY_CLIENT:
            lines.append(f"{one.label}: the client used {one.client_share:.0%} of a core; it may be what was measured")
        if one.skipped:
            lines.append(f"{one.label}: {one.skipped} arrivals were not sent, too many were open (--most-open)")
        if one.kind == "open" and one.latest_send_s > 0.25:
            lines.append(f"{one.label}: a request was sent {one.latest_send_s:.2f} s late by the client itself")
        if one.without_advice:
            lines.append(f"{one.label}: {one.without_advice} refusals came without retry-after")
        for problem, count in one.problems.items():
            lines.append(f"{one.label}: {count} failed: {problem}")
        lines += [f"{one.label}: for example {example}" for example in one.examples[:2]]
    return lines


def _rates(summaries: Sequence[Summary], limits: str) -> Table:
    header = ["load", "seconds", "requests", "tokens", "tokens/s", "replies/s", "good/s", "good tokens/s", "client CPU"]
    rows = [
        (
            one.label,
            f"{one.wall_s:.1f}",
            str(one.requests),
            str(one.tokens),
            f"{one.tokens_per_s:.1f}",
            f"{one.replies_per_s:.2f}",
            f"{one.good_per_s:.2f}",
            f"{one.good_tokens_per_s:.1f}",
            f"{one.client_share:.0%}",
        )
        for one in summaries
    ]
    notes = (f"good: {limits}",) if limits else ()
    return Table("Throughput", header, rows, notes)


def _latencies(summaries: Sequence[Summary]) -> Table:
    header = ["load", "replies", "", "mean", "p50", "p90", "p95", "p99", "most"]
    rows = []
    for one in summaries:
        named = (
            ("first token ms", one.first, 1000),
            ("between tokens ms", one.gap, 1000),
            ("per token ms", one.per_token, 1000),
            ("whole reply s", one.total, 1),
        )
        for name, spread, scale in named:
            rows.append((one.label, str(spread.count if spread else 0), name, *_cells(spread, scale)))
    return Table("Latency of complete replies", header, rows)


def _cells(spread: Spread | None, scale: float) -> list[str]:
    if spread is None:
        return ["-"] * 6
    values = [spread.mean, *spread.percentiles.values(), spread.worst]
    return [f"{value * scale:.1f}" if scale > 1 else f"{value:.2f}" for value in values]


def _ends(summaries: Sequence[Summary]) -> Table:
    header = ["load", *OUTCOMES, "finish reasons", "served by"]
    rows = [
        (
            one.label,
            *(str(one.outcomes[name]) for name in OUTCOMES),
            _counts(one.finishes),
            _counts(one.served_by),
        )
        for one in summaries
    ]
    notes = ("left: hung up by our own plan; slow: a slow reader whom the server cut off",)
    return Table("Ends", header, rows, notes)


def _refusals(summaries: Sequence[Summary]) -> Table:
    header = ["load", "refusals", "retry-after s (least, median, most)", "p50 ms", "p99 ms"]
    rows = []
    for one in summaries:
        advice = ", ".join(f"{value:g}" for value in one.retry_after_s.values()) or "-"
        times = (
            [f"{one.refusal.percentiles[name] * 1000:.1f}" for name in ("p50", "p99")] if one.refusal else ["-", "-"]
        )
        rows.append((one.label, _counts(one.refusals), advice, *times))
    return Table("Refusals", header, rows)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "-"
