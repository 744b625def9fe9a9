"""Server-sent events out of bytes, cut anywhere (pure).

Only `data` matters to a chat; comments and other fields are dropped, as the standard says. Invariant: an event is given
once, when its blank line has come, with the newlines between its data lines kept.
"""


class EventReader:
    """The data of events, in order."""

    def __init__(self) -> None:
        self._held = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """The events that `body` completes."""
        self._held += body
        # A CR at the very end may be half of a line end.
        end = len(self._held) - 1 if self._held.endswith(b"\r") else len(self._held)
        ready, rest = self._held[:end], self._held[end:]
        *lines, last = ready.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._held = last + rest
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events

    @property
    def unfinished(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._held.strip() or self._data)
