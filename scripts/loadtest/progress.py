"""The line that shows a load test while it runs.

On a terminal it is drawn over itself; elsewhere (a log, CI) a new line comes now and then. Goes to stderr, so that
stdout holds the result alone.
"""

import sys
import time
from collections import Counter
from typing import TextIO

from scripts.loadtest.stage import Stage

TERMINAL_S, ELSEWHERE_S = 0.5, 5.0
WIDTH = 79


class Progress:
    """Shows a stage."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out = out
        self._terminal = out.isatty()
        self.every_s = TERMINAL_S if self._terminal else ELSEWHERE_S

    def show(self, stage: Stage, pieces_per_s: float) -> None:
        """The stage now."""
        line = progress_line(stage, pieces_per_s, time.monotonic())
        if self._terminal:
            self._out.write("\r" + line[:WIDTH].ljust(WIDTH))
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def close(self) -> None:
        """Leave the terminal's line."""
        if self._terminal:
            self._out.write("\r" + " " * WIDTH + "\r")
            self._out.flush()


def progress_line(stage: Stage, pieces_per_s: float, now: float) -> str:
    """One line about a stage."""
    outcomes = Counter(reply.outcome for reply in stage.replies)
    ends = ", ".join(f"{count} {name}" for name, count in outcomes.most_common()) or "none ended"
    return f"{stage.label}: {now - stage.began_at:.0f} s, {stage.open} open, {pieces_per_s:.0f} pieces/s; {ends}"
