"""Server-sent events as bytes (pure).

Owns the framing: every event is one `data: ` line of JSON and a blank line, so nothing inside may be taken for a line
break. Knows nothing of what the JSON says. Invariant: json_text() of any text holds no character at which some
client's reader would split a line.
"""

import msgspec

DONE = b"data: [DONE]\n\n"
# Clients skip comments; proxies and read timeouts see that the stream lives.
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode
# JSON lets these stand as they are, but Python's str.splitlines (httpx' iter_lines among others) breaks lines at them.
_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_text(text: str) -> bytes:
    """`text` as a JSON string: raw UTF-8, as json.dumps(ensure_ascii=False) but for U+0085, U+2028 and U+2029."""
    encoded = _encode(text)
    return encoded if text.isascii() else guarded(encoded)


def guarded(encoded: bytes) -> bytes:
    """JSON with the same escaped: outside of its strings they cannot stand."""
    for found, escape in _BREAKS:
        if found in encoded:
            encoded = encoded.replace(found, escape)
    return encoded


def event(data: bytes) -> bytes:
    """One event whose data is this line."""
    return b"data: " + data + b"\n\n"
