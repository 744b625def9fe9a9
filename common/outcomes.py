"""Every way in which a request can be refused or can end (pure).

An outcome is a value that crosses processes; the API turns it into a status (api/responses), the broker counts it by its
kind. There is exactly one outcome per request.
"""

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. The comment at each says who decides it and when."""

    # finished: the worker, in DONE
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    # cancelled
    CANCELLED = "cancelled"  # api or operator: nobody waits for the reply any more
    # refused: the broker before a place is given, at SUBMIT, or the worker when it looks at the shape
    QUEUE_FULL = "queue_full"
    NO_WORKER = "no_worker"
    MODEL_FAILED = "model_failed"
    DRAINING = "draining"
    UNKNOWN_MODEL = "unknown_model"
    TOO_MANY_PLACES = "too_many_places"  # more places in one request than the model will ever have
    TOO_LONG = "too_long"  # prompt and reply fit no empty worker
    STALE_MODEL = "stale_model"  # rendered for a tokenizer or template that is no longer served
    UNSUPPORTED = "unsupported"  # no lane of this worker can honour the request's shape
    DUPLICATE = "duplicate"  # an id that is already in use
    NOT_RESERVED = "not_reserved"  # SUBMIT without a live reservation (it expired)
    # timed out: the broker
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    # failed
    ENGINE_FAILED = "engine_failed"  # worker: the step raised or the row became invalid
    WORKER_LOST = "worker_lost"  # broker: the worker died after its first relayed TOKENS
    POISONED = "poisoned"  # broker: two workers died under this request
    BROKER_LOST = "broker_lost"  # api: its session with the broker ended
    STREAM_BROKEN = "stream_broken"  # api: a gap in seq
    SHUTDOWN = "shutdown"  # cut at the end of the drain

    @property
    def kind(self) -> str:
        """finished, cancelled, refused, timeout or failed."""
        return _KINDS[self]


_KINDS = {
    **dict.fromkeys((Outcome.STOP, Outcome.LENGTH, Outcome.TOOL_CALLS), "finished"),
    Outcome.CANCELLED: "cancelled",
    **dict.fromkeys(
        (
            Outcome.QUEUE_FULL,
            Outcome.NO_WORKER,
            Outcome.MODEL_FAILED,
            Outcome.DRAINING,
            Outcome.UNKNOWN_MODEL,
            Outcome.TOO_MANY_PLACES,
            Outcome.TOO_LONG,
            Outcome.STALE_MODEL,
            Outcome.UNSUPPORTED,
            Outcome.DUPLICATE,
            Outcome.NOT_RESERVED,
        ),
        "refused",
    ),
    **dict.fromkeys((Outcome.QUEUE_TIMEOUT, Outcome.REQUEST_TIMEOUT), "timeout"),
    **dict.fromkeys(
        (
            Outcome.ENGINE_FAILED,
            Outcome.WORKER_LOST,
            Outcome.POISONED,
            Outcome.BROKER_LOST,
            Outcome.STREAM_BROKEN,
            Outcome.SHUTDOWN,
        ),
        "failed",
    ),
}
