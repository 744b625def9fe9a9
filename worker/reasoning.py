"""Which part of a reply's text is content, reasoning or tool markup (pure).

A table of markers moves the text from state to state, as mlx-lm's TextStateMachine does; here the markers are told too,
because markup that is no call is given back whole and every token is accounted for. Stop strings are found by the same
search, so that whatever is complete first wins. Must never know what a tool block holds, or of events. Invariant: the
stretches' texts, joined, are the text that was fed, up to a stop string; how it was cut makes no difference.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from common.generation import CONTENT, REASONING
from worker.engine import IN_REASONING, IN_TOOL, NORMAL, Markup
from worker.markers import Seeker

# What a stretch is besides CONTENT and REASONING. HIDDEN: a marker, or framing, that nobody is shown. The others are a
# tool block: what opened it, its text, what closed it ("": something else did), or word that it is no block after all.
HIDDEN, OPENS, BODY, CLOSES, ABANDONS = -1, 10, 11, 12, 13

_TOOL_IN_REASONING = "tool in reasoning"
# An answer in which nothing is a marker any more.
_ANSWER = "answer"
_KINDS = {NORMAL: CONTENT, IN_REASONING: REASONING, IN_TOOL: BODY, _ANSWER: CONTENT, _TOOL_IN_REASONING: BODY}
_IN_REASONING = (IN_REASONING, _TOOL_IN_REASONING)


class Stretch(NamedTuple):
    """A piece of one kind. home: what a tool block's text is if it turns out to be none."""

    kind: int
    text: str
    home: int = CONTENT


# state -> marker -> (next state, what the marker itself is)
Table = dict[str, dict[str, tuple[str, int]]]


class ReasoningSplitter:
    """Cuts one reply into stretches."""

    def __init__(
        self,
        markup: Markup,
        stops: Collection[str] = (),
        *,
        tools: bool = False,
        reasoning_open: bool = False,
        stop_in_reasoning: bool = False,
        plain_answer: bool = False,
    ) -> None:
        """tools: calls may come. reasoning_open: the prompt ends inside a reasoning block. plain_answer: once content
        has begun the rest is content, whatever it looks like: a grammar makes JSON of it, and markers are in its
        strings."""
        self._table = _table(markup, tools)
        self._opens = markup.form.opens if markup.form else ""
        self._stops = frozenset(stops)
        self._stop_in_reasoning = stop_in_reasoning
        self._plain_answer = plain_answer
        self._unproven = False
        self.stopped = False
        self._enter(IN_REASONING if reasoning_open and markup.think_end else markup.opening)

    def feed(self, text: str) -> list[Stretch]:
        """The stretches that are certain now, none of them empty but CLOSES and ABANDONS."""
        found: list[Stretch] = []
        while text and not self.stopped:
            text, later = self._prove(text, found) if self._unproven else (text, "")
            before, marker, rest = self._seeker.feed(text)
            if before and self._plain_answer and self._state == NORMAL:
                text = before + marker + (rest if marker else self._seeker.flush())
                self._enter(_ANSWER)
                continue
            if before:
                found.append(Stretch(self._kind, before, self._home))
            if marker:
                self._cross(marker, found)
            text = rest + later
        return found

    def flush(self) -> list[Stretch]:
        """No more text comes: what was held is text of where it stands."""
        held = self._seeker.flush()
        return [Stretch(self._kind, held, self._home)] if held else []

    def _enter(self, state: str) -> None:
        self._state = state
        self._kind = _KINDS.get(state, HIDDEN)
        self._home = REASONING if state in _IN_REASONING else CONTENT
        self._edges = self._table.get(state, {})
        asked = self._stop_in_reasoning if state in _IN_REASONING else state in _KINDS
        self._live_stops = self._stops if asked else frozenset()
        self._seeker = Seeker([*self._live_stops, *self._edges])

    def _cross(self, marker: str, found: list[Stretch]) -> None:
        if marker in self._live_stops:
            self.stopped = True
            return
        state, kind = self._edges[marker]
        if self._kind == BODY and kind == HIDDEN:
            # The end of the reasoning ends the block in it.
            found.append(Stretch(CLOSES, "", self._home))
        found.append(Stretch(kind, marker, self._home))
        self._unproven = kind == OPENS and bool(self._opens)
        self._enter(state)

    def _prove(self, text: str, found: list[Stretch]) -> tuple[str, str]:
        """How a block begins: text that mentions a marker is not held back for a call that cannot come.

        (the text to go on with, what comes after it).
        """
        begun = text.lstrip()
        if len(begun) < len(text):
            return text[: len(text) - len(begun)], begun
        self._unproven = False
        if text[0] not in self._opens:
            found.append(Stretch(ABANDONS, "", self._home))
            text = self._seeker.flush() + text
            self._enter(IN_REASONING if self._home == REASONING else NORMAL)
        return text, ""


def _table(markup: Markup, tools: bool) -> Table:
    table: Table = {}

    def edge(state: str, marker: str, to: str, kind: int) -> None:
        for form in markup.router.forms(marker):
            table.setdefault(state, {})[form] = to, kind

    thinks = bool(markup.think_start and markup.think_end)
    if thinks:
        edge(NORMAL, markup.think_start, IN_REASONING, HIDDEN)
        edge(IN_REASONING, markup.think_end, NORMAL, HIDDEN)
        # Said once too often they are still no text.
        edge(NORMAL, markup.think_end, NORMAL, HIDDEN)
        edge(IN_REASONING, markup.think_start, IN_REASONING, HIDDEN)
    for marker in markup.structure:
        edge(NORMAL, marker, NORMAL, HIDDEN)
    for state, marker, to in _moves(markup):
        if to != IN_TOOL:
            edge(state, marker, to, HIDDEN)
        elif tools:
            edge(state, marker, IN_TOOL, OPENS)
        else:
            edge(state, marker, NORMAL, CONTENT)
    if tools and markup.tool_start:
        if not any(to == IN_TOOL for _, _, to in _moves(markup)):
            edge(NORMAL, markup.tool_start, IN_TOOL, OPENS)
        if markup.tool_end:
            edge(IN_TOOL, markup.tool_end, NORMAL, CLOSES)
        if thinks:
            # Models forget to end their reasoning before they call.
            edge(IN_REASONING, markup.tool_start, _TOOL_IN_REASONING, OPENS)
            edge(_TOOL_IN_REASONING, markup.think_end, NORMAL, HIDDEN)
            if markup.tool_end:
                edge(_TOOL_IN_REASONING, markup.tool_end, IN_REASONING, CLOSES)
    return table


def _moves(markup: Markup) -> Sequence[tuple[str, str, str]]:
    return [(state, marker, to) for state, moves in markup.states.items() for marker, to in moves]
