"""From the text of a tool block to the calls in it (pure).

Takes one block after the other: open(), feed(), close(). A block is a call once it parses, or earlier where the format
writes arguments as JSON: there a call to an offered function begins to stream with the first key, and from then on it
is a call whose arguments are what the model wrote. Must never know how a block is found. Invariant: a block either
became calls, or its text comes back whole, markers included; how it was cut makes no difference.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import ProtocolError
from common.generation import CONTENT, REASONING, TOOL_CALL
from worker.engine import CallForm, Markup
from worker.reasoning import HIDDEN

# The { of arguments with something after it that JSON allows there: most of what is no JSON is refused right here.
ARGUMENTS = r'(?=\{\s*["}])'
TAGGED_JSON = CallForm(
    opens="{[",
    head=re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*' + ARGUMENTS),
    # A brace too many is the most common slip of small models, and harms nothing.
    tail=re.compile(r"[\s}]*"),
)

# A head is looked for in so much of a block only: names are short, and each token that comes means another look.
_LONGEST_HEAD = 512


class Event(NamedTuple):
    """What became certain. raw: the characters of the reply, as they were fed, that are settled with it."""

    channel: int
    text: str
    raw: int
    call: int = -1
    name: str = ""


@dataclass(frozen=True)
class Offer:
    """The request's tools. forced: the model must call one; named: this one."""

    definitions: tuple[dict[str, Any], ...] = ()
    names: frozenset[str] = frozenset()
    forced: bool = False
    parallel: bool = True
    named: str = ""


def read_offer(text: str) -> Offer:
    """The tools of a GenerationRequest. Raises ProtocolError for text that no API of ours writes."""
    if not text:
        return Offer()
    try:
        wanted = json.loads(text)
        if isinstance(wanted, list):
            wanted = {"tools": wanted}
        definitions = tuple(_as_parsers_read_it(tool) for tool in wanted["tools"])
        names = frozenset(tool["function"]["name"] for tool in definitions)
        named = str(wanted["choice"]) if wanted.get("named") else ""
        forced = bool(named) or wanted.get("choice") == "required"
        return Offer(definitions, names, forced, wanted.get("parallel", True) is not False, named)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"tools are not a list of tools: {type(error).__name__}") from None


def _as_parsers_read_it(tool: dict[str, Any]) -> dict[str, Any]:
    """A definition as mlx-lm's parsers expect one: with parameters, and with properties that are objects and say
    themselves what they are."""
    function = tool["function"]
    parameters = rooted(function.get("parameters") or {})
    properties = parameters.get("properties")
    found = properties.items() if isinstance(properties, dict) else ()
    known = {name: resolved(schema, parameters) for name, schema in found}
    return tool | {"function": function | {"parameters": parameters | {"properties": known}}}


def rooted(parameters: dict[str, Any]) -> dict[str, Any]:
    """A schema with its properties at the root, where a $ref or an allOf of one part has them elsewhere."""
    only = parameters.get("allOf")
    if isinstance(only, list) and len(only) == 1 and isinstance(only[0], dict):
        parameters = {key: value for key, value in parameters.items() if key != "allOf"} | only[0]
    found = resolved(parameters, parameters)
    return found | {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A schema of `root` with what its own $ref means; {} for what is no object."""
    if not isinstance(schema, dict):
        return {}
    reference, target = schema.get("$ref"), root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    for step in reference[2:].split("/"):
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return target | rest if isinstance(target, dict) and "$ref" not in target else schema


class ToolCalls:
    """The blocks of one reply. found: calls so far. unfinished: the last one's arguments were cut off."""

    def __init__(self, markup: Markup, offer: Offer) -> None:
        self._markup = markup
        self._offer = offer
        self.found = 0
        self.unfinished = False
        self.is_open = False

    @property
    def enough(self) -> bool:
        """The one call that the client wants is there."""
        return self.found > 0 and not self._offer.parallel and not (self.is_open and self._arguments)

    def open(self, marker: str, home: int) -> None:
        """A block begins. home: the channel of its text should it be no call."""
        self.is_open = True
        self._home = home
        self._start = marker
        self._raw = len(marker)
        self._text = ""
        self._arguments: _JsonObject | None = None
        self._streamed = False
        # In reasoning a marker is often only talked about: there a call must prove itself to its end.
        self._may_stream = self._markup.form is not None and home == CONTENT

    def feed(self, text: str) -> list[Event]:
        """More of the block."""
        self._raw += len(text)
        self._text += self._markup.router.spelled(text)
        events: list[Event] = []
        while not self.enough:
            if self._arguments is None and not self._begin(events):
                break
            if not self._stream(events):
                break
        return events

    def close(self, marker: str = "") -> list[Event]:
        """The block ends with this marker, or because no more text comes."""
        self._raw += len(marker)
        enough, self.is_open = self.enough, False
        if enough:
            return self._rest()
        if self._arguments is not None:
            self.unfinished = not marker
            return self._rest()
        if self._streamed:
            return self._after_calls()
        calls = self._parsed(self._text)
        return self._events(calls) if calls else self._back(self._text, marker)

    def give_up(self) -> list[Event]:
        """It was no block."""
        self.is_open = False
        return self._back(self._text, "")

    # --- Arguments that stream ----------------------------------------------------------------------------------------

    def _begin(self, events: list[Event]) -> bool:
        """Whether the next call's head is there."""
        form = self._markup.form
        if not self._may_stream or form is None:
            return False
        start = form.tail.match(self._text).end() if self._streamed else 0  # type: ignore[union-attr]
        head = form.head.match(self._text, start, start + _LONGEST_HEAD)
        if head is None:
            return False
        if head["name"] not in self._offer.names:
            self._may_stream = False
            return False
        events.append(Event(TOOL_CALL, "", self._settle(), self.found, head["name"]))
        self.found += 1
        self._streamed = True
        self._text = self._text[head.end() :]
        self._arguments = _JsonObject()
        return True

    def _stream(self, events: list[Event]) -> bool:
        """Give out the arguments that are there. Whether they are complete."""
        assert self._arguments is not None
        length = self._arguments.feed(self._text)
        if length:
            events.append(Event(TOOL_CALL, self._text[:length], self._settle(), self.found - 1))
        self._text = self._text[length:]
        if not self._arguments.complete:
            return False
        self._arguments = None
        return True

    def _after_calls(self) -> list[Event]:
        """What followed the last call that streamed: nothing, a call to a function that was not offered, or text."""
        rest = self._text[self._markup.form.tail.match(self._text).end() :]  # type: ignore[union-attr]
        calls = self._parsed(rest) if rest else []
        if calls:
            return self._events(calls)
        return [Event(CONTENT, rest, self._settle())] if rest else self._rest()

    # --- Whole blocks -------------------------------------------------------------------------------------------------

    def _parsed(self, text: str) -> list[tuple[str, str]]:
        assert self._markup.parse is not None
        try:
            calls = checked_calls(self._markup.parse(text, list(self._offer.definitions)))
        except Exception:  # the parsers raise whatever their formats' faults lead to
            return []
        if self._home == REASONING and not all(name in self._offer.names for name, _ in calls):
            return []
        return calls

    def _events(self, calls: list[tuple[str, str]]) -> list[Event]:
        events = []
        for name, arguments in calls if self._offer.parallel else calls[:1]:
            events.append(Event(TOOL_CALL, arguments, self._settle(), self.found, name))
            self.found += 1
        return events

    def _back(self, text: str, marker: str) -> list[Event]:
        spelled = self._markup.router.spelled
        return [Event(self._home, spelled(self._start) + text + spelled(marker), self._settle())]

    def _rest(self) -> list[Event]:
        return [Event(HIDDEN, "", self._settle())]

    def _settle(self) -> int:
        raw, self._raw = self._raw, 0
        return raw


def checked_calls(found: Any) -> list[tuple[str, str]]:
    """(name, arguments as JSON text) of what a parser returned. Raises ValueError or TypeError for what is no call."""
    calls = found if isinstance(found, list) else [found]
    if not calls:
        raise ValueError("no call")
    return [_checked(call) for call in calls]


def _checked(call: Any) -> tuple[str, str]:
    if not isinstance(call, dict):
        raise TypeError("a call is an object")
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("a call has a name")
    name.encode()
    if isinstance(arguments, str):
        # Some templates show arguments as a JSON string, and models follow them.
        text, arguments = arguments, json.loads(arguments, parse_constant=_refuse)
    else:
        arguments = {} if arguments is None else arguments
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which only an escape can express.
        text = json.dumps(arguments, allow_nan=False)
    return name, text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class _JsonObject:
    """Finds the end of one JSON object in streamed text."""

    _MARK = re.compile(r'["\\{}]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    def feed(self, text: str) -> int:
        """How much of the text belongs to the object."""
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while found := self._MARK.search(text, at):
            at = found.end()
            mark = found[0]
            if mark == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if mark == "\\":
                    self._escaped = at == len(text)
                    at += 1
            elif mark != "\\":
                self._depth += 1 if mark == "{" else -1
                if not self._depth:
                    self.complete = True
                    return at
        return len(text)
