"""`millpond logs [-f]`: the log files of all processes of an instance as one, in order of time.

Lines are ordered by their own instants; a line without one (a traceback's) stays with the line before it.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import MillpondError
from scripts.status import place_of

POLL_S = 0.2
_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}")


def register(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser("logs", help="the log of all processes of an instance")
    command.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    command.add_argument("-n", "--lines", type=int, default=0, help="only the last so many lines")
    command.add_argument("--port", default=None, help="port of the instance (default: MILLPOND_PORT or 8080)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print, and follow if asked."""
    folder = place_of(arguments).logs
    if not folder.is_dir():
        raise MillpondError(f"there is no log folder {folder}")
    tails = Tails(folder)
    entries = tails.new()
    for _, text in entries[-arguments.lines :] if arguments.lines > 0 else entries:
        print(text)
    while arguments.follow:
        sys.stdout.flush()
        time.sleep(POLL_S)
        for _, text in tails.new():
            print(text)
    return 0


def instant(line: str) -> str | None:
    """A line's own instant, as text that sorts; None: it has none."""
    if line.startswith("{"):
        try:
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at := json.loads(line)["at"])) + f".{int(at % 1 * 1000):03d}"
        except (ValueError, KeyError, TypeError):
            return None
    found = _TEXT.match(line)
    return found[0] if found else None


def merged(files: list[list[str]]) -> list[tuple[str, str]]:
    """(instant, text) of the lines of several files, in order of time; lines without an instant joined to the one before."""
    entries: list[tuple[str, str]] = []
    for lines in files:
        mine: list[tuple[str, str]] = []
        for line in lines:
            at = instant(line)
            if at is None and mine:
                mine[-1] = mine[-1][0], f"{mine[-1][1]}\n{line}"
            else:
                mine.append((at or "", line))
        entries += mine
    return sorted(entries, key=lambda entry: entry[0])


class Tails:
    """What is new in a folder's log files, rotated ones included."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, int] = {}

    def new(self) -> list[tuple[str, str]]:
        """Lines since the last call, in order of time."""
        return merged([list(self._lines(path)) for path in sorted(self._folder.glob("*.log*"), reverse=True)])

    def _lines(self, path: Path) -> Iterator[str]:
        try:
            with path.open("rb") as file:
                # By inode: a rotated file goes on being the same one under its new name.
                inode = path.stat().st_ino
                file.seek(self._read.get(inode, 0))
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read[inode] = self._read.get(inode, 0) + len(whole)
        yield from whole.decode("utf-8", "replace").splitlines()
