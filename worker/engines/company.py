"""How long prompts that come to an idle engine wait for company (pure).

Owns that rule. Must never know a clock or what is read: it is told. Invariant: nobody waits for longer than GAP_S after
the last arrival, nor for longer than a tenth of the time that reading the prompts takes. What a cache has of them is not
known yet and counts as well, which costs the second bound, never the first.

Requests that are sent at once arrive a millisecond or two apart, since the API handles one after the other. Were the
first one read at once, all others would be read in pieces between its tokens; together they are read in long strides,
and draw their tokens in the same steps from the first to the last.
"""

GAP_S = 0.005
SHARE = 0.1


class Company:
    """The prompts that wait for each other."""

    def __init__(self, gap_s: float = GAP_S) -> None:
        """gap_s 0: nobody waits."""
        self._gap_s = gap_s
        self._first_at = self._last_at = self._reading_s = 0.0
        self._empty = True

    def came(self, now: float, reading_s: float) -> None:
        """One more, whose prompt takes about so long to read."""
        if self._empty:
            self._first_at, self._reading_s = now, 0.0
        self._empty = False
        self._last_at = now
        self._reading_s += reading_s

    def left(self) -> None:
        """They are being read: the next one begins a new company."""
        self._empty = True

    def due_in(self, now: float) -> float:
        """Seconds until they should be read."""
        due_at = min(self._last_at + self._gap_s, self._first_at + SHARE * self._reading_s)
        return 0.0 if self._empty else max(0.0, due_at - now)
