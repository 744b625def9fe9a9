"""What the server itself refuses, in words a client can act on (pure).

gunicorn's parser raises errors whose text is often only the offending word. Knows its error types by their names, which
both of its parsers share, and no sockets. Invariant: what a client sent is shown short and quoted, never as the whole text.
"""

from collections.abc import Iterable

from api.fields import shown
from api.responses import API_ERROR, INVALID, RequestError

# By type name; {word}: what the client sent, {said}: the parser's own sentence.
_SENTENCES = {
    "LimitRequestLine": "The request line is too long.",
    "LimitRequestHeaders": "The request has too many headers, or one that is too long.",
    "InvalidRequestLine": "The request line must be a method, a target and HTTP/1.1, parted by single spaces.",
    "InvalidRequestMethod": "{word} is not a valid request method.",
    "InvalidHTTPVersion": "{word} is not a supported version of HTTP; use HTTP/1.1.",
    "InvalidHeaderName": "{word} is not a valid header name.",
    "InvalidHeader": "A request header is not valid: {said}.",
    "UnsupportedTransferCoding": "The transfer coding {word} is not supported; use chunked alone, or Content-Length.",
    "InvalidChunkSize": "The chunked request body is not valid: {said}.",
    "InvalidChunkExtension": "The chunked request body is not valid: {said}.",
    "ChunkMissingTerminator": "The chunked request body is not valid: {said}.",
}


def refusal(status: int, said: str, error: BaseException | None) -> RequestError:
    """The answer for what the server refuses with this status. said: its own text; error: what it stumbled over."""
    if status >= 500 and type(error).__name__ not in _SENTENCES:
        # A fault of ours; its text is not for clients.
        return RequestError(status, "Internal error.", kind=API_ERROR)
    sentence = _SENTENCES.get(type(error).__name__, "The request is not valid HTTP: {said}.")
    message = sentence.format(word=shown(said), said=said.rstrip(".")[:200])
    return RequestError(status, message, kind=INVALID)


def coded(headers: Iterable[tuple[bytes, bytes]]) -> RequestError | None:
    """The answer for a body in a transfer coding other than chunked, which the server lets through if chunked is the
    last: what it then took for the body would be something else than was sent (RFC 9112, 6.1). headers: names in small
    letters."""
    for name, value in headers:
        if name == b"transfer-encoding":
            for coding in value.split(b","):
                if coding.strip(b" \t").lower() != b"chunked":
                    word = shown(coding.strip(b" \t").decode("latin-1"))
                    message = _SENTENCES["UnsupportedTransferCoding"].format(word=word)
                    return RequestError(501, message, headers={"connection": "close"}, outcome="malformed")
    return None
