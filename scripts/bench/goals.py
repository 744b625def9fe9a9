"""Figures with their goals, as rows of a table (pure).

A figure is the median of its repetitions and is shown with their range. Invariant: whether a goal is met is judged by
the median alone and is always shown beside it, so that a missed goal cannot hide.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.loadtest.plots import Plot
from scripts.loadtest.table import Table

HEADER = ("figure", "median", "range", "goal", "")


@dataclass(frozen=True)
class Figure:
    """One figure over its repetitions. form: how a value is written. most/least: the goal, if there is one."""

    name: str
    values: Sequence[float]
    form: str = "{:.3g}"
    most: float | None = None
    least: float | None = None

    @property
    def median(self) -> float:
        """What counts."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """None: there is no goal."""
        if self.most is not None:
            return self.median <= self.most
        return self.median >= self.least if self.least is not None else None

    def row(self) -> tuple[str, ...]:
        """Cells under HEADER."""
        shown = [self.form.format(value) for value in (self.median, min(self.values), max(self.values))]
        goal = ""
        if self.most is not None:
            goal = "≤ " + self.form.format(self.most)
        elif self.least is not None:
            goal = "≥ " + self.form.format(self.least)
        span = f"{shown[1]} to {shown[2]}" if len(self.values) > 1 else ""
        return self.name, shown[0], span, goal, {True: "met", False: "missed", None: ""}[self.met]


@dataclass(frozen=True)
class Report:
    """What one benchmark found."""

    name: str
    tables: Sequence[Table]
    figures: Sequence[Figure]
    plots: Sequence[Plot] = field(default_factory=tuple)


def table(title: str, figures: Sequence[Figure], notes: Sequence[str] = ()) -> Table:
    """A table of figures."""
    return Table(title, HEADER, [figure.row() for figure in figures], notes)
