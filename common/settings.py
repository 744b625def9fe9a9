"""Typed settings, read once from a mapping and frozen (pure: nothing here looks at the environment by itself).

A process declares a frozen dataclass whose fields are made by setting(); load() reads MILLPOND_<NAME> for each field, and
raises ConfigError naming the setting, the value and what is allowed. The same declarations give the command line's flags
(scripts/options), so that every setting is stated once.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from common.errors import ConfigError

PREFIX = "MILLPOND_"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Parser:
    """parse: text -> value, raising ValueError. allowed: what it takes, for the message."""

    parse: Callable[[str], Any]
    allowed: str


def setting(parser: Parser, default: Any, help: str, *, internal: bool = False) -> Any:
    """A dataclass field read from MILLPOND_<NAME IN CAPITALS>. internal: set by our own parent, not by an operator."""
    metadata = {"parser": parser, "help": help, "internal": internal}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def environment_name(field: str) -> str:
    """max_queue -> MILLPOND_MAX_QUEUE."""
    return PREFIX + field.upper()


def load(kind: type[T], mapping: Mapping[str, str]) -> T:
    """An instance of the settings class `kind` from `mapping`. Raises ConfigError at the first value that is not allowed."""
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        text = mapping.get(environment_name(field.name))
        if text is not None:
            values[field.name] = parsed(environment_name(field.name), text, field.metadata["parser"])
    return kind(**values)


def parsed(name: str, text: str, parser: Parser) -> Any:
    """The value of `text`. Raises ConfigError with the setting's name, the value and what is allowed."""
    try:
        return parser.parse(text)
    except ValueError as error:
        detail = f" ({error})" if str(error) else ""
        raise ConfigError(f"{name}={text!r}: allowed is {parser.allowed}{detail}") from None


def _bounded(number: float, low: float, high: float) -> bool:
    return math.isfinite(number) and low <= number <= high


def integer(low: int, high: int) -> Parser:
    """A whole number in [low, high]."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return Parser(parse, f"a whole number from {low} to {high}")


def number(low: float, high: float, unit: str = "") -> Parser:
    """A finite number in [low, high]."""

    def parse(text: str) -> float:
        value = float(text)
        if not _bounded(value, low, high):
            raise ValueError
        return value

    def quiet(text: str) -> float:
        try:
            return parse(text)
        except ValueError:
            raise ValueError from None

    return Parser(quiet, f"a number from {low:g} to {high:g}" + (f" {unit}" if unit else ""))


def seconds(low: float, high: float) -> Parser:
    """A duration in seconds."""
    return number(low, high, "seconds")


def boolean() -> Parser:
    """1/0, true/false, yes/no, on/off."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

    def parse(text: str) -> bool:
        if text.strip().lower() not in words:
            raise ValueError
        return words[text.strip().lower()]

    return Parser(parse, "1 or 0 (true, false, yes, no, on, off)")


def choice(*values: str) -> Parser:
    """One of `values`, in any case."""

    def parse(text: str) -> str:
        if text.strip().lower() not in values:
            raise ValueError
        return text.strip().lower()

    return Parser(parse, " or ".join(values))


def text(allowed: str = "any text") -> Parser:
    """The text as it is."""
    return Parser(str, allowed)


def listing(item: Parser) -> Parser:
    """Comma-separated items; empty items are dropped."""
    return Parser(
        lambda value: [item.parse(part.strip()) for part in value.split(",") if part.strip()],
        f"a comma-separated list, each {item.allowed}",
    )


def auto_or(parser: Parser, *words: str) -> Parser:
    """The word auto (or another of `words`) as itself, anything else by `parser`."""
    words = words or ("auto",)

    def parse(value: str) -> Any:
        return value.strip().lower() if value.strip().lower() in words else parser.parse(value)

    return Parser(parse, f"{' or '.join(words)}, or {parser.allowed}")


_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def byte_size() -> Parser:
    """A number of bytes: 1048576, 64MiB, 24GB."""

    def parse(value: str) -> int:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", value.strip())
        if not match or match[2].lower() not in _UNITS:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2].lower()])

    return Parser(parse, "a size like 64MiB, 24GB or 1048576")


def share_or_size() -> Parser:
    """A fraction in (0, 1] as float, or a size in bytes as int."""
    size = byte_size()

    def parse(value: str) -> float | int:
        if re.fullmatch(r"0?\.[0-9]+|1(\.0+)?", value.strip()):
            return float(value)
        return size.parse(value)

    return Parser(parse, "a fraction like 0.8, or a size like 24GiB")
