"""Who is connected, as what, and when they were last heard (pure).

A peer is here from its accepted HELLO until it is lost; its id is never used twice. The roster decides nothing about
requests: the switchboard asks it who a peer is and who has gone silent or stuck.
"""

from dataclasses import dataclass

from common.envelope import Child, Hello, Report
from common.ids import PeerId


@dataclass(slots=True)
class PeerRecord:
    """One live session. report: the latest, None before the first. said_goodbye: it has asked for no new work."""

    id: PeerId
    role: str
    name: str
    pid: int
    host: str
    heard_at: float
    joined_at: float
    report: Report | None = None
    reported_at: float = 0.0
    said_goodbye: bool = False


class Roster:
    """All live sessions, and what the pool says of its children."""

    def __init__(self, silence_s: float, stuck_s: float) -> None:
        self._silence_s = silence_s
        self._stuck_s = stuck_s
        self.peers: dict[PeerId, PeerRecord] = {}
        self.children: dict[str, Child] = {}

    def join(self, peer: PeerId, hello: Hello, now: float) -> None:
        """A session begins."""
        self.peers[peer] = PeerRecord(peer, hello.role, hello.name, hello.pid, hello.host, now, now)

    def leave(self, peer: PeerId) -> PeerRecord | None:
        """A session is over."""
        return self.peers.pop(peer, None)

    def of_role(self, role: str) -> list[PeerRecord]:
        """All live sessions of a role."""
        return [record for record in self.peers.values() if record.role == role]

    def named(self, role: str, name: str) -> list[PeerRecord]:
        """Live sessions of a role under one name: more than one only while a newer replaces an older."""
        return [record for record in self.of_role(role) if record.name == name]

    def silent(self, now: float) -> list[PeerRecord]:
        """Peers unheard for too long: frozen, or gone without a word."""
        return [record for record in self.peers.values() if now - record.heard_at > self._silence_s]

    def stuck(self) -> list[PeerRecord]:
        """Workers whose engine has had work and finished no step for too long, by their own report."""
        limit_ms = self._stuck_s * 1000
        return [
            record
            for record in self.peers.values()
            if record.role == "worker" and record.report is not None and record.report.step_age_ms > limit_ms
        ]

    def exited(self, children: list[Child]) -> list[PeerRecord]:
        """Take over the pool's list; the workers whose process is not the one that is connected, or was in the last list
        and is not in this one."""
        before, self.children = self.children, {child.name: child for child in children}
        gone = []
        for record in self.of_role("worker"):
            child = self.children.get(record.name)
            if child is None:
                left = record.name in before and before[record.name].pid == record.pid
            else:
                left = child.pid != record.pid or child.state in ("backoff", "failed")
            if left:
                gone.append(record)
        return gone

    def replaces(self, hello: Hello) -> list[PeerRecord]:
        """Sessions that this HELLO makes obsolete: the same worker or pool under an older id."""
        return self.named(hello.role, hello.name) if hello.role in ("worker", "pool") else []
