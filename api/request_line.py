"""What is known of one HTTP request, and the one log line that says it at its end.

Filled in by whoever learns something; written once by the middleware. Holds no body, header value, key or query
string, so none can be logged. Invariant: every field is a name, a number or a word of ours.
"""

import logging
import secrets
import time
from dataclasses import dataclass, field

from api.exchange import Exchange
from api.keys import NOBODY, Key
from common import logs
from common.outcomes import Outcome

_FAILURES = {outcome.value for outcome in Outcome if outcome.kind == "failed"} | {"internal_error"}

_PROBES = frozenset({"/health", "/health/ready", "/metrics"})


@dataclass
class RequestLine:
    """One request. label: its x-request-id. outcome: an Outcome's value or a refusal's word. exchange: closed at its
    end."""

    label: str
    method: str = ""
    route: str = ""
    key: Key = NOBODY
    status: int = 0
    outcome: str = ""
    model: str = ""
    stream: bool = False
    lane: str = ""
    worker: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    gone: bool = False
    exchange: Exchange | None = None
    began_at: float = field(default_factory=time.monotonic)
    # What `millpond trace` shows of the API's part.
    marks: list[tuple[str, float]] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """The request has passed this point now."""
        self.marks.append((name, time.monotonic()))

    def elapsed_ms(self) -> float:
        """Since the request's headers were read."""
        return (time.monotonic() - self.began_at) * 1000

    def write(self) -> None:
        """The log line: info for whatever clients do, warning for what is ours."""
        level = self._level()
        if not logs.logger.isEnabledFor(level):
            return
        fields = {
            "id": self.label,
            "method": self.method,
            "route": self.route or "-",
            "status": 499 if self.gone else self.status,
            "outcome": "client_gone" if self.gone else self.outcome or "answered",
        }
        if self.key.name:
            fields["key"] = self.key.name
        if self.model:
            fields |= {"model": self.model, "stream": int(self.stream), "lane": self.lane, "worker": self.worker}
            fields |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
            fields |= {"queue_ms": _ms(self.queue_ms), "ttft_ms": _ms(self.ttft_ms)}
        logs.event("request", level, **fields, total_ms=_ms(self.elapsed_ms()))

    def _level(self) -> int:
        if self.outcome in _FAILURES and not self.gone:
            return logging.WARNING
        # Probes come several times a second and say nothing new.
        return logging.DEBUG if self.route in _PROBES else logging.INFO


def new_label() -> str:
    """An x-request-id for a request that brought none."""
    return f"req_{secrets.token_hex(16)}"


def _ms(value: float) -> str:
    return f"{value:.1f}"
