"""`millpond trace REQUEST_ID`: where a recent request spent its time, from the broker's ring.

The marks of API, broker and worker are instants of one monotonic clock (they run on one machine), so they form one line.
"""

import argparse
from typing import Any

from common.errors import MillpondError, ProtocolError
from common.generation import unpack_marks, unpack_summary
from scripts.status import connect


def register(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser("trace", help="where a recent request spent its time")
    command.add_argument("request_id", help="its x-request-id")
    command.add_argument("--port", default=None, help="port of the instance (default: MILLPOND_PORT or 8080)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print every request with this id: a chat with n choices has n."""
    with connect(arguments) as client:
        traces = client.traces(arguments.request_id)
    if not traces:
        raise MillpondError(f"no recent request {arguments.request_id!r}; the broker keeps the latest ones only")
    for trace in traces:
        print("\n".join(told(trace)))
    return 0


def marks_of(trace: dict[str, Any]) -> list[tuple[float, str, str]]:
    """(instant, who, what), in order of time."""
    marks = [(at, "broker", name) for name, at in trace["marks"]]
    try:
        marks += [(at, "api", name) for name, at in unpack_marks(trace["api_payload"])]
        marks += [(at, "worker", name) for name, at in unpack_summary(trace["worker_payload"]).marks]
    except ProtocolError:
        marks.append((marks[-1][0], "?", "marks of another version"))
    return sorted(marks, key=lambda mark: mark[0])


def told(trace: dict[str, Any]) -> list[str]:
    """The lines for one request."""
    workers = " then ".join(trace["workers"]) or "no worker"
    head = f"{trace['label']}  {trace['model']}  {trace['lane'] or 'no lane'} on {workers}  {trace['outcome'] or 'still there'}"
    lines = [head, f"{'ms':>10} {'after':>9}  who     what"]
    marks = marks_of(trace)
    before = marks[0][0]
    for at, who, what in marks:
        lines.append(f"{(at - marks[0][0]) * 1000:>10.1f} {(at - before) * 1000:>+9.1f}  {who:<7} {what}")
        before = at
    return lines
