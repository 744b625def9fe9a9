"""The next marker in streamed text (pure).

A marker is found as a stop string is: the one that is complete first wins, and no text is held back that cannot
become one any more. Knows nothing of what markers mean. Invariant: what was fed is what came out, in order: text,
marker, rest.
"""

from collections.abc import Collection

from worker.stop_matcher import StopMatcher


class Seeker:
    """Finds one marker; after it, or after flush(), a new seeker takes the rest."""

    def __init__(self, markers: Collection[str]) -> None:
        self._matcher = StopMatcher(tuple(markers))
        self._firsts = {marker[0] for marker in markers}
        self._held = 0

    def feed(self, text: str) -> tuple[str, str, str]:
        """(text before the marker as far as it is certain, the marker or "", what follows the marker)."""
        # Most text has nothing to do with markers, and looking for a character is much cheaper than the rest.
        if not self._held and not any(first in text for first in self._firsts):
            return text, "", ""
        whole = self._held + len(text)
        before = self._matcher.feed(text)
        marker = self._matcher.matched
        if marker is None:
            self._held = whole - len(before)
            return before, "", ""
        return before, marker, text[len(text) - (whole - len(before) - len(marker)) :]

    def flush(self) -> str:
        """No more text comes, or another seeker takes it: what was held."""
        return self._matcher.flush()
