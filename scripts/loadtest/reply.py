"""What came back for one request, and whether it was a whole reply (pure: times come in).

Owns the judgement: complete, refused, left (by our own plan), slow (a slow reader whom the server cut off) or failed.
Invariant: complete means status 200, one finish per choice, [DONE] where the stream has one, and a body that ended as
its framing says; anything less carries a problem in words.
"""

from array import array
from typing import Any

import msgspec

from scripts.loadtest.events import EventReader
from scripts.loadtest.http_reply import HttpReply, Malformed
from scripts.loadtest.plan import Ask

REFUSALS = frozenset({429, 503, 529})
OUTCOMES = ("complete", "refused", "failed", "left", "slow")


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: Any = None
    message: Any = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Reply:
    """One request's answer while it comes and afterwards. Instants are seconds of one monotonic clock."""

    def __init__(self, ask: Ask, due_at: float, sent_at: float) -> None:
        self.ask = ask
        self.due_at, self.sent_at = due_at, sent_at
        self.accepted_at = self.ended_at = 0.0
        # When each piece of text came.
        self.pieces: array[float] = array("d")
        self.finishes: dict[int, str] = {}
        self.done = False
        self.usage: Usage | None = None
        self.left = False
        self.problem = ""
        self.code = ""
        self.http = HttpReply()
        self._events = EventReader()
        self._body = b""

    # -- while it comes

    def feed(self, data: bytes, now: float) -> int:
        """Bytes came; how many pieces of text were in them."""
        before = len(self.pieces)
        try:
            body = self.http.feed(data)
        except Malformed as error:
            self.problem = self.problem or str(error)
            return 0
        if self.http.status and not self.accepted_at:
            self.accepted_at = now
        if body:
            if self._streamed:
                for event in self._events.feed(body):
                    self._take(event, now)
            else:
                self._body += body
        return len(self.pieces) - before

    def end(self, now: float, problem: str = "") -> None:
        """The response is whole, or the connection has ended, or we gave up for the reason given."""
        self.ended_at = now
        self.problem = self.problem or problem
        if self.http.status and not self._streamed:
            self._judge_body()
        if not self.problem:
            self.problem = self._fault()
        self._body = b""

    @property
    def over(self) -> bool:
        """Nothing more can come."""
        return self.http.whole or bool(self.problem)

    @property
    def _streamed(self) -> bool:
        return self.http.status == 200 and self.http.headers.get("content-type", "").startswith("text/event-stream")

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self.problem = self.problem or f"an event is no chunk: {error}"
            return
        if event.error is not None:
            self.problem = self.problem or "an error event: " + _words_of(event.error)
        self._count(event, now)

    def _count(self, event: _Event, now: float) -> None:
        self.usage = event.usage or self.usage
        for choice in event.choices:
            delta = choice.delta
            if (
                choice.text
                or choice.message
                or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
            ):
                self.pieces.append(now)
            if choice.finish_reason:
                if choice.index in self.finishes:
                    self.problem = self.problem or "a second finish"
                self.finishes[choice.index] = choice.finish_reason

    def _judge_body(self) -> None:
        try:
            event = _decode(self._body)
        except msgspec.DecodeError:
            self.problem = self.problem or "the body is no JSON of this protocol"
            return
        if isinstance(event.error, dict):
            self.code = str(event.error.get("code") or event.error.get("type") or "")
        self._count(event, self.ended_at)
        self.done = True

    def _fault(self) -> str:
        if not self.http.status:
            return "no answer"
        if self.http.status != 200:
            return f"status {self.http.status} {self.code}".rstrip()
        if not self.http.whole:
            return "the connection was cut"
        if not self.done:
            return "the stream ended without [DONE]"
        if not self.finishes:
            return "no finish reason"
        return "the stream ended inside an event" if self._events.unfinished else ""

    # -- afterwards

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        if self.left:
            return "left"
        if self.http.status in REFUSALS:
            return "refused"
        if not self.problem:
            return "complete"
        # What a slow reader gets may end early, but only ever by a cut after a 200.
        slow = self.ask.read_per_s is not None and self.http.status == 200 and not self.done
        return "slow" if slow else "failed"

    @property
    def retry_after_s(self) -> float | None:
        """The server's advice."""
        try:
            return float(self.http.headers["retry-after"])
        except (KeyError, ValueError):
            return None

    @property
    def tokens(self) -> int:
        """Generated tokens as the server counts them, or else pieces."""
        return self.usage.completion_tokens if self.usage else len(self.pieces)

    @property
    def prompt_tokens(self) -> int:
        """As the server counts them; 0 when it does not say."""
        return self.usage.prompt_tokens if self.usage else 0

    @property
    def first_s(self) -> float:
        """From when it was due to its first piece."""
        return self.pieces[0] - self.due_at

    @property
    def total_s(self) -> float:
        """From when it was due to its end."""
        return self.ended_at - self.due_at

    @property
    def token_s(self) -> float:
        """Mean time per token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between pieces."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]


def _words_of(error: Any) -> str:
    return str(error.get("message") or error)[:200] if isinstance(error, dict) else str(error)[:200]
