"""The grammar of a whole reply: JSON, forced tool calls, and the reasoning that may come before them (pure).

Must never know an engine or how a grammar is enforced; the text is what worker/engines/grammar.py takes. Invariant: a reply that
follows the grammar to its end parses: as JSON of the schema, or as calls to offered functions with every required
argument (unless a JSON string in them spells a marker of the format, which no grammar here forbids).

Lark is llguidance's dialect: rules of lower case, `%json` for a schema, <[7]> for the token 7, which is how special
tokens are matched, and [suffix=…] for text up to and with a terminator.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.generation import GenerationRequest
from common.json_schema import LARK, inline
from worker.call_syntax import Arguments, CallSyntax, Schema
from worker.engine import NORMAL, Markup, Unsupported
from worker.tool_calls import Offer, resolved

# A small model may never want to end; OpenAI's own models rarely make more calls at once.
MOST_CALLS = 8
# Of arrays and objects in each other, for formats that write them in their own way.
MOST_LEVELS = 8
_ANY = "(?s:.*)"

def reply_grammar(request: GenerationRequest, offer: Offer, markup: Markup, special: Mapping[str, int]) -> str:
    """The grammar text that the reply must follow; "" when it is free.

    special: text of the tokens that are no letters to the grammar (Grammars.special) -> id.

    Raises Unsupported for a choice of tools that this model's format cannot be held to.
    """
    if not offer.forced and (not request.grammar or request.grammar.startswith(LARK)):
        return request.grammar
    thinks = bool(markup.think_start and markup.think_end)
    thought = thinks and (request.thinking or request.reasoning_open)
    calls = bool(offer.definitions) and markup.syntax is not None
    if not (offer.forced or thought or calls or markup.opening != NORMAL):
        return request.grammar
    writer = _Writer(special)
    parts = []
    if thought:
        before = "" if request.reasoning_open else markup.think_start
        closed = f"{writer.literal(before)} {writer.until(markup.think_end)}"
        # Who is already thinking has to end it; whoever may think need not.
        parts.append(closed if request.reasoning_open else f"({closed})?")
    answers = []
    if not offer.forced:
        answers.append(f"{writer.literal(_opening(markup))} {writer.json(json.loads(request.grammar))}")
    if offer.forced or calls:
        answers.append(_calls(writer, offer, markup))
    return writer.text(f"{' '.join(parts)} ({' | '.join(answers)})")


def _opening(markup: Markup) -> str:
    """What announces an answer, for models that announce each part of a reply."""
    moves = markup.states.get(markup.opening, ()) if markup.opening != NORMAL else ()
    return next((marker for marker, to in moves if to == NORMAL), "")


def _calls(writer: "_Writer", offer: Offer, markup: Markup) -> str:
    syntax = markup.syntax
    if syntax is None:
        raise Unsupported("tool_choice: this model's tool calls follow no format that can be enforced")
    wanted = [tool["function"] for tool in offer.definitions if offer.named in ("", tool["function"]["name"])]
    calls = " | ".join(_call(writer, syntax, function, markup.tool_end) for function in wanted)
    block = writer.rule(f"{writer.literal(markup.tool_start)} ({calls}) {writer.literal(markup.tool_end)}")
    return block if offer.named or not offer.parallel else f"{block}{{1,{MOST_CALLS}}}"


def _call(writer: "_Writer", syntax: CallSyntax, function: dict[str, Any], never: str) -> str:
    name, parameters = function["name"], _closed(function.get("parameters") or {})
    arguments = syntax.arguments
    if arguments is None:
        inner = writer.json(parameters)
    else:
        _check_name(name, arguments)
        inner = _arguments(writer, arguments, parameters, never)
    return f"{writer.literal(syntax.head % name)} {inner} {writer.literal(syntax.tail)}"


def _closed(parameters: Schema) -> Schema:
    """Arguments are an object, of the properties that are named unless the client says otherwise."""
    closed = {"type": "object", **parameters}
    if not {"additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf"} & parameters.keys():
        closed["additionalProperties"] = False
    return closed


def _arguments(writer: "_Writer", form: Arguments, parameters: Schema, never: str, depth: int = 0) -> str:
    """The arguments in their order, the optional ones optional, with `between` where two of them meet.

    never: what no text may hold, for it would end the block.
    """
    properties: dict[str, Any] = parameters.get("properties") or {}
    if not properties and {"$ref", "anyOf", "oneOf", "allOf"} & parameters.keys():
        raise Unsupported("tool_choice: this model's tool calls need the arguments' names at the root of the schema")
    listed = parameters.get("required")
    required = set(listed) if isinstance(listed, list) else set()
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    # From the last to the first: what may follow when nothing was written yet, and when something was.
    first = more = ""
    for name, schema in reversed(properties.items()):
        _check_name(name, form)
        argument = f"{writer.literal(form.key % name)} {_value(writer, form, resolved(schema, shared), shared, never, depth)}"
        later = f"{writer.literal(form.between)} {argument} {more}"
        alone = f"{argument} {more}"
        more = writer.rule(later if name in required else f"({later}) | {more or writer.empty}")
        first = writer.rule(alone if name in required else f"({alone}) | {first or writer.empty}")
    return first


def _value(writer: "_Writer", form: Arguments, schema: Any, shared: Schema, never: str, depth: int) -> str:
    schema = schema if isinstance(schema, dict) else {}
    types = _types(schema, shared)
    if not form.is_text(schema, types):
        if types & {"array", "object"} and not form.nested:
            raise Unsupported("tool_choice: this model's tool calls cannot hold arrays or objects")
        if types & {"array", "object"} and form.quote:
            return _nested(writer, form, schema, shared, never, depth)
        return f"{writer.json({**shared, **schema})} {writer.literal(form.end)}"
    end = form.quote + form.end
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices:
        words = (choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
        spelled = " | ".join(writer.literal(word) for word in words if word) or writer.empty
        return f"{writer.literal(form.quote)} ({spelled}) {writer.literal(end)}"
    return f"{writer.literal(form.quote)} {writer.until(end, never, *form.never)}"


def _nested(
    writer: "_Writer", form: Arguments, schema: Schema, shared: Schema, never: str, depth: int
) -> str:
    """An array or object in whose depths, too, texts stand between the format's own quotes."""
    if depth == MOST_LEVELS:
        raise Unsupported(f"tool_choice: this model's tool calls cannot hold more than {MOST_LEVELS} levels")
    if schema.get("type") == "array":
        item = writer.rule(_value(writer, form, resolved(schema.get("items"), shared), shared, never, depth + 1))
        least, most = (schema.get(name) for name in ("minItems", "maxItems"))
        more = f'{item} ("," {item}){{{max(least or 1, 1) - 1},{"" if most is None else most - 1}}}'
        items = writer.empty if most == 0 else more if least else f"({more}) | {writer.empty}"
        return f'"[" ({items}) "]" {writer.literal(form.end)}'
    if schema.get("type") == "object":
        inner = _arguments(writer, form, shared | schema, never, depth + 1)
        return f'"{{" {inner} "}}" {writer.literal(form.end)}'
    raise Unsupported("tool_choice: this model's tool calls cannot hold an array or object beside another type")


def _types(schema: Schema, shared: Schema, depth: int = 0) -> frozenset[str]:
    """The JSON types that the schema names; empty: it names none."""
    found: set[str] = set()
    kind = schema.get("type")
    found |= {kind} if isinstance(kind, str) else {one for one in kind or () if isinstance(one, str)}
    for value in [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]:
        found.add(_NAMES_OF_TYPES.get(type(value), "null"))
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key) or ()]
    inner += [resolved(schema, shared)] if "$ref" in schema else []
    if depth < 8:
        found.update(*(_types(one, shared, depth + 1) for one in inner if isinstance(one, dict)))
    return frozenset(found)


_NAMES_OF_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _check_name(name: str, form: Arguments) -> None:
    if not form.names.fullmatch(name):
        raise Unsupported(f"tool_choice: this model's tool calls cannot hold the name {name[:64]!r}")


def _pattern(text: str) -> str:
    """A regular expression, between slashes, for this very text."""
    return re.sub(r"[][.+*?()|{}^$\\/&~#-]", r"\\\g<0>", text).replace("\n", "\\n")


class _Writer:
    """Collects the rules of one grammar. An expression that it returns can stand anywhere in a rule."""

    empty = '""'

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """This very text."""
        return " ".join(self._literals(text))

    def json(self, schema: Any) -> str:
        """A value of the schema."""
        return self.rule(f"%json {inline(schema)}")

    def until(self, marker: str, *never: str) -> str:
        """Any text, then the marker, which ends it where it first stands. never: what the text may not hold."""
        at = self._marks.search(marker)
        # A special token is no text, so text ends before it by itself.
        letters = marker[: at.start()] if at else marker
        unwanted = [_pattern(text) for text in never if text and not self._marks.search(text)]
        parts = [f"/{_ANY}{_pattern(letters)}/"]
        if letters:
            parts.append(f"~/{_ANY}{_pattern(letters)}(?s:.+)/")
        if unwanted:
            parts.append(f"~/{_ANY}({'|'.join(unwanted)}){_ANY}/")
        self._rules.append(f"T{len(self._rules)}: {' & '.join(parts)}")
        return f"T{len(self._rules) - 1} {self.literal(marker[len(letters) :])}"

    def rule(self, body: str) -> str:
        """A rule of its own."""
        self._rules.append(f"r{len(self._rules)}: {body}")
        return f"r{len(self._rules) - 1}"

    def text(self, start: str) -> str:
        """The grammar."""
        return LARK + "\n".join([f"start: {start}", *self._rules])

    def _literals(self, text: str) -> Iterator[str]:
        at = 0
        for found in self._marks.finditer(text):
            yield from self._letters(text[at : found.start()])
            yield f"<[{self._special[found[0]]}]>"
            at = found.end()
        yield from self._letters(text[at:])

    @staticmethod
    def _letters(text: str) -> Sequence[str]:
        return (json.dumps(text, ensure_ascii=False),) if text else ()
