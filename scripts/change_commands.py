"""`millpond restart, scale, drain, swap, cancel`: orders to a running instance, and what became of them.

Each waits until the pool says how it ended, printing what happens meanwhile. Exit status 0: it is so now; 1: it was refused
or undone, and the last line says why; 3: still under way when --timeout was over.
"""

import argparse
import sys
from typing import Any

from common.errors import ConfigError
from common.models import MODEL, ModelChoice
from scripts.serve_command import located
from scripts.status import connect

# Replies in progress are waited for, and they may take as long as MILLPOND_REQUEST_TIMEOUT allows.
TIMEOUT_S = 900.0
STILL_UNDER_WAY = 3


def register(commands: Any) -> None:
    """Add the subcommands."""
    restart = commands.add_parser("restart", help="restart workers, or lift a failed mark")
    restart.add_argument("target", nargs="?", default="", help="model or worker (default: all)")
    restart.add_argument("--rolling", action="store_true", help="one after the other, so that nobody notices")
    scale = commands.add_parser("scale", help="how many workers a model has")
    scale.add_argument("target", metavar="MODEL")
    scale.add_argument("count", metavar="N", type=int)
    drain = commands.add_parser("drain", help="let a worker finish what it has, and do without it")
    drain.add_argument("target", metavar="WORKER")
    swap = commands.add_parser("swap", help="put another model in a model's place, under its name")
    swap.add_argument("target", metavar="MODEL")
    swap.add_argument("source", metavar="NEW", help="a model folder or a Hugging Face id")
    cancel = commands.add_parser("cancel", help="end requests by their x-request-id")
    cancel.add_argument("target", metavar="REQUEST_ID")
    for command, action in ((restart, "restart"), (scale, "scale"), (drain, "drain"), (swap, "swap"), (cancel, "cancel")):
        command.add_argument("--port", default=None, help="port of the instance (default: MILLPOND_PORT or 8080)")
        command.add_argument(
            "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"how long to wait (default: {TIMEOUT_S:g})"
        )
        command.set_defaults(run=run, action=action)


def run(arguments: argparse.Namespace) -> int:
    """Give the order and tell what comes of it. Raises ConfigError, MillpondError."""
    action = "roll" if getattr(arguments, "rolling", False) else arguments.action
    count, source = getattr(arguments, "count", 0), getattr(arguments, "source", "")
    if action == "scale" and count < 1:
        raise ConfigError(f"{count} workers: there must be at least one")
    if action == "swap":
        source = located(parsed(source)).source
    with connect(arguments) as client:
        reply = client.admin(action, arguments.target, count, source, arguments.timeout, lambda text: print(text, flush=True))
    if reply is None:
        print(f"still under way after {arguments.timeout:g} s; millpond status shows how far it is", file=sys.stderr)
        return STILL_UNDER_WAY
    print(reply.text, file=sys.stdout if reply.done else sys.stderr)
    return 0 if reply.done else 1


def parsed(source: str) -> ModelChoice:
    """What NEW means. Raises ConfigError."""
    try:
        return MODEL.parse(source)
    except ValueError:
        raise ConfigError(f"{source!r}: allowed is {MODEL.allowed}") from None
