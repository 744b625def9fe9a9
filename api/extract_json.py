"""The first JSON value in a reply, for JSON mode on lanes without grammar (pure).

What counts as JSON, and how the value is written back, is CPython's: raw_decode from each brace or bracket in turn,
json.dumps with default separators and raw non-ASCII. Invariant: the result is `text` itself or one JSON value, and
the work done is bounded by WORK_PER_CHARACTER x length + WORK_FLOOR characters read.
"""

import json
import re
import sys

MAX_DEPTH = 1024
WORK_PER_CHARACTER = 8
WORK_FLOOR = 1_000_000

_OPENING_FENCE = re.compile(r"```(?:json)?")
_START = re.compile(r"[\[{]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_decode = json.JSONDecoder().raw_decode
# CPython counts one level of recursion per container; the rest is for whoever calls us. A process that calls this from
# several threads raises its limit to this once, since the limit is shared by all of them.
STACK_NEEDED = MAX_DEPTH + 1000
# Each error counts the lines before it, so what lies behind is dropped now and then: it would be most of the work.
_BEHIND = 4096
# Below this many opening brackets no value can come near CPython's own limit.
_SHALLOW = 300


def extract_json(text: str) -> str:
    """`text` reduced to the first JSON value in it, or `text` unchanged."""
    inner = _without_fences(text.strip())
    budget = WORK_PER_CHARACTER * len(inner) + WORK_FLOOR
    if inner.count("[") + inner.count("{") <= _SHALLOW or sys.getrecursionlimit() >= STACK_NEEDED:
        found = _first_value(inner, budget)
    else:
        found = _with_deep_stack(inner, budget)
    return text if found is None else found


def _without_fences(text: str) -> str:
    opening = _OPENING_FENCE.match(text)
    if opening:
        text = text[opening.end() :].strip()
    if text.endswith("```"):
        text = text[:-3].strip()
    return text


def _with_deep_stack(text: str, budget: int) -> str | None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, STACK_NEEDED))
    try:
        return _first_value(text, budget)
    finally:
        sys.setrecursionlimit(limit)


def _first_value(text: str, budget: int) -> str | None:
    start = _START.search(text)
    while start and budget > 0:
        at = start.start()
        if at > _BEHIND:
            text, at = text[at:], 0
        try:
            value, end = _decode(text, at)
        except json.JSONDecodeError as error:
            budget -= max(error.pos - at, 1)
        except RecursionError:
            return None
        except ValueError:
            # An integer past 4,300 digits, wherever it stands: CPython does not say, so the worst is taken.
            budget -= len(text) - at
        else:
            return None if _depth(text, at, end) > MAX_DEPTH else _written(value)
        start = _START.search(text, at + 1)
    return None


def _depth(text: str, start: int, end: int) -> int:
    if text.count("[", start, end) + text.count("{", start, end) <= MAX_DEPTH:
        return 0
    depth = deepest = 0
    for match in _STRUCTURE.finditer(text, start, end):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in "]}":
            depth -= 1
    return deepest


def _written(value: object) -> str:
    return _SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False))
