"""How every refusal and failure looks to a client: status, type, code, words, headers (pure).

One table from outcome to answer, one shape of body for all of them. Knows no sockets and no Falcon. Invariant: a
failure's text names the kind of error, never its message or a path; only a client's own mistake is described in
detail.
"""

import json
import math
from dataclasses import dataclass, field

import msgspec

from common.errors import ServingError
from common.outcomes import Outcome

_encode = msgspec.json.Encoder().encode

INVALID, AUTHENTICATION = "invalid_request_error", "authentication_error"
OVERLOADED, API_ERROR = "overloaded_error", "api_error"

# Advice when nothing is measured: the worker pool is back within a few seconds of a crash.
RETRY_AFTER_S = 2


class RequestError(Exception):
    """A request that is answered with an error: everything the answer needs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        outcome: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers or {}
        # What the request's log line and the counters call it.
        self.outcome = outcome or code or "invalid"

    def body(self) -> bytes:
        """The error as the contract's JSON."""
        return error_body(self.message, self.kind, self.code, self.param)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    """{"error":{"message","type","code","param"}}, compact, keys in that order."""
    error = {"error": {"message": message, "type": kind, "code": code, "param": param}}
    try:
        return _encode(error)
    except UnicodeEncodeError:
        # Half of a surrogate pair, out of a client's own text.
        return json.dumps(error, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass(frozen=True)
class _Answer:
    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    retry: bool = False
    fields: dict[str, str] = field(default_factory=dict)


_FAILED = "Generation failed ({error}). Retry shortly."
_ANSWERS = {
    Outcome.QUEUE_FULL: _Answer(
        529, OVERLOADED, "Text generation is at capacity. Retry shortly.", "queue_full", retry=True
    ),
    Outcome.QUEUE_TIMEOUT: _Answer(
        503, OVERLOADED, "The request waited too long for a free slot. Retry shortly.", "queue_timeout", retry=True
    ),
    Outcome.NO_WORKER: _Answer(503, API_ERROR, "No worker serves this model now.", "no_worker", retry=True),
    Outcome.MODEL_FAILED: _Answer(503, API_ERROR, "This model's workers fail to start.", "no_worker", retry=True),
    Outcome.DRAINING: _Answer(503, API_ERROR, "The server is shutting down.", "draining", retry=True),
    Outcome.UNKNOWN_MODEL: _Answer(404, INVALID, "This model is not served.", "model_not_found", "model"),
    Outcome.TOO_MANY_PLACES: _Answer(
        400, INVALID, "n asks for more choices at once than this server can ever hold.", param="n"
    ),
    Outcome.TOO_LONG: _Answer(
        400,
        INVALID,
        "The prompt and max_tokens together fit no worker's memory; shorten the prompt or lower max_tokens.",
        "context_length_exceeded",
        "messages",
    ),
    Outcome.STALE_MODEL: _Answer(503, API_ERROR, "The model is being replaced. Retry shortly.", retry=True),
    Outcome.DUPLICATE: _Answer(503, API_ERROR, _FAILED, retry=True),
    Outcome.NOT_RESERVED: _Answer(503, API_ERROR, _FAILED, retry=True),
    Outcome.REQUEST_TIMEOUT: _Answer(504, API_ERROR, "The request took longer than this server allows."),
    Outcome.CANCELLED: _Answer(503, API_ERROR, "The request was cancelled by the operator."),
}

# What a worker may name as unsupported, and the request field that asked for it.
_FIELD_OF_NEED = {"grammar": "response_format", "tools": "tools", "logprobs": "logprobs"}


def request_error(error: ServingError) -> RequestError:
    """The answer for a request that ended before its 200. The error's text: type name of what failed, or what is
    unsupported."""
    outcome = error.outcome
    detail = "" if str(error) == outcome.value else str(error)
    if outcome is Outcome.UNSUPPORTED:
        return _unsupported(detail)
    answer = _ANSWERS.get(outcome) or _Answer(503, API_ERROR, _FAILED, retry=True)
    headers = {"retry-after": retry_after(error.retry_after_s)} if answer.retry else {}
    return RequestError(
        answer.status,
        answer.message.format(error=detail or outcome.value),
        kind=answer.kind,
        code=answer.code,
        param=answer.param,
        headers=headers,
        outcome=outcome.value,
    )


def retry_after(seconds: float | None) -> str:
    """Whole seconds, rounded up: a client that comes a little late is served, one that comes early is refused again."""
    return str(max(1, math.ceil(seconds))) if seconds else str(RETRY_AFTER_S)


def _unsupported(need: str) -> RequestError:
    param = _FIELD_OF_NEED.get(need, need or None)
    message = f"{param} is not supported by this model." if param else "This model cannot serve this kind of request."
    return RequestError(400, message, param=param, outcome=Outcome.UNSUPPORTED.value)


def stream_error(outcome: Outcome, detail: str = "") -> bytes:
    """The error object of a stream that fails after its 200."""
    return request_error(ServingError(outcome, detail)).body()


def not_found() -> RequestError:
    """404 for a path that is no route."""
    return RequestError(404, "There is no such route.", outcome="not_found")


def method_not_allowed(method: str, allowed: str) -> RequestError:
    """405 with Allow."""
    return RequestError(
        405, f"{method} is not allowed here; {allowed} is.", headers={"allow": allowed}, outcome="method"
    )


def body_too_large(limit: int) -> RequestError:
    """413; the rest of the body is not read, so the connection ends."""
    return RequestError(
        413,
        f"The request body is larger than {limit} bytes.",
        headers={"connection": "close"},
        outcome="body_too_large",
    )


def refused_length() -> RequestError:
    """400 for a Content-Length that is no number."""
    return RequestError(400, "Content-Length is not a number.", headers={"connection": "close"})


def internal_error(kind: str) -> RequestError:
    """500: a fault of our own, of which the client learns the type."""
    return RequestError(500, f"Internal error ({kind}).", kind=API_ERROR, outcome="internal_error")


def body_timeout(seconds: float) -> RequestError:
    """408 for a body that did not arrive."""
    return RequestError(
        408,
        f"The request body did not arrive within {seconds:g} s.",
        headers={"connection": "close"},
        outcome="body_timeout",
    )


def model_not_found(name: str, served: list[str]) -> RequestError:
    """404 that names what is served."""
    name = name if len(name) <= 100 else name[:97] + "..."
    return RequestError(
        404, f"Model {name!r} not found. Available: {', '.join(served)}.", code="model_not_found", param="model"
    )


def unauthorized() -> RequestError:
    """401; whether a key was missing or wrong is not said."""
    headers = {"www-authenticate": "Bearer"}
    return RequestError(
        401, "A valid API key is required.", kind=AUTHENTICATION, headers=headers, outcome="unauthorized"
    )
