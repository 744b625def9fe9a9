"""One request inside a worker, from what the engine commits to what the client gets (pure).

Owns the sink, the usage and the clockwork of one attempt; knows no engine and no socket. The concatenated pieces are
the reply; exactly one Finish ends it, and its usage is what was counted as the pieces were made, however it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.generation import GenerationRequest, Piece, Summary
from common.ids import RequestId
from common.outcomes import Outcome
from worker.engine import Committed, Ended, Markup, Prefilled
from worker.placement import lane_that_ran
from worker.sink import Sink

# Chunks of a prompt that a trace shows one by one: a 16,000-token prompt in steps of 256.
MOST_MARKS = 64


@dataclass(frozen=True)
class Finish:
    """The end of a request in this worker."""

    outcome: Outcome
    summary: Summary


@dataclass
class Usage:
    """Tokens of a request up to now. completion: every one that the model committed, shown or not."""

    prompt: int
    cached: int = 0
    completion: int = 0
    accepted_draft: int = 0
    rejected_draft: int = 0


class Running:
    """The state of one dispatched request. Instants are seconds of the caller's monotonic clock."""

    def __init__(
        self,
        id: RequestId,
        attempt: int,
        label: str,
        request: GenerationRequest,
        lane: str,
        now: float,
        markup: Markup | None = None,
        reasons: Sequence[str] = (),
    ) -> None:
        """markup: the model's. reasons: why this lane, for the trace where there was a choice. Raises ProtocolError for a request that contradicts itself."""
        self.id = id
        self.attempt = attempt
        self.label = label
        self.lane = lane
        self.sequence = 0
        self.usage = Usage(len(request.prompt))
        self._sink = Sink(request, markup)
        self._started_at = now
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        # As the last step's pace promises; in the past until there is a pace.
        self.next_token_at = 0.0
        self._marks: list[tuple[str, float]] = [(f"taken ({'; '.join(reasons)})" if len(reasons) > 1 else "taken", now)]

    @property
    def halted(self) -> bool:
        """Nothing more can come of it: the engine must stop, and finish() is due."""
        return self._sink.halted

    @property
    def decoding(self) -> bool:
        """Its prompt is read: from now on each step is a token."""
        return self._first_token_at is not None

    def prefilled(self, step: Prefilled, now: float) -> None:
        """A stretch of the prompt was read."""
        # The last prompt token is always computed: the first new one comes from it.
        self.usage.cached = min(step.cached, self.usage.prompt - 1)
        if len(self._marks) < MOST_MARKS:
            self._marks.append((f"read {step.done} of {step.total}", now))

    def stepped(self, count: int, now: float) -> tuple[float, int]:
        """A step has committed `count` tokens: the mean seconds between tokens, and between how many of them."""
        times = count if self._last_token_at is not None else count - 1
        since = self._last_token_at if self._last_token_at is not None else now
        self._last_token_at = now
        if not times:
            return 0.0, 0
        interval_s = (now - since) / times
        self.next_token_at = now + interval_s
        return interval_s, times

    def committed(self, step: Committed, now: float) -> list[Piece]:
        """A token; the pieces that are certain with it."""
        if self._first_token_at is None:
            self._first_token_at = now
        self.usage.completion += 1
        self.usage.accepted_draft += step.from_draft
        self.usage.rejected_draft += step.rejected_drafts
        return self._sink.feed(step.token, step.text, step.logprob)

    def ended(self, step: Ended, now: float) -> tuple[list[Piece], Finish]:
        """The engine's own end: the last text, through the same machines, and the finish."""
        # The engine's statistics are the better count: they also know what it drafted in vain.
        self.usage.accepted_draft = max(self.usage.accepted_draft, step.accepted_draft_tokens)
        self.usage.rejected_draft = max(self.usage.rejected_draft, step.rejected_draft_tokens)
        self.lane = lane_that_ran(self.lane, self.usage.accepted_draft, self.usage.rejected_draft)
        outcomes = {"failed": Outcome.ENGINE_FAILED, "stop": Outcome.STOP}
        return self.finish(outcomes.get(step.reason, Outcome.LENGTH), now, step.error, step.text)

    def finish(self, outcome: Outcome, now: float, error: str = "", text: str = "") -> tuple[list[Piece], Finish]:
        """The end, with the last pieces. outcome: the engine's own, or why there is none of it."""
        pieces = self._sink.finish(text)
        if outcome.kind == "finished":
            outcome = self._reason(outcome)
        return pieces, Finish(outcome, self._summary(now, error))

    def _reason(self, own: Outcome) -> Outcome:
        """Calls come before a stop string, that before the engine's own reason."""
        if self._sink.called:
            return Outcome.TOOL_CALLS
        return Outcome.STOP if self._sink.stopped else own

    def _summary(self, now: float, error: str) -> Summary:
        first = self._first_token_at if self._first_token_at is not None else now
        usage = self.usage
        return Summary(
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            cached_tokens=usage.cached,
            reasoning_tokens=self._sink.reasoning_tokens,
            accepted_draft_tokens=usage.accepted_draft,
            rejected_draft_tokens=usage.rejected_draft,
            lane=self.lane,
            prefill_ms=(first - self._started_at) * 1000,
            decode_ms=(now - first) * 1000,
            first_token_ms=(first - self._started_at) * 1000,
            error=error,
            marks=self._all_marks(now),
        )

    def _all_marks(self, now: float) -> list[tuple[str, float]]:
        first = [("first token", self._first_token_at)] if self._first_token_at is not None else []
        return [*self._marks, *first, ("done", now)]
