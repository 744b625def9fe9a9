"""Checks of single request fields, shared by every body that is normalized (pure).

Each take_* reads one field by name out of a body, returns its value or the default when it is absent or null, and
raises a RequestError that names it. Invariant: a boolean is never taken for a number, and every integer returned fits
64 bits.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from api.responses import RequestError

# msgpack's integers end at 64 bits; a seed's meaning does not depend on its size, a limit's saturates.
SEED_MODULUS = 2**63
LARGEST_COUNT = 2**31 - 1
# Longer than any reply; and what travels to a worker with every choice must stay far below a message's bound.
LONGEST_STOPS = 2**20
LONGEST_JSON = 2**22


def refuse(param: str, message: str) -> RequestError:
    """400 naming a field."""
    return RequestError(400, message, param=param)


def shown(value: Any) -> str:
    """A client's value in an error text, short."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def is_integer(value: Any) -> bool:
    """A JSON integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A JSON number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def take_boolean(body: dict[str, Any], name: str, default: bool) -> bool:
    """true or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(name, f"{name} must be true or false, got {shown(value)}")
    return value


def take_object(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    """An object or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise refuse(name, f"{name} must be an object, got {shown(value)}")
    return value


def take_integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number in [low, high] or None."""
    value = body.get(name)
    if value is None:
        return None
    if not is_integer(value) or not low <= value <= high:
        raise refuse(name, f"{name} must be an integer from {low} to {high}, got {shown(value)}")
    return value


def take_number(body: dict[str, Any], name: str, low: float, high: float, *, above: bool = False) -> float | None:
    """A number in [low, high], or in (low, high] when above; None when absent."""
    value = body.get(name)
    if value is None:
        return None
    if not is_number(value) or not low <= value <= high or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise refuse(name, f"{name} must be a number {bounds}, got {shown(value)}")
    return float(value)


def take_positive(body: dict[str, Any], name: str) -> float | None:
    """A finite number above zero."""
    value = body.get(name)
    if value is None:
        return None
    # The upper bound is float's: an integer past it cannot be multiplied with a logit.
    if not is_number(value) or not 0 < value <= 1e30:
        raise refuse(name, f"{name} must be a number above 0, got {shown(value)}")
    return float(value)


def take_count(body: dict[str, Any], names: Iterable[str], default: int, cap: int) -> int:
    """The first of `names` that is given, a positive integer of any size, clamped to cap."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not is_integer(value) or value < 1:
            raise refuse(name, f"{name} must be a positive integer, got {shown(value)}")
        return min(value, cap)
    return min(default, cap)


def take_stop(body: dict[str, Any]) -> list[str]:
    """A non-empty string or up to 16 of them."""
    value = body.get("stop")
    if value is None:
        return []
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise refuse("stop", f"stop must be a non-empty string or an array of them, got {shown(value)}")
    if len(found) > 16:
        raise refuse("stop", f"stop may hold at most 16 strings, got {len(found)}")
    if sum(map(len, found)) > LONGEST_STOPS:
        raise refuse("stop", f"stop may hold at most {LONGEST_STOPS} characters in all")
    return found


def take_seed(body: dict[str, Any]) -> int | None:
    """Any integer, folded into 63 bits."""
    value = body.get("seed")
    if value is None:
        return None
    if not is_integer(value):
        raise refuse("seed", f"seed must be an integer, got {shown(value)}")
    return value % SEED_MODULUS


def take_top_k(body: dict[str, Any]) -> int | None:
    """A count of candidates; 0 and -1 are off."""
    value = body.get("top_k")
    if value is None:
        return None
    if not is_integer(value) or value < -1:
        raise refuse("top_k", f"top_k must be an integer of at least 0 (or -1 for off), got {shown(value)}")
    return min(max(value, 0), LARGEST_COUNT)


def take_logit_bias(body: dict[str, Any]) -> dict[int, float] | None:
    """Token id -> bias in [-100, 100]."""
    value = take_object(body, "logit_bias")
    if value is None:
        return None
    found = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10) or int(token) > LARGEST_COUNT:
            raise refuse("logit_bias", f"logit_bias: {shown(token)} is not a token id")
        if not is_number(bias) or not -100 <= bias <= 100:
            raise refuse(
                "logit_bias", f"logit_bias: the bias of {token} must be a number from -100 to 100, got {shown(bias)}"
            )
        found[int(token)] = float(bias)
    return found


def take_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling fields that are given; api/served adds the model's defaults."""
    if _SAMPLING.isdisjoint(body):
        return {}
    given = {name: take(body) for name, take in _TAKERS.items()}
    return {name: value for name, value in given.items() if value is not None}


_TAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "temperature": lambda body: take_number(body, "temperature", 0, 2),
    "top_p": lambda body: take_number(body, "top_p", 0, 1, above=True),
    "top_k": take_top_k,
    "min_p": lambda body: take_number(body, "min_p", 0, 1),
    "seed": take_seed,
    "repetition_penalty": lambda body: take_positive(body, "repetition_penalty"),
    "presence_penalty": lambda body: take_number(body, "presence_penalty", -2, 2),
    "frequency_penalty": lambda body: take_number(body, "frequency_penalty", -2, 2),
    "logit_bias": take_logit_bias,
}
_SAMPLING = frozenset(_TAKERS)


def check_size(param: str, value: Any) -> None:
    """400 for JSON that would be too much to hand to a worker."""
    if len(json.dumps(value, ensure_ascii=False)) > LONGEST_JSON:
        raise refuse(param, f"{param} may hold at most {LONGEST_JSON} characters of JSON")


def check_refused(body: dict[str, Any], refused: dict[str, str]) -> None:
    """400 for a known field that Millpond does not serve; null is absent."""
    for name, reason in refused.items():
        if body.get(name) is not None:
            raise refuse(name, f"{name} is not supported{reason}")


def ignored_fields(
    body: dict[str, Any], known: frozenset[str], exempt: frozenset[str], strict: bool
) -> tuple[str, ...]:
    """Names nobody honours, in the body's order. Raises RequestError for the first that strict mode refuses."""
    ignored = []
    for name, value in body.items():
        if name in known or value is None:
            continue
        if strict and name not in exempt:
            raise refuse(name[:256], f"{shown(name)} is not a field of this route")
        ignored.append(name)
    return tuple(ignored)
