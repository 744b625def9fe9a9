"""Percentiles, summaries, tables, plots and the page of a load test."""

import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from array import array

import pytest

from scripts.loadtest.figures import Limits, percentile, spread, summary
from scripts.loadtest.page import page
from scripts.loadtest.plan import Ask
from scripts.loadtest.plots import Line, Plot, short, svg, ticks
from scripts.loadtest.progress import progress_line
from scripts.loadtest.reply import Reply, Usage
from scripts.loadtest.stage import Stage
from scripts.loadtest.table import Table
from scripts.loadtest.tables import tables, warnings


def test_percentiles_agree_with_the_standard_library() -> None:
    values = sorted(float(number**2 % 97) for number in range(1, 60))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for share in range(1, 100):
        assert percentile(values, share) == pytest.approx(cuts[share - 1])
    assert percentile(values, 0) == values[0] and percentile(values, 100) == values[-1]
    assert percentile([7.0], 99) == 7.0 and math.isnan(percentile([], 50))


def test_a_spread_sorts_its_values_and_nothing_has_none() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.count, found.mean, found.worst) == (3, 2.0, 3.0) and found.percentiles["p50"] == 2.0
    assert len(found.curve) == 101 and found.curve == sorted(found.curve)
    assert spread([]) is None


def reply(outcome: str, first: float = 0.2, tokens: int = 5, gap: float = 0.1, slow: bool = False) -> Reply:
    """A reply that was due at 100 and ended so."""
    one = Reply(Ask(0, "", 8, read_per_s=10 if slow else None), 100.0, 100.01)
    head = {"complete": "200 OK", "failed": "500 X", "refused": "529 X", "left": "200 OK", "slow": "200 OK"}[outcome]
    one.http.feed(f"HTTP/1.1 {head}\r\nretry-after: 4\r\nx-millpond-worker: m-1\r\ncontent-length: 1\r\n\r\n".encode())
    if outcome in ("complete", "slow", "left"):
        one.pieces = array("d", [100.0 + first + gap * number for number in range(tokens)])
    one.ended_at = 100.0 + first + gap * tokens
    if outcome == "complete":
        one.done, one.finishes = True, {0: "stop"}
    else:
        one.problem = "something"
    one.left = outcome == "left"
    one.usage = Usage(prompt_tokens=7, completion_tokens=len(one.pieces))
    return one


def staged(*replies: Reply, kind: str = "closed") -> Stage:
    stage = Stage("4 clients", 4, kind, began_at=100.0, wall_s=2.0, client_cpu_s=0.1)
    stage.replies.extend(replies)
    return stage


def test_a_summary_counts_every_request_once() -> None:
    kinds = ["complete"] * 3 + ["refused"] * 2 + ["failed", "left", "slow"]
    found = summary(staged(*(reply(kind, slow=kind == "slow") for kind in kinds)), Limits())
    assert found.requests == 8 and sum(found.outcomes.values()) == 8
    assert found.outcomes == {"complete": 3, "refused": 2, "failed": 1, "left": 1, "slow": 1}
    assert found.first is not None and found.first.count == 3 and found.gap is not None and found.gap.count == 12
    assert found.tokens == 25 and found.prompt_tokens == 56
    assert found.refusals == {"529": 2} and found.retry_after_s == {"least": 4, "median": 4, "most": 4}
    assert found.served_by == {"m-1": 8} and found.problems == {"something": 1}


def test_goodput_counts_what_keeps_every_limit() -> None:
    replies = [reply("complete", first=0.1), reply("complete", first=0.9), reply("complete", first=0.1, gap=0.4)]
    limits = Limits(first_s=0.5, token_s=0.2, total_s=None)
    found = summary(staged(*replies), limits)
    assert found.good == 1 and found.good_per_s == pytest.approx(1 / found.wall_s)
    assert summary(staged(*replies), Limits()).good == 3
    assert summary(staged(*replies), Limits(total_s=1.5)).good == 2
    assert limits.words() == "first token ≤ 0.5 s, per token ≤ 0.2 s" and Limits().words() == ""


def test_a_slow_readers_tail_does_not_stretch_the_stage() -> None:
    late = reply("complete", first=50.0, slow=True)
    found = summary(staged(reply("complete", first=0.5, tokens=5), late), Limits())
    assert found.wall_s == pytest.approx(1.0) and found.first is not None and found.first.count == 1


def test_nothing_measured_is_shown_and_not_a_crash() -> None:
    empty = summary(staged(), Limits())
    assert [table.text() for table in tables([empty], "")] and warnings([empty]) == []
    assert "nothing was measured" in page("x", {}, [empty], "")


def test_what_makes_figures_doubtful_is_said() -> None:
    stage = staged(reply("failed"), kind="open")
    stage.client_cpu_s, stage.skipped = 1.9, 3
    said = " ".join(warnings([summary(stage, Limits())]))
    assert "95%" in said and "3 arrivals" in said and "something" in said


def test_a_table_lines_up_and_escapes_its_bars() -> None:
    table = Table("T", ("load", "n"), [("a|b", "1"), ("c", "1000")], ("note",))
    assert table.text() == "T\nload     n\n----------\na|b      1\nc     1000\nnote"
    assert table.markdown() == "**T**\n\n| load | n |\n| --- | ---: |\n| a\\|b | 1 |\n| c | 1000 |\n\nnote"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (3, 97), (0, 0.0007), (0, 12345), (5, 5), (1e-9, 2e-9)])
def test_ticks_are_round_and_cover_the_span(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 12 and found[0] <= low + 1e-12 and found[-1] >= high - 1e-12
    assert len(set(map(short, found))) == len(found)


def test_a_plot_is_well_formed_escaped_and_stays_inside() -> None:
    lines = [Line("a<b>", [(1, 10), (2, math.nan), (4, 30)]), Line("one", [(2, 5)]), Line("none", [])]
    drawn = svg(Plot("x & y", "clients", "ms", lines, log_x=True))
    root = ElementTree.fromstring(drawn)
    assert "a&lt;b&gt;" in drawn and "x &amp; y" in drawn and "nan" not in drawn
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.get("cx", "nan")) <= 460 and 0 <= float(circle.get("cy", "nan")) <= 280
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 3


def test_the_page_needs_nothing_from_outside() -> None:
    one = summary(staged(reply("complete"), reply("refused"), reply("failed")), Limits(first_s=1.0))
    text = page("Load test of <m>", {"flags": "--x '<y>'"}, [one, one], "first token ≤ 1 s")
    assert "&lt;m&gt;" in text and "<y>" not in text and "<script" not in text
    addresses = set(re.findall(r"https?://[^\s\"<]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not addresses and not re.search(r"(src|href)=", text)
    assert "1 replies failed" in text or "2 replies failed" in text


def test_the_progress_line_counts_ends() -> None:
    line = progress_line(staged(reply("complete"), reply("refused"), reply("complete")), 12.3, 105.0)
    assert line == "4 clients: 5 s, 0 open, 12 pieces/s; 2 complete, 1 refused"
