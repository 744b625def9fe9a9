"""Cross-origin requests, for origins that the operator listed (pure).

Decides headers from headers; sends nothing. Invariant: without a listed origin no answer differs from one without CORS.
"""

import re
from collections.abc import Iterable, Sequence

from api.routes import Route

Headers = list[tuple[bytes, bytes]]

# What a page may want to read of an answer.
_EXPOSED = b"x-request-id, x-millpond-worker, x-millpond-lane, x-millpond-ignored, retry-after, server-timing"
_FIELD_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")
# Browsers keep a preflight's answer at most this long or less.
_MAX_AGE = b"600"


class Cors:
    """origins: exact ones, or * for all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def allowed(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """What to add to every answer to this request."""
        if not self._origins:
            return []
        origin = _value(headers, b"origin")
        if not origin or not self._origins & {origin, b"*"}:
            return [(b"vary", b"origin")]
        return [
            (b"vary", b"origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
        ]

    def preflight(self, headers: Iterable[tuple[bytes, bytes]], route: Route) -> Headers | None:
        """The headers of a preflight's answer, beside allowed(); None: this is not one, or not for this origin."""
        origin = _value(headers, b"origin")
        if not origin or not self._origins & {origin, b"*"} or not _value(headers, b"access-control-request-method"):
            return None
        wanted = _value(headers, b"access-control-request-headers")
        answer = [(b"access-control-allow-methods", route.allowed.encode()), (b"access-control-max-age", _MAX_AGE)]
        if _FIELD_NAMES.fullmatch(wanted):
            answer.append((b"access-control-allow-headers", wanted))
        return answer


def _value(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")
