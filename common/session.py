"""The peer's side of a broker session (pure).

A session is greeting (HELLO sent, no WELCOME yet), live, or over. Whatever ends it (silence, REFUSED, a new epoch, a send
that would block) the owner drops all it had from the broker, takes a fresh routing id and opens a new Session: a session
never comes back to life. Instants are seconds of one monotonic clock, given by the caller.
"""

from dataclasses import dataclass

from common.envelope import Heartbeat, Hello, Message, Refused, Welcome

# A peer that hears nothing for this long takes the broker for dead; five times the heartbeat, as the broker does with peers.
SILENCE_S = 5.0
# A HELLO is answered within a poll of the broker's loop; a broker that needs longer is not there.
WELCOME_S = 2.0
HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class Send:
    """Effect: give this message to the socket."""

    message: Message


@dataclass(frozen=True)
class Joined:
    """Effect: the session is live."""

    epoch: str


@dataclass(frozen=True)
class Lost:
    """Effect: the session is over, once; drop everything that came through it."""

    reason: str


Effect = Send | Joined | Lost


class Session:
    """One life of one peer at one broker."""

    def __init__(self, hello: Hello, *, silence_s: float = SILENCE_S, welcome_s: float = WELCOME_S) -> None:
        self._hello = hello
        self._silence_s = silence_s
        self._welcome_s = welcome_s
        self._heartbeat_s = HEARTBEAT_S
        self.state = "new"
        self.epoch = ""
        self._heard_at = 0.0
        self._sent_at = 0.0

    @property
    def live(self) -> bool:
        """WELCOME has come and nothing has ended the session."""
        return self.state == "live"

    def open(self, now: float) -> list[Effect]:
        """Say HELLO."""
        assert self.state == "new", self.state
        self.state = "greeting"
        self._heard_at = self._sent_at = now
        return [Send(self._hello)]

    def heard(self, message: Message, now: float) -> list[Effect]:
        """A message came. Only WELCOME and REFUSED concern the session; the rest proves that the broker lives."""
        if self.state == "over":
            return []
        self._heard_at = now
        if isinstance(message, Refused):
            return self.end(f"refused: {message.reason}")
        if isinstance(message, Welcome):
            if self.state == "live":
                return self.end("welcomed twice") if message.epoch != self.epoch else []
            self.state = "live"
            self.epoch = message.epoch
            self._heartbeat_s = message.heartbeat_ms / 1000
            return [Joined(message.epoch)]
        return []

    def sent(self, now: float) -> None:
        """Something left for the broker, so no heartbeat is due for an interval."""
        self._sent_at = now

    def tick(self, now: float) -> list[Effect]:
        """Time passed: heartbeat when due, the end after silence."""
        if self.state == "greeting" and now - self._heard_at > self._welcome_s:
            return self.end("no welcome")
        if self.state == "live":
            if now - self._heard_at > self._silence_s:
                return self.end("silence")
            if now - self._sent_at >= self._heartbeat_s:
                return [Send(Heartbeat())]
        return []

    def end(self, reason: str) -> list[Effect]:
        """End the session for a reason of the owner's (a send that would block)."""
        if self.state == "over":
            return []
        self.state = "over"
        return [Lost(reason)]
