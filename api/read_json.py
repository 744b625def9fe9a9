"""Reading a request body as JSON, more strictly than json.loads (pure).

Settles here, once, everything that JSON's grammar or Python's reader would let through and that later steps could not
carry: NaN and infinities, lone surrogates, monstrous integers, unbounded nesting. Invariant: what read_object()
returns can be encoded as UTF-8 text and walked without deep recursion.
"""

import codecs
import json
import math
import re
from typing import Any

MAX_DEPTH = 128
# A conversation's own structure is a handful of levels deep; templates recurse over it.
MAX_DEPTH_MESSAGES = 64
# By their characters, which strings may hold as well: far past any prompt that a model could take.
MAX_CONTAINERS, MAX_VALUES = 500_000, 4_000_000
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class BadBody(ValueError):
    """The body is not JSON as the contract has it; the text says why."""


def _refuse_constant(word: str) -> float:
    raise BadBody(f"The request body is not valid JSON: {word} is not a JSON value.")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadBody("The request body holds a number too large to represent.")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises BadBody."""
    if not body.strip():
        raise BadBody("The request body is empty; a JSON object is required.")
    try:
        # By hand: Python's own codec for it is written in Python.
        text = body.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        raise BadBody("The request body is not valid UTF-8.") from None
    containers = body.count(b"[") + body.count(b"{")
    if containers > MAX_CONTAINERS or body.count(b",") > MAX_VALUES:
        # Reading more keeps the interpreter, and so everybody's streams, for seconds.
        raise BadBody(f"The request body holds more than {MAX_VALUES} values or {MAX_CONTAINERS} arrays and objects.")
    value = _decode(text)
    if not isinstance(value, dict):
        raise BadBody("The request body must be a JSON object.")
    # So few cannot lie deeper than the least limit (messages', and the body's own object comes before them).
    if containers > MAX_DEPTH_MESSAGES:
        _check_depth(value)
    if b"\\u" in body and _SURROGATE_ESCAPE.search(body):
        _check_surrogates(value)
    return value


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except BadBody:
        raise
    except json.JSONDecodeError as error:
        raise BadBody(f"The request body is not valid JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise BadBody(f"The request body is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError:
        # The one thing left: Python's bound on the digits of an integer.
        raise BadBody("The request body is not valid JSON: an integer has more than 4,300 digits.") from None


def _check_depth(value: dict[str, Any]) -> None:
    for name, field in value.items():
        limit = MAX_DEPTH_MESSAGES if name == "messages" else MAX_DEPTH
        if deeper_than(field, limit):
            where = "messages is" if name == "messages" else "The request body is"
            raise BadBody(f"{where} nested deeper than {limit} levels.")


def deeper_than(value: Any, limit: int) -> bool:
    """Whether containers lie in `value` more than `limit` deep, `value` itself counting as the first."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list))
        ]
    return bool(level)


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadBody("The request body holds half of a surrogate pair, which is not text.") from None
