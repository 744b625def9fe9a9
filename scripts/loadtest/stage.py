"""One load and what came of it (pure)."""

from dataclasses import dataclass, field

from scripts.loadtest.reply import Reply


@dataclass
class Stage:
    """kind: closed or open loop. x: its clients, or its arrivals per second. skipped: arrivals beyond the client's own
    limit.

    Instants are seconds of the monotonic clock that the replies use too; client_cpu_s: what sending the load cost us.
    """

    label: str
    x: float
    kind: str
    began_at: float = 0.0
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    open: int = 0
    skipped: int = 0
    replies: list[Reply] = field(default_factory=list)
