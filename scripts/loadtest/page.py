"""A load test as one HTML page that opens anywhere without a network (pure)."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from scripts.loadtest.figures import Spread, Summary
from scripts.loadtest.plots import Line, Plot, svg
from scripts.loadtest.table import Table
from scripts.loadtest.tables import tables

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } caption { text-align: left; font-weight: bold; padding: .4em 0; }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { overflow-x: auto; background: #8881; padding: .6em; }
.bad { color: #d55e00; font-weight: bold; }
"""


def page(heading: str, told: dict[str, Any], summaries: Sequence[Summary], limits: str) -> str:
    """The page. told: what was run, shown as it is."""
    problems = sum(summary.outcomes["failed"] for summary in summaries)
    verdict = (
        f'<p class="bad">{problems} replies failed or were not whole; see the table of ends.</p>'
        if problems
        else "<p>Every reply that was accepted was whole.</p>"
    )
    facts = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in told.items()
    )
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{escape(heading)}</title><style>{STYLE}</style>',
        f"<h1>{escape(heading)}</h1>",
        verdict,
        '<div class="plots">' + "".join(f"<div>{svg(plot)}</div>" for plot in plots(summaries, limits)) + "</div>",
        *(f'<div class="wide">{_table(table)}</div>' for table in tables(summaries, limits)),
        f'<h2>What was run</h2><div class="wide"><table>{facts}</table></div></html>',
    ]
    return "\n".join(parts) + "\n"


def plots(summaries: Sequence[Summary], limits: str) -> list[Plot]:
    """All pictures."""
    kinds = {summary.kind for summary in summaries}
    x_name = "clients at once" if kinds == {"closed"} else "requests per second" if kinds == {"open"} else "load"
    log = len(summaries) > 2

    def against_load(title: str, y_name: str, series: dict[str, Callable[[Summary], float]]) -> Plot:
        lines = [Line(name, [(one.x, value(one)) for one in summaries]) for name, value in series.items()]
        return Plot(title, x_name, y_name, lines, log_x=log)

    def percentiles(which: str, scale: float) -> dict[str, Callable[[Summary], float]]:
        return {name: _at(which, name, scale) for name in ("p50", "p90", "p99")}

    rates: dict[str, Callable[[Summary], float]] = {"all": lambda one: one.tokens_per_s}
    if limits:
        rates["good (" + limits + ")"] = lambda one: one.good_tokens_per_s
    return [
        against_load("Throughput", "tokens per second", rates),
        against_load("Time to first token", "ms", percentiles("first", 1000)),
        against_load("Time between tokens", "ms", percentiles("gap", 1000)),
        against_load("Whole replies", "seconds", percentiles("total", 1)),
        against_load(
            "Ends", "requests", {name: _ended(name) for name in ("complete", "refused", "failed", "left", "slow")}
        ),
        _curves("Time to first token, every percentile", "ms", summaries, lambda one: one.first, 1000),
        _curves("Time between tokens, every percentile", "ms", summaries, lambda one: one.gap, 1000),
        _curves("Whole replies, every percentile", "seconds", summaries, lambda one: one.total, 1),
    ]


def _at(which: str, name: str, scale: float) -> Callable[[Summary], float]:
    def value(one: Summary) -> float:
        spread: Spread | None = getattr(one, which)
        return spread.percentiles[name] * scale if spread else float("nan")

    return value


def _ended(name: str) -> Callable[[Summary], float]:
    return lambda one: one.outcomes[name]


def _curves(
    title: str, y_name: str, summaries: Sequence[Summary], which: Callable[[Summary], Spread | None], scale: float
) -> Plot:
    lines = []
    # More curves than colours cannot be told apart: the first, the last and some between.
    for one in summaries[:: max(1, (len(summaries) + 5) // 6)]:
        found = which(one)
        lines.append(
            Line(one.label, [(share, value * scale) for share, value in enumerate(found.curve)] if found else [])
        )
    return Plot(title, "percentile", y_name, lines)


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table><caption>{escape(table.title)}</caption>{row(table.header, 'th')}{body}</table>{notes}"
