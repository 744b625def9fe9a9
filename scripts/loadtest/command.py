"""`millpond loadtest URL`: puts load on an OpenAI-compatible server and says what came of it.

Owns the flags and the order of stages. Exit status 0 when every accepted reply was whole, 1 when one was not: refusals
are answers, not failures. Everything that is sent is bounded by --requests or by --seconds times --rate.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from common import __version__
from common.errors import ConfigError, MillpondError
from scripts.chat import Endpoint
from scripts.loadtest import runner
from scripts.loadtest.client import Client, Target
from scripts.loadtest.figures import Limits, Summary, summary
from scripts.loadtest.flags import add_flags
from scripts.loadtest.page import page
from scripts.loadtest.plan import Ask, Mix, Shape, asks, poisson
from scripts.loadtest.progress import Progress
from scripts.loadtest.stage import Stage
from scripts.loadtest.tables import tables, warnings


def register(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "loadtest",
        help="put load on an OpenAI-compatible server and measure it",
        description="Puts load on an OpenAI-compatible server. Lengths are 64, 32-256, or weighted: 32:3,400-600:1.",
    )
    add_flags(command)
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
    limits = Limits(_seconds(arguments.limit_first_ms), _seconds(arguments.limit_token_ms), arguments.limit_total_s)
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    stages, interrupted = Drive(arguments, target).run()
    summaries = [summary(stage, limits) for stage in stages if stage.replies]
    told = {"server": arguments.url, "model": model, "begun": begun, "flags": _flags(arguments)}
    told |= {"client": f"millpond {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"}
    _show(arguments, told, summaries, limits.words())
    if interrupted:
        return 130
    return 1 if not summaries or any(one.outcomes["failed"] for one in summaries) else 0


# What runs a stage, given the client and the stream of requests.
Work = Callable[[Client, Iterator[Ask]], Coroutine[Any, Any, None]]


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
            for number, (stage, work) in enumerate(self._plans()):
                running = asyncio.create_task(work(client, asks(shape, arguments.seed + number)))
                self._done.append(stage)
                await runner.watched(stage, client, running, progress.show, progress.every_s)
            return False
        except asyncio.CancelledError:
            return True  # Ctrl-C: what was measured so far is still worth showing
        finally:
            progress.close()
            client.close()

    def _plans(self) -> Iterator[tuple[Stage, Work]]:
        if self._arguments.rate:
            for number, rate in enumerate(self._arguments.rate):
                yield self._open(rate, number)
        else:
            for clients in self._arguments.clients or [1, 4, 16]:
                yield self._closed(clients)

    def _open(self, rate: float, number: int) -> tuple[Stage, Work]:
        arguments = self._arguments
        stage = Stage(f"{rate:g}/s", rate, "open")
        due = poisson(rate, arguments.seconds or 30.0, arguments.seed + number)
        return stage, lambda client, stream: runner.arriving(stage, client, stream, due, arguments.most_open)

    def _closed(self, clients: int) -> tuple[Stage, Work]:
        arguments = self._arguments
        stage = Stage(f"{clients} clients" if clients > 1 else "1 client", clients, "closed")
        requests = arguments.requests or (0 if arguments.seconds else max(32, 4 * clients))
        seconds, patient = arguments.seconds or 0.0, not arguments.impatient
        return stage, lambda client, stream: runner.closed(
            stage, client, stream, clients, requests, seconds, patient=patient
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
        plain = {"told": told, "stages": [one.plain() for one in summaries]}
        arguments.json.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.html:
        arguments.html.write_text(page(f"Load test of {told['model']}", told, summaries, limits), encoding="utf-8")


def _flags(arguments: argparse.Namespace) -> str:
    hidden = ("command", "run", "url", "model", "key", "json", "html")
    parts = []
    for name, value in vars(arguments).items():
        if name not in hidden and value not in (None, False, "", {}):
            parts.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {_plain(value)}"))
    return " ".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, Mix):
        return str(value)
    return ",".join(f"{one:g}" for one in value) if isinstance(value, list) else json.dumps(value)


def _first_model(url: str, key: str) -> str:
    served = Endpoint(url, key).models()
    if not served:
        raise MillpondError("no model is served there; give --model")
    return served[0]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
