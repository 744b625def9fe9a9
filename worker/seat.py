"""A request in its slot: what it holds of the engine, and the pieces that have not left yet (pure).

Knows when its pieces may wait for the next step's, and never sends them itself. Invariant: its pieces leave in order,
the first at once, and none is known to wait longer than COALESCE_S.
"""

from dataclasses import dataclass, field

from common.envelope import Tokens
from common.generation import Piece, pack_pieces
from worker.placement import Plan
from worker.running import Running

# How long a piece may wait for the next one: it saves frames where steps are quicker, and a reader sees no difference.
COALESCE_S = 0.025


@dataclass
class Seat:
    """One running request. session: the one with the broker that it came by."""

    session: int
    running: Running
    plan: Plan
    pieces: list[Piece] = field(default_factory=list)
    _since: float = 0.0

    def keep(self, pieces: list[Piece], now: float) -> None:
        """Pieces to send; those of one step travel in one frame."""
        if pieces and not self.pieces:
            self._since = now
        self.pieces += pieces

    def due(self, next_at: float) -> bool:
        """Whether its pieces must leave before the next step, which comes at this instant."""
        if not self.pieces or not self.running.sequence:
            return bool(self.pieces)
        # The next step may be another row's: this one's own pace says when it will have more.
        return max(next_at, self.running.next_token_at) >= self._since + COALESCE_S

    def frame(self) -> tuple[Tokens, bytes]:
        """What it kept, as the next message and its payload."""
        running = self.running
        pieces, self.pieces = self.pieces, []
        message = Tokens(running.id, running.attempt, running.sequence)
        running.sequence += 1
        return message, pack_pieces(pieces)
