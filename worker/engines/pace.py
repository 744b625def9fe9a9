"""How much of the waiting prompts is read between two decode steps (pure).

Owns the estimate of what a step can read within the stall target. Must never know a clock or the batch: it is told
how long steps took. Invariant: between LEAST and `most` tokens, so that a prompt always moves on.
"""

# On a machine so slow that not even these fit, reading on matters more: each chunk reads all weights once.
LEAST = 16
# What is tried before anything was measured; on a fast device it doubles with every step.
FIRST = 64
# With no row to hold up, only a request that comes meanwhile waits for the end of the chunk; larger ones are read
# faster.
ALONE = 4


class Pace:
    """The tokens that the next step may read."""

    def __init__(self, stall_s: float, most: int) -> None:
        """stall_s: how long a step may take while rows decode. most: tokens in one step at any speed."""
        self._stall_s = stall_s
        self._most = most
        self._per_stall = float(FIRST)

    def allowed(self, decodes: bool) -> int:
        """How many tokens to read now. decodes: rows wait for the step's end."""
        tokens = self._per_stall * (1 if decodes else ALONE)
        return min(max(int(tokens), LEAST), self._most)

    def seconds(self, tokens: int) -> float:
        """About how long it takes to read so many."""
        return tokens * self._stall_s / self._per_stall

    def took(self, allowed: int, read: int, seconds: float) -> None:
        """A step that was allowed so many tokens read so many, and lasted so long in all."""
        # The end of a prompt is too few tokens to tell the speed, unless even they took too long.
        if not read or seconds <= 0 or (2 * read < allowed and seconds < self._stall_s):
            return
        fits = read * self._stall_s / seconds
        self._per_stall = min(max(fits, LEAST), 2 * self._per_stall, float(self._most))
