"""docs/benchmarks.md: the tables between markers are a benchmark's, everything else is written by hand.

A block lies between <!-- bench:NAME --> and <!-- /bench:NAME -->. Invariant: writing one block leaves every other byte
of the document as it was; a block that is not there yet comes at the end.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.goals import Report
from scripts.loadtest.plots import svg

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
PLOTS = "plots"


def write(report: Report, about: Sequence[str], document: Path = DOCUMENT) -> None:
    """Put a report's block into the document, and its plots beside it."""
    folder = document.parent / PLOTS
    parts = ["  \n".join(about), *(table.markdown() for table in report.tables)]
    for number, plot in enumerate(report.plots):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{report.name}-{number}.svg"
        (folder / name).write_text(svg(plot, background="#ffffff") + "\n", encoding="utf-8")
        parts.append(f"![{plot.title}]({PLOTS}/{name})")
    text = document.read_text(encoding="utf-8") if document.exists() else ""
    document.write_text(with_block(text, report.name, "\n\n".join(parts)), encoding="utf-8")


def with_block(text: str, name: str, block: str) -> str:
    """`text` with the block of this name replaced, or added at the end."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    whole = f"{begin}\n{block}\n{end}"
    pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    if pattern.search(text):
        # A function, because a replacement text would have its backslashes read.
        return pattern.sub(lambda _: whole, text, count=1)
    return f"{text.rstrip()}\n\n## {name}\n\n{whole}\n".lstrip()
