"""Stop strings in streamed text (pure).

The match that is complete first wins (ties: the one that began first), so that the result does not depend on how the text
was cut; nothing from its first character on is ever given out, and text that may still become a stop string is held back no
longer than that.
"""

from collections.abc import Sequence


class StopMatcher:
    """Feeds text through; after a match it gives nothing more."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain now. Sets `matched` when a stop string is complete."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start]
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """No more text comes: what was held is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = start + len(stop), start, stop
        return (best[1], best[2]) if best else None

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
