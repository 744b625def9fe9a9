"""The flags of `millpond loadtest`, each with what it allows.

Owns names, defaults and their checks. Invariant: whatever these flags say, the number of requests that a run may send
is bounded: by --requests, or by --seconds (times --rate).
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.loadtest.plan import Mix, parse_mix

SHARE = "SHARE"


def add_flags(command: argparse.ArgumentParser) -> None:
    """Declare all flags."""
    port = os.environ.get("MILLPOND_PORT", "8080")
    add = command.add_argument
    add("url", nargs="?", default=f"http://127.0.0.1:{port}", help="where the server answers (default: %(default)s)")
    add("--model", default="", help="model id (default: the first one served)")
    add("--key", default=os.environ.get("MILLPOND_API_KEY", ""), help="API key (MILLPOND_API_KEY)")
    _load(command.add_argument_group("load"))
    _requests(command.add_argument_group("requests"))
    _result(command.add_argument_group("result"))


def _load(group: Any) -> None:
    add = group.add_argument
    add(
        "--clients",
        type=numbers(int, 1, 10_000),
        metavar="N,…",
        help="closed loop: so many clients with one request each, a stage for every number (default: 1,4,16)",
    )
    add(
        "--rate",
        type=numbers(float, 0.001, 100_000),
        metavar="R,…",
        help="open loop: requests per second, Poisson, a stage for every number",
    )
    add("--requests", type=number(int, 1, 10**7), help="of a closed stage (default: four per client, at least 32)")
    add("--seconds", type=number(float, 0.1, 86_400), help="of an open stage (default: 30); limit of a closed one")
    add("--warmup", type=number(int, 0, 10**5), default=4, help="requests before it counts (default: %(default)s)")
    add("--impatient", action="store_true", help="closed loop: do not wait for retry-after when refused")
    add("--most-open", type=number(int, 1, 10**6), default=4096, help="open loop: arrivals past so many are not sent")
    add("--timeout", type=number(float, 0.1, 86_400), default=600.0, help="seconds until a request has failed")
    add("--seed", type=int, default=1, help="same seed, same requests (default: %(default)s)")


def _requests(group: Any) -> None:
    add = group.add_argument
    share = number(float, 0, 1)
    add("--prompt", type=_mix, default=parse_mix("64"), metavar="LENGTHS", help="words of a prompt (default: 64)")
    add("--reply", type=_mix, default=parse_mix("64"), metavar="LENGTHS", help="max_tokens (default: 64)")
    add("--shared", type=share, default=0.0, metavar=SHARE, help="of prompts that begin with a common prefix")
    add("--prefixes", type=number(int, 1, 10_000), default=1, help="how many common prefixes there are")
    add("--prefix-words", type=number(int, 1, 10**6), default=256, help="of each (default: %(default)s)")
    add("--cancel", type=share, default=0.0, metavar=SHARE, help="of clients that hang up in the middle")
    add("--patience", type=number(float, 0.001, 86_400), help="seconds without a first token until a client hangs up")
    add("--slow", type=share, default=0.0, metavar=SHARE, help="of clients that read slowly")
    add("--slow-bytes", type=number(int, 1, 10**9), default=1000, help="per second (default: %(default)s)")
    add("--ending", default="", help="text at the end of every prompt")
    add("--body", type=_object, default={}, metavar="JSON", help="more fields for every request")
    add("--whole", action="store_true", help="whole replies instead of streams")


def _result(group: Any) -> None:
    add = group.add_argument
    limit = number(float, 0, 1e9)
    add("--limit-first-ms", type=limit, help="a good reply's first token comes within this")
    add("--limit-token-ms", type=limit, help="a good reply's mean time per token after the first")
    add("--limit-total-s", type=limit, help="a good reply is whole within this")
    add("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    add("--html", type=Path, metavar="FILE", help="write a page with plots that needs no network")


# -- kinds of values


def number(kind: type, low: float, high: float) -> Callable[[str], Any]:
    """A parser of one number."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed is a number from {low:g} to {high:g}")
        return value

    return parse


def numbers(kind: type, low: float, high: float) -> Callable[[str], list[Any]]:
    """A parser of several, with commas."""
    one = number(kind, low, high)
    return lambda text: [one(part) for part in text.split(",")]


def _mix(text: str) -> Mix:
    try:
        return parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; allowed is 64, 32-256, or 32:3,400-600:1") from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a JSON object")
    return value
