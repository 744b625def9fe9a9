"""One HTTP/1.1 response, read in whatever pieces the socket gives (pure).

Owns framing: the head, a body by length, in chunks or until the connection's end. Must never know what the body means.
Invariant: `whole` is true only if the response ended as its framing says, so a cut stream can never pass for a short
one.
"""

from collections.abc import Callable

# No server of this kind sends a head of more than a few kilobytes.
_MAX_HEAD = 65536


class Malformed(ValueError):
    """Bytes that are no HTTP/1.1 response."""


class HttpReply:
    """A response being read."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.whole = False
        self._held = b""
        self._read = self._head
        self._left = 0
        self._version = b""

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request now."""
        closes = self.headers.get("connection", "").lower() == "close"
        return self.whole and not closes and self._version == b"HTTP/1.1" and not self._held

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in `data`. Raises Malformed."""
        self._held += data
        body = b""
        while self._held and not self.whole:
            before = len(self._held), self._read
            body += self._read()
            if (len(self._held), self._read) == before:
                break
        return body

    def ended(self) -> bool:
        """The connection has ended; whether the response is whole."""
        if self._read == self._until_close:
            self.whole = True
        return self.whole

    def _head(self) -> bytes:
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) > _MAX_HEAD:
                raise Malformed("a head without end")
            return b""
        first, *lines = self._held[:end].split(b"\r\n")
        self._held = self._held[end + 4 :]
        parts = first.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise Malformed(f"no status line: {first[:80]!r}")
        if parts[1].startswith(b"1"):
            return b""  # an interim response; the real one follows
        self._version, self.status = parts[0], int(parts[1])
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon:
                raise Malformed(f"no header: {line[:80]!r}")
            self.headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        self._read = self._framing()
        return b""

    def _framing(self) -> Callable[[], bytes]:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return self._chunk_size
        length = self.headers.get("content-length")
        if length is None and self.status not in (204, 304):
            return self._until_close
        if length is not None and not length.isdigit():
            raise Malformed(f"content-length {length!r}")
        self._left = int(length or 0)
        self.whole = self._left == 0
        return self._sized

    def _sized(self) -> bytes:
        body = self._take()
        self.whole = self._left == 0
        return body

    def _until_close(self) -> bytes:
        body, self._held = self._held, b""
        return body

    def _chunk_size(self) -> bytes:
        end = self._held.find(b"\r\n")
        if end < 0:
            return b""
        try:
            self._left = int(self._held[:end].split(b";")[0], 16)
        except ValueError:
            raise Malformed(f"chunk size {self._held[:end][:80]!r}") from None
        self._held = self._held[end + 2 :]
        self._read = self._chunk if self._left else self._trailers
        return b""

    def _chunk(self) -> bytes:
        body = self._take()
        if self._left == 0:
            self._read = self._chunk_end
        return body

    def _chunk_end(self) -> bytes:
        if len(self._held) >= 2:
            if self._held[:2] != b"\r\n":
                raise Malformed("a chunk longer than its size")
            self._held = self._held[2:]
            self._read = self._chunk_size
        return b""

    def _trailers(self) -> bytes:
        end = self._held.find(b"\r\n")
        if end >= 0:
            self.whole = end == 0
            self._held = self._held[end + 2 :]
        return b""

    def _take(self) -> bytes:
        body, self._held = self._held[: self._left], self._held[self._left :]
        self._left -= len(body)
        return body
