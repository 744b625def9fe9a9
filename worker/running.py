"""One request inside a worker, from what the engine commits to what the client gets (pure).

Owns the text machines, the usage and the clockwork of one attempt; knows no engine and no socket. The concatenated pieces
are the reply; exactly one Finish ends it.
"""

from collections import deque
from dataclasses import dataclass

from common.generation import CONTENT, GenerationRequest, Piece, Summary, TokenLogprob
from common.ids import RequestId
from common.outcomes import Outcome
from worker.engine import Committed, Ended, Prefilled
from worker.stop_matcher import StopMatcher

# Chunks of a prompt that a trace shows one by one: a 16,000-token prompt in steps of 256.
MOST_MARKS = 64


@dataclass(frozen=True)
class Finish:
    """The end of a request in this worker."""

    outcome: Outcome
    summary: Summary


class Running:
    """The state of one dispatched request. Instants are seconds of the caller's monotonic clock."""

    def __init__(
        self, id: RequestId, attempt: int, label: str, request: GenerationRequest, lane: str, now: float
    ) -> None:
        self.id = id
        self.attempt = attempt
        self.label = label
        self.lane = lane
        self.sequence = 0
        self._request = request
        self._stop = StopMatcher(request.stop)
        self._started_at = now
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._marks: list[tuple[str, float]] = [("taken", now)]
        self._completion = 0
        self._cached = 0
        self._seen = 0
        self._given = 0
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()

    @property
    def halted(self) -> bool:
        """A stop string is complete: the engine must stop, and finish() is due."""
        return self._stop.matched is not None

    def prefilled(self, step: Prefilled, now: float) -> None:
        """A stretch of the prompt was read."""
        self._cached = step.cached
        if len(self._marks) < MOST_MARKS:
            self._marks.append((f"read {step.done} of {step.total}", now))

    def stepped(self, count: int, now: float) -> tuple[float, int]:
        """A step has committed `count` tokens: the mean seconds between tokens, and between how many of them."""
        times = count if self._last_token_at is not None else count - 1
        since = self._last_token_at if self._last_token_at is not None else now
        self._last_token_at = now
        return ((now - since) / times, times) if times else (0.0, 0)

    def committed(self, step: Committed, now: float) -> list[Piece]:
        """A token; the pieces that are certain with it."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._completion += 1
        self._seen += len(step.text)
        if step.logprob is not None:
            self._logprobs.append((self._seen, step.logprob))
        return self._pieces(self._stop.feed(step.text))

    def ended(self, step: Ended, now: float) -> tuple[list[Piece], Finish]:
        """The engine's own end: the last text, through the same machines, and the finish."""
        text = self._stop.feed(step.text)
        self._seen += len(step.text)
        if not self.halted:
            text += self._stop.flush()
        pieces = self._pieces(text, last=not self.halted)
        if step.reason == "failed":
            return pieces, self._finish(Outcome.ENGINE_FAILED, now, step.error, step)
        stopped = self.halted or step.reason == "stop"
        return pieces, self._finish(Outcome.STOP if stopped else Outcome.LENGTH, now, "", step)

    def finish(self, outcome: Outcome, now: float, error: str = "") -> Finish:
        """An end that is not the engine's: a stop string, a cancel, an engine that broke."""
        return self._finish(outcome, now, error, None)

    def _finish(self, outcome: Outcome, now: float, error: str, step: Ended | None) -> Finish:
        first = self._first_token_at if self._first_token_at is not None else now
        return Finish(
            outcome,
            Summary(
                prompt_tokens=len(self._request.prompt),
                completion_tokens=self._completion,
                cached_tokens=self._cached,
                accepted_draft_tokens=step.accepted_draft_tokens if step else 0,
                rejected_draft_tokens=step.rejected_draft_tokens if step else 0,
                lane=self.lane,
                prefill_ms=(first - self._started_at) * 1000,
                decode_ms=(now - first) * 1000,
                first_token_ms=(first - self._started_at) * 1000,
                error=error,
                marks=self._all_marks(now),
            ),
        )

    def _all_marks(self, now: float) -> list[tuple[str, float]]:
        first = [("first token", self._first_token_at)] if self._first_token_at is not None else []
        return [*self._marks, *first, ("done", now)]

    def _pieces(self, text: str, *, last: bool = False) -> list[Piece]:
        self._given += len(text)
        logprobs = []
        # A token's logprobs leave with the last of its text; at the end also those of tokens without any.
        while self._logprobs and (self._logprobs[0][0] <= self._given or last) and (text or last):
            logprobs.append(self._logprobs.popleft()[1])
        return [Piece(CONTENT, text, logprobs)] if text or logprobs else []
