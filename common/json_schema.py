"""What of a JSON schema the grammar engine can enforce, known before a request is queued.

Owns the reading of llguidance's verdict and the list of keywords that it leaves out. Must never know mlx, a tokenizer
or a request. Invariant: a schema that check_schema() accepts is accepted by the worker, whose compiler has the same
options.
"""

import json
import re
from collections.abc import Iterator
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
    "examples", "example", "deprecated", "contentMediaType", "contentEncoding",
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
