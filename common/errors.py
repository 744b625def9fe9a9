"""The three roots of what can go wrong, and nothing else (pure).

ConfigError: what the operator gave cannot work; the process stops with status 2 and the text as its one line.
ProtocolError: a peer sent what is not a message; counted and refused, never fatal.
ServingError: a request cannot be served; carries the outcome that says how it ends.
A broken invariant of our own is an AssertionError and ends the process.
"""

from common.outcomes import Outcome


class MillpondError(Exception):
    """Base of all errors that Millpond raises on purpose."""


class ConfigError(MillpondError):
    """A setting, a file or the machine does not allow what was asked; the text is one line and says what to do."""


class ProtocolError(MillpondError):
    """Bytes from a peer that are not a message of this version."""


class ServingError(MillpondError):
    """A request ends without its reply: `outcome` says how, `retry_after_s` when to try again (None: no advice)."""

    def __init__(self, outcome: Outcome, text: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(text or outcome.value)
        self.outcome = outcome
        self.retry_after_s = retry_after_s
