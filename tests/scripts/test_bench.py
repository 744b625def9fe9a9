"""The benchmarks' own bookkeeping: goals, the document, and a short real run of some."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import document, machine
from scripts.bench.goals import Figure, Report, table
from scripts.bench.meter import alternating
from scripts.loadtest.plots import Line, Plot


def test_the_median_decides_and_a_missed_goal_shows() -> None:
    most = Figure("cost, µs", [9.0, 30.0, 11.0], "{:.0f}", most=20.0)
    assert most.row() == ("cost, µs", "11", "9 to 30", "≤ 20", "met")
    least = Figure("ratio", [5.5, 5.9, 6.5], "{:.1f}", least=6.0)
    assert least.row() == ("ratio", "5.9", "5.5 to 6.5", "≥ 6.0", "missed")
    assert Figure("plain", [4.0], "{:.0f}").row() == ("plain", "4", "", "", "")


def test_a_block_replaces_only_itself() -> None:
    text = "# T\n\nby hand\n\n<!-- bench:a -->\nold\n<!-- /bench:a -->\n\nmore \\1\n"
    text += "<!-- bench:ab -->\nx\n<!-- /bench:ab -->\n"
    written = document.with_block(text, "a", "new \\2")
    assert written == text.replace("old", "new \\2")
    assert document.with_block(written, "a", "new \\2") == written
    added = document.with_block(text, "c", "third")
    assert added.startswith(text.rstrip()) and added.endswith("<!-- bench:c -->\nthird\n<!-- /bench:c -->\n")


def test_a_report_is_written_with_its_machine_and_plots(tmp_path: Path) -> None:
    figure = Figure("cost", [1.0], most=2.0)
    plot = Plot("P", "x", "y", [Line("l", [(1, 2)])])
    report = Report("a", [table("T", [figure])], [figure], [plot])
    path = tmp_path / "benchmarks.md"
    path.write_text("# Hand-written\n\n<!-- bench:a -->\n<!-- /bench:a -->\n\nend\n")
    document.write(report, machine.about("python -m scripts.bench a"), path)
    text = path.read_text()
    assert text.startswith("# Hand-written\n") and text.endswith("\nend\n")
    assert "`python -m scripts.bench a`" in text and "cores" in text and "| cost | 1 |" in text
    assert "![P](plots/a-0.svg)" in text and (tmp_path / "plots" / "a-0.svg").read_text().startswith("<svg")


def test_measurements_alternate() -> None:
    order: list[str] = []
    results = alternating(2, lambda: order.append("A"), lambda: order.append("B"))
    assert order == ["A", "B", "A", "B"] and results == [[None, None], [None, None]]


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("relay", ("broker CPU per frame at half load", "no gap in any run")),
        ("capacity", ("streams at once", "Every level that was tried")),
        ("latency", ("made to read, p99", "request sent to first token")),
        ("overload", ("goodput / peak", "a refusal, from when it was due, p99")),
        ("sized", ("HTTP / BatchGenerator, 16", "16 streams, ours / mlx_lm.server")),
    ],
)
def test_it_is_measured_between_real_processes(name: str, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "scripts.bench", name, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words)
