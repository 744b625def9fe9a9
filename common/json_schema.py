"""What of a JSON schema the grammar engine can enforce, known before a request is queued.

Owns the reading of llguidance's verdict and the list of keywords that it leaves out. Must never know mlx, a tokenizer
or a request. Invariant: a schema that check_schema() accepts is accepted by the worker, whose compiler has the same
options.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

# A grammar text that begins so is Lark in llguidance's dialect; any other is a JSON schema.
LARK = "lark:"

# Compact, as the HTTP contract says; lenient: what cannot be enforced is left out with a warning instead of refused.
OPTIONS: dict[str, Any] = {"whitespace_flexible": False, "lenient": True}

# Keywords whose values are schemas, lists of schemas, or schemas by name. Only there are keys keywords.
_ONE = ("items", "additionalItems", "additionalProperties")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ENFORCED = {
    *_ONE, *_MANY, *_NAMED, "$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties",
    "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
}  # fmt: skip
# These say nothing about which values are allowed.
_ANNOTATIONS = {
    "$anchor", "$schema", "$id", "id", "$comment", "title", "description", "default", "readOnly", "writeOnly",
    "examples", "example", "deprecated", "contentMediaType", "contentEncoding", "$vocabulary", "$dynamicAnchor",
    "discriminator",
}  # fmt: skip


def compiled(schema: str) -> str:
    """llguidance's own form of a schema. Raises ValueError for text that is no schema at all."""
    value = json.loads(schema)
    if isinstance(value, bool):
        if not value:
            raise ValueError("the schema false allows no value")
        value = {}
    if not isinstance(value, dict):
        raise ValueError("a JSON schema is an object or a boolean")
    # Options of ours come last, but others that a client might hide in here would still count.
    value.pop("x-guidance", None)
    return LLMatcher.grammar_from_json_schema(value, overrides=OPTIONS)


def check_schema(schema: str) -> tuple[bool, str, list[str]]:
    """(whether it can be enforced, why not, keywords that would be left out), for the text of a JSON schema.

    A caller that must enforce all of it refuses when the list is not empty. Takes 0.1 to 20 ms for schemas of usual
    size.
    """
    try:
        grammar = compiled(schema)
    except (ValueError, RecursionError) as error:
        return False, f"not a JSON schema: {error}", []
    failed, words = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        return False, _one_line(words[0] if words else "it cannot be compiled"), []
    left_out = {keyword for line in words for keyword in _keywords(line)} | set(_unknown(json.loads(schema)))
    return True, "", sorted(left_out)


@dataclass(frozen=True)
class Enforceable:
    """text: the schema as far as it can be enforced; "": it is none. why: what is wrong with the one that was given.
    left_out: keywords of it that are not enforced."""

    text: str
    why: str = ""
    left_out: tuple[str, ...] = ()


def enforceable(schema: str) -> Enforceable:
    """As much of a schema (JSON text) as can be enforced, found by leaving out what llguidance refuses."""
    usable, why, left_out = check_schema(schema)
    if usable:
        return Enforceable(schema, "", tuple(left_out))
    try:
        less, dropped = _without_the_refusable(json.loads(schema))
    except (ValueError, RecursionError):
        return Enforceable("", why)
    usable, _, left_out = check_schema(json.dumps(less, ensure_ascii=False)) if dropped else (False, "", [])
    if not usable:
        return Enforceable("", why)
    return Enforceable(json.dumps(less, ensure_ascii=False), why, tuple(sorted({*left_out, *dropped})))


def _without_the_refusable(schema: Any) -> tuple[Any, set[str]]:
    """The schema without keywords of valid schemas that llguidance has errors for instead of warnings: patterns that it
    cannot compile or combine, numbers past 64 bits, unknown dialects. And their names, where they restrict something."""
    dropped: set[str] = set()

    def walk(node: Any, of_keywords: bool) -> Any:
        if isinstance(node, list):
            return [walk(one, of_keywords) for one in node]
        if not isinstance(node, dict):
            return node
        kept = {}
        for key, value in node.items():
            if of_keywords and (key in _REFUSABLE or (_is_number(value) and abs(value) > _LARGEST)):
                dropped.update({key} - _ANNOTATIONS)
            elif of_keywords and key in ("const", "enum"):
                kept[key] = value
            elif of_keywords and key in _ANNOTATIONS:
                continue
            else:
                kept[key] = walk(value, not (of_keywords and key in _NAMED))
        return kept

    less = walk(schema, True)
    return less, dropped or ({"$schema"} if less != schema else set())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Exactly held by what llguidance computes with.
_LARGEST = 2**53
_REFUSABLE = {"pattern", "patternProperties", "propertyNames"}


def inline(schema: Any) -> str:
    """A schema as it stands behind `%json` in a grammar, with our options. Its $refs must stay inside it."""
    known = {key: value for key, value in schema.items() if key != "x-guidance"} if isinstance(schema, dict) else {}
    return json.dumps(known | {"x-guidance": OPTIONS})


def _keywords(warning: str) -> list[str]:
    """The keywords that a warning is about."""
    found = re.fullmatch(r"Unimplemented keys: (\[.*\])", warning)
    if found:
        return list(json.loads(found[1]))
    if warning.startswith("Unknown format: "):
        return ["format"]
    return ["oneOf"] if warning.startswith("oneOf") else [_one_line(warning)]


def _unknown(schema: Any) -> Iterator[str]:
    """Keys in the place of keywords that llguidance passes over in silence: those of no draft, misspelt ones."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield from (key for key in node if key not in _ENFORCED and key not in _ANNOTATIONS)
        waiting += [node[key] for key in _ONE if key in node]
        for key in _MANY:
            if isinstance(node.get(key), list):
                waiting += node[key]
        for key in _NAMED:
            if isinstance(node.get(key), dict):
                waiting += node[key].values()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
