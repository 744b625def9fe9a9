"""What the client gets of each token that a model commits (pure).

Chains the text machines: router, then markers and stop strings, then tool calls; and keeps which token's text went
where, for the logprobs and the count of reasoning tokens. Must never know an engine or a clock. Rules: 1. What was said
first leaves first. 2. No piece is empty. 3. The pieces joined do not depend on how tokens cut the text. 4. Logprobs
leave with the content that their token ended in; tokens of reasoning, calls and markers show none, as in OpenAI's API.
"""

from collections import deque
from dataclasses import replace

from common.generation import CONTENT, REASONING, TOOL_CALL, GenerationRequest, Piece, TokenLogprob
from worker.engine import Markup
from worker.reasoning import ABANDONS, BODY, CLOSES, HIDDEN, OPENS, ReasoningSplitter, Stretch
from worker.tool_calls import Event, Offer, ToolCalls, read_offer

_PLAIN = Markup()


class Sink:
    """The text machines of one reply."""

    def __init__(self, request: GenerationRequest, markup: Markup | None = None) -> None:
        """markup: the model's; None: it has none. Raises ProtocolError for tools that are none."""
        offer = read_offer(request.tools)
        self._markup = _markup_for(request, markup or _PLAIN, offer)
        tools = bool(offer.definitions and self._markup.parse)
        self._splitter = ReasoningSplitter(
            self._markup,
            request.stop,
            tools=tools,
            reasoning_open=request.reasoning_open,
            stop_in_reasoning=request.stop_in_reasoning,
            plain_answer=bool(request.grammar) and not offer.forced,
        )
        self._calls = ToolCalls(self._markup, offer)
        self._tokens = _Tokens()
        self._last = CONTENT
        self._late: list[TokenLogprob] = []

    @property
    def stopped(self) -> bool:
        """A stop string is complete."""
        return self._splitter.stopped

    @property
    def halted(self) -> bool:
        """Nothing more can come out, so the engine must stop."""
        return self._splitter.stopped or self._calls.enough

    @property
    def called(self) -> bool:
        """The reply is a call of tools, and no call in it was cut off."""
        return self._calls.found > 0 and not self._calls.unfinished

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far whose text was reasoning."""
        return self._tokens.reasoning

    def feed(self, token: int, text: str, logprob: TokenLogprob | None = None) -> list[Piece]:
        """A token and the text that became known with it; the pieces that are certain now."""
        if self.halted:
            return []
        text = text or self._markup.router.written(token)
        self._tokens.add(len(text), logprob)
        return self._pieces(self._events(text))

    def finish(self, text: str = "") -> list[Piece]:
        """The reply is over, with this last text: everything that was held back."""
        if self._calls.enough:
            return []
        events = self._events(text)
        if not self.stopped:
            events += self._take(self._splitter.flush())
        if self._calls.is_open and not self._calls.enough:
            events += self._calls.close()
        pieces = self._pieces(events)
        if not self.stopped:
            self._late += self._tokens.rest(self._last)
        if self._late:
            pieces.append(Piece(CONTENT, "", self._take_late()))
        return pieces

    def _events(self, text: str) -> list[Event]:
        return self._take(self._splitter.feed(text)) if text else []

    def _take(self, stretches: list[Stretch]) -> list[Event]:
        events: list[Event] = []
        calls = self._calls
        for kind, text, home in stretches:
            if calls.enough:
                break
            if kind in (CONTENT, REASONING, HIDDEN):
                events.append(Event(kind, text, len(text)))
            elif kind == OPENS:
                calls.open(text, home)
            elif kind == BODY:
                events += calls.feed(text)
            elif kind == CLOSES:
                events += calls.close(text)
            elif kind == ABANDONS:
                events += calls.give_up()
        return events

    def _pieces(self, events: list[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            self._late += self._tokens.settle(event.raw, event.channel)
            self._last = event.channel
            if event.channel == TOOL_CALL:
                pieces.append(Piece(TOOL_CALL, event.text, [], event.call, event.name))
                continue
            text = self._markup.router.hidden(event.text) if event.channel != HIDDEN else ""
            if text:
                logprobs = self._take_late() if event.channel == CONTENT else []
                pieces.append(Piece(event.channel, text, logprobs))
        return pieces

    def _take_late(self) -> list[TokenLogprob]:
        late, self._late = self._late, []
        return late


def _markup_for(request: GenerationRequest, markup: Markup, offer: Offer) -> Markup:
    """What of the model's markup can occur in this reply."""
    if request.raw:
        return replace(_PLAIN, router=markup.router)
    if not request.grammar or offer.forced:
        return markup
    # What worker/reply_grammar leaves free before the answer.
    kept = replace(markup, structure=())
    if not (request.thinking or request.reasoning_open):
        kept = replace(kept, think_start="", think_end="")
    return kept if markup.syntax else replace(kept, tool_start="", tool_end="", parse=None)


class _Tokens:
    """Which channel each token's text went to: tokens in order on one side, settled stretches of text on the other."""

    def __init__(self) -> None:
        self.reasoning = 0
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._fed = 0
        self._settled = 0
        # Of the first waiting token, whose text may be settled in parts.
        self._touched: set[int] = set()

    def add(self, length: int, logprob: TokenLogprob | None) -> None:
        """A token with so much text; one without belongs to the text that comes next."""
        self._waiting.append((self._fed, self._fed + length, logprob))
        self._fed += length

    def settle(self, length: int, channel: int) -> list[TokenLogprob]:
        """So many characters more went to this channel. The logprobs of content tokens that are complete with it."""
        shown: list[TokenLogprob] = []
        if not length:
            return shown
        self._settled += length
        while self._waiting and self._waiting[0][0] < self._settled:
            self._touched.add(channel)
            _, end, logprob = self._waiting[0]
            if end > self._settled:
                break
            self._waiting.popleft()
            shown += self._count(logprob)
        return shown

    def rest(self, channel: int) -> list[TokenLogprob]:
        """The logprobs of tokens at the end that never got a text, after text of this channel."""
        shown: list[TokenLogprob] = []
        while self._waiting:
            self._touched.add(channel)
            shown += self._count(self._waiting.popleft()[2])
        return shown

    def _count(self, logprob: TokenLogprob | None) -> list[TokenLogprob]:
        touched, self._touched = self._touched, set()
        self.reasoning += REASONING in touched
        return [logprob] if logprob is not None and CONTENT in touched else []
