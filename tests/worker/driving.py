"""What the engine tests share: running an engine and collecting what comes out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.generation import TokenLogprob
from common.ids import RequestId
from worker.engine import Committed, Ended, Engine, Prefilled, Step


def rid(number: int) -> RequestId:
    """A request id that shows its number."""
    return RequestId(number.to_bytes(16, "big"))


@dataclass
class Reply:
    """Everything that an engine gave for one request."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


def collect(replies: dict[RequestId, Reply], steps: list[Step]) -> None:
    """Add steps to the replies; a step after a request's end, or for an unknown one, is an error."""
    for step in steps:
        reply = replies[step.request]
        assert not reply.reason, f"{step} after its end"
        match step:
            case Committed():
                reply.tokens.append(step.token)
                reply.texts.append(step.text)
                reply.logprobs.append(step.logprob)
            case Prefilled():
                reply.reads.append((step.done, step.total))
            case Ended():
                reply.texts.append(step.text)
                reply.reason, reply.error = step.reason, step.error


def drain(engine: Engine, replies: dict[RequestId, Reply], most: int = 10_000) -> dict[RequestId, Reply]:
    """Step until nothing runs."""
    for _ in range(most):
        if not engine.busy:
            return replies
        collect(replies, engine.step())
    raise AssertionError("the engine is still busy")


def run(engine: Engine, requests: Mapping[RequestId, object]) -> dict[RequestId, Reply]:
    """All requests at once, to their end."""
    replies = {}
    for id, request in requests.items():
        engine.start(id, request)  # type: ignore[arg-type]
        replies[id] = Reply()
    return drain(engine, replies)
