"""Text inside messages that looks like a tokenizer's special tokens: found, marked, and located in a rendering (pure).

A template is rendered twice, once with such text between two private-use characters; where taking the marks out again
gives the unmarked rendering, the marks say which stretches came from a client. Knows strings, not tokenizers.
Invariant: what unmarked() returns has no mark in it, and its spans lie inside the text, in order, without overlap.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Span = tuple[int, int]

# A search is one uninterruptible call; in stretches of this size it keeps the interpreter a millisecond at most.
WINDOW = 65536
_PRIVATE = range(0x100000, 0x10FFFD)


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the longest of `words` at the leftmost place; built as a trie, so that thousands cost little."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(trie) if trie else r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    branches = [re.escape(character) + _alternatives(child) for character, child in sorted(node.items()) if character]
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{body})?" if "" in node else body


class SpecialText:
    """Finds the texts of some tokens. longest: length of the longest of them."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = frozenset(words)
        self._pattern = any_of(self._words)
        self._longest = max(map(len, self._words), default=0)

    def within(self, value: Any) -> set[str]:
        """Which words stand in the strings of a JSON value; keys count."""
        return {word for text in strings(value) for word in self._found(text)}

    def _found(self, text: str) -> Iterator[str]:
        for start in range(0, len(text), WINDOW):
            for match in self._pattern.finditer(text, start, start + WINDOW + self._longest):
                yield match[0]

    def marked(self, value: Any, marks: tuple[str, str]) -> Any:
        """A copy of a JSON value with every word in its strings between the marks."""
        if not self._words:
            return value
        replacement = f"{marks[0]}\\g<0>{marks[1]}"
        return changed(value, lambda text: self._pattern.sub(replacement, text))


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change) for item in value]
    return value


def free_marks(text: str) -> tuple[str, str]:
    """Two private-use characters that do not stand in `text`."""
    present = set(text)
    found = (chr(code) for code in _PRIVATE if chr(code) not in present)
    return next(found), next(found)


def unmarked(text: str, marks: tuple[str, str]) -> tuple[str, list[Span]]:
    """`text` without its marks, and the spans that stood between an opening and the next closing one.

    A template may cut at a word and leave one mark alone: such a mark only vanishes.
    """
    opening, closing = marks
    parts: list[str] = []
    spans: list[Span] = []
    length = 0
    opened: int | None = None
    for part in re.split(f"([{opening}{closing}])", text):
        if part == opening:
            opened = length
        elif part == closing:
            if opened is not None and opened < length:
                spans.append((opened, length))
            opened = None
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans


def occurrences(words: Iterable[str], text: str) -> list[Span]:
    """Where any of `words` stands in `text`."""
    return [match.span() for match in any_of(words).finditer(text)]
