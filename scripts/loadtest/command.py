"""`millpond loadtest URL`: puts load on an OpenAI-compatible server and says what came of it.

Owns the flags and the order of stages. Exit status 0 when every accepted reply was whole, 1 when one was not: refusals are
answers, not failures. Everything that is sent is bounded by --requests or by --seconds times --rate.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import __version__
from common.errors import ConfigError, MillpondError
from scripts.chat import Endpoint
from scripts.loadtest import runner
from scripts.loadtest.client import Client, Target
from scripts.loadtest.figures import Limits, Summary, summary
from scripts.loadtest.page import page
from scripts.loadtest.plan import Ask, Mix, Shape, asks, parse_mix, poisson
from scripts.loadtest.progress import Progress
from scripts.loadtest.stage import Stage
from scripts.loadtest.tables import tables, warnings


def register(commands: Any) -> None:
    """Add the subcommand."""
    port = os.environ.get("MILLPOND_PORT", "8080")
    command = commands.add_parser(
        "loadtest",
        help="put load on an OpenAI-compatible server and measure it",
        description="Puts load on an OpenAI-compatible server. Lengths are 64, 32-256, or weighted: 32:3,400-600:1.",
    )
    add = command.add_argument
    add("url", nargs="?", default=f"http://127.0.0.1:{port}", help="where the server answers (default: %(default)s)")
    add("--model", default="", help="model id (default: the first one served)")
    add("--key", default=os.environ.get("MILLPOND_API_KEY", ""), help="API key (MILLPOND_API_KEY)")
    load = command.add_argument_group("load").add_argument
    load("--clients", type=_numbers(int, 1, 10_000), metavar="N,…", help="closed loop: so many clients, a stage for each (default: 1,4,16)")
    load("--rate", type=_numbers(float, 0.001, 100_000), metavar="R,…", help="open loop: requests per second, Poisson, a stage for each")
    load("--requests", type=_number(int, 1, 10_000_000), help="requests of a closed stage (default: four per client, at least 32)")
    load("--seconds", type=_number(float, 0.1, 86_400), help="length of an open stage (default: 30), limit of a closed one")
    load("--warmup", type=_number(int, 0, 100_000), default=4, help="requests before the first stage that do not count (default: %(default)s)")
    load("--impatient", action="store_true", help="closed loop: go on at once after a refusal instead of heeding retry-after")
    load("--most-open", type=_number(int, 1, 1_000_000), default=4096, help="open loop: arrivals past so many open requests are not sent")
    load("--timeout", type=_number(float, 0.1, 86_400), default=600.0, help="seconds after which a request has failed")
    load("--seed", type=int, default=1, help="same seed, same requests (default: %(default)s)")
    shape = command.add_argument_group("requests").add_argument
    shape("--prompt", type=_mix, default=parse_mix("64"), metavar="LENGTHS", help="words of the prompts (default: 64)")
    shape("--reply", type=_mix, default=parse_mix("64"), metavar="LENGTHS", help="max_tokens (default: 64)")
    shape("--shared", type=_number(float, 0, 1), default=0.0, metavar="SHARE", help="share of prompts that begin with a common prefix")
    shape("--prefixes", type=_number(int, 1, 10_000), default=1, help="how many common prefixes there are")
    shape("--prefix-words", type=_number(int, 1, 1_000_000), default=256, help="how long they are (default: %(default)s)")
    shape("--cancel", type=_number(float, 0, 1), default=0.0, metavar="SHARE", help="share of clients that hang up in the middle")
    shape("--patience", type=_number(float, 0.001, 86_400), help="seconds without a first token after which a client hangs up")
    shape("--slow", type=_number(float, 0, 1), default=0.0, metavar="SHARE", help="share of clients that read slowly")
    shape("--slow-bytes", type=_number(int, 1, 10**9), default=1000, help="bytes per second that they read (default: %(default)s)")
    shape("--ending", default="", help="text at the end of every prompt")
    shape("--body", type=_object, default={}, metavar="JSON", help="more fields for every request")
    shape("--whole", action="store_true", help="whole replies instead of streams")
    result = command.add_argument_group("result").add_argument
    result("--limit-first-ms", type=_number(float, 0, 1e9), help="a good reply's first token comes within this")
    result("--limit-token-ms", type=_number(float, 0, 1e9), help="a good reply's mean time per token")
    result("--limit-total-s", type=_number(float, 0, 1e9), help="a good reply is whole within this")
    result("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    result("--html", type=Path, metavar="FILE", help="write a page with plots that needs no network")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run all stages and show them. Raises ConfigError, MillpondError."""
    if arguments.clients and arguments.rate:
        raise ConfigError("--clients is a closed loop and --rate an open one: give one of them")
    for path in filter(None, (arguments.json, arguments.html)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no such folder")
    model = arguments.model or _first_model(arguments.url, arguments.key)
    target = Target(arguments.url, model, key=arguments.key, stream=not arguments.whole, extra=arguments.body)
    limits = Limits(
        first_s=_scaled(arguments.limit_first_ms), token_s=_scaled(arguments.limit_token_ms), total_s=arguments.limit_total_s
    )
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    stages, interrupted = Drive(arguments, target).run()
    summaries = [summary(stage, limits) for stage in stages if stage.replies]
    told = {"server": arguments.url, "model": model, "begun": begun, "flags": _flags(arguments)}
    told |= {"client": f"millpond {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"}
    _show(arguments, told, summaries, limits.words())
    if interrupted:
        return 130
    return 1 if not summaries or any(one.outcomes["failed"] for one in summaries) else 0


@dataclass
class Plan:
    """A stage before it runs."""

    stage: Stage
    run: Callable[[Client, Iterator[Ask]], Any]


class Drive:
    """The stages of one command, one after the other."""

    def __init__(self, arguments: argparse.Namespace, target: Target) -> None:
        self._arguments = arguments
        self._target = target
        self._done: list[Stage] = []

    def run(self) -> tuple[list[Stage], bool]:
        """The stages, and whether Ctrl-C ended them."""
        with asyncio.Runner(loop_factory=loop_factory()) as loop:
            interrupted = loop.run(self._all())
        return self._done, interrupted

    async def _all(self) -> bool:
        arguments = self._arguments
        client = Client(self._target, timeout_s=arguments.timeout, patience_s=arguments.patience)
        progress = Progress()
        shape = Shape(
            arguments.prompt,
            arguments.reply,
            arguments.shared,
            arguments.prefixes,
            arguments.prefix_words,
            arguments.cancel,
            arguments.slow,
            arguments.slow_bytes,
            arguments.ending,
        )
        try:
            if arguments.warmup:
                # Prompts of the same kind and not the same ones: a warm prompt cache would flatter the first stage.
                ordinary = asks(Shape(shape.prompt, shape.reply, ending=shape.ending), arguments.seed + 1_000_003)
                await runner.closed(Stage("warm-up", 0, "closed"), client, ordinary, 4, arguments.warmup, 0)
            for number, plan in enumerate(self._plans()):
                work = asyncio.create_task(plan.run(client, asks(shape, arguments.seed + number)))
                self._done.append(plan.stage)
                await runner.watched(plan.stage, client, work, progress.show, progress.every_s)
            return False
        except asyncio.CancelledError:
            return True  # Ctrl-C: what was measured so far is still worth showing
        finally:
            progress.close()
            client.close()

    def _plans(self) -> Iterator[Plan]:
        arguments = self._arguments
        if arguments.rate:
            for number, rate in enumerate(arguments.rate):
                stage = Stage(f"{rate:g}/s", rate, "open")
                due = poisson(rate, arguments.seconds or 30.0, arguments.seed + number)
                yield Plan(stage, lambda client, stream, stage=stage, due=due: runner.arriving(stage, client, stream, due, arguments.most_open))
            return
        for count in arguments.clients or [1, 4, 16]:
            stage = Stage(f"{count} clients" if count > 1 else "1 client", count, "closed")
            requests = arguments.requests or (0 if arguments.seconds else max(32, 4 * count))
            yield Plan(
                stage,
                lambda client, stream, stage=stage, count=count, requests=requests: runner.closed(
                    stage, client, stream, count, requests, arguments.seconds or 0, patient=not arguments.impatient
                ),
            )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: half the client's CPU."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _show(arguments: argparse.Namespace, told: dict[str, Any], summaries: list[Summary], limits: str) -> None:
    print("\n\n".join(table.text() for table in tables(summaries, limits)))
    for line in warnings(summaries):
        print(f"! {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"told": told, "stages": [one.plain() for one in summaries]}, indent=1) + "\n")
    if arguments.html:
        arguments.html.write_text(page(f"Load test of {told['model']}", told, summaries, limits), encoding="utf-8")


def _flags(arguments: argparse.Namespace) -> str:
    hidden = ("command", "run", "url", "model", "key", "json", "html")
    chosen = {name: value for name, value in vars(arguments).items() if name not in hidden and value not in (None, False, "")}
    return " ".join(f"--{name.replace('_', '-')} {_plain(value)}" for name, value in chosen.items())


def _plain(value: Any) -> str:
    if isinstance(value, Mix):
        pairs = zip(value.spans, value.weights, strict=True)
        return ",".join(f"{low}-{high}:{weight:g}" for (low, high), weight in pairs)
    return ",".join(f"{one:g}" for one in value) if isinstance(value, list) else json.dumps(value)


def _first_model(url: str, key: str) -> str:
    served = Endpoint(url, key).models()
    if not served:
        raise MillpondError("no model is served there; give --model")
    return served[0]


def _scaled(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


# -- kinds of flags


def _number(kind: type, low: float, high: float) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return number


def _numbers(kind: type, low: float, high: float) -> Callable[[str], list[Any]]:
    one = _number(kind, low, high)

    def numbers(text: str) -> list[Any]:
        return [one(part) for part in text.split(",")]

    return numbers


def _mix(text: str) -> Mix:
    try:
        return parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value
