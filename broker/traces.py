"""A bounded ring of recent requests: when each passed which point, on which worker and lane (pure).

Instants are seconds of the machine's monotonic clock, which all processes on it share, so that the marks of API, broker and
worker form one line. What API and worker say of their own parts is kept as bytes and never opened here.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from common.ids import RequestId

# A busy hour of a small instance; about 1 kB each.
ROOM = 2000


@dataclass(slots=True)
class Trace:
    """One request. marks: (name, instant). worker_payload: Summary; api_payload: marks; both as they came."""

    request: RequestId
    label: str
    model: str
    marks: list[tuple[str, float]] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    lane: str = ""
    outcome: str = ""
    worker_payload: bytes = b""
    api_payload: bytes = b""


class Traces:
    """The latest ROOM requests by id, oldest first."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._traces: OrderedDict[RequestId, Trace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def begin(self, request: RequestId, label: str, model: str, now: float) -> None:
        """A place was given."""
        self._traces[request] = Trace(request, label, model, [("reserved", now)])
        if len(self._traces) > self._room:
            self._traces.popitem(last=False)

    def mark(self, request: RequestId, name: str, now: float) -> Trace | None:
        """It passed a point; None when it is not kept any more."""
        trace = self._traces.get(request)
        if trace is not None:
            trace.marks.append((name, now))
        return trace

    def get(self, request: RequestId) -> Trace | None:
        """The trace of a request, None when it is not kept any more."""
        return self._traces.get(request)

    def labelled(self, label: str) -> list[dict[str, Any]]:
        """All kept requests with this label, as plain values for a payload."""
        return [
            {
                "request": trace.request.hex(),
                "label": trace.label,
                "model": trace.model,
                "marks": [list(mark) for mark in trace.marks],
                "workers": trace.workers,
                "lane": trace.lane,
                "outcome": trace.outcome,
                "worker_payload": trace.worker_payload,
                "api_payload": trace.api_payload,
            }
            for trace in self._traces.values()
            if trace.label == label
        ]
