"""`millpond plan`: what `millpond serve` with the same settings would start, before anything is loaded.

Owns the table and its JSON. Reads configs and the headers of weights, asks the device once, starts nothing.
"""

import argparse
import dataclasses
import json
import os
from typing import Any

from common import settings
from scripts import options, serve_command
from worker import sizing
from worker.settings import WorkerSettings
from worker.shares import Placed
from worker.sizing import Survey

HEADS = (
    "device", "model", "weights", "KV per token", "overhead", "fit", "workers", "share", "slots", "KV tokens",
    "prompt cache", "limited by",
)  # fmt: skip
# Columns of words; numbers stand right.
WORDS = (0, 1, 11)


def register(commands: Any) -> None:
    """Add the subcommand."""
    what = "Show how serve with the same settings would divide the memory, before anything is loaded."
    command = commands.add_parser("plan", help="show how memory would be divided", description=what)
    options.add_flags(command)
    command.add_argument("--json", action="store_true", help="the whole plan as JSON, sizes in bytes")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError for what does not fit."""
    chosen = settings.load(WorkerSettings, options.resolved(arguments, os.environ))
    chosen = dataclasses.replace(chosen, model=serve_command.models(chosen))
    made = sizing.survey(chosen)
    print(json.dumps(as_json(made), indent=2) if arguments.json else "\n".join(table(made)))
    return 0


def table(made: Survey) -> list[str]:
    """Lines for people."""
    rows = [list(HEADS)]
    lines = []
    for index, budget in enumerate(made.budgets):
        name, memory = made.machine.names[index], made.machine.memory[index]
        lines.append(f"{made.machine.backend} {index}: {name}, {amount(memory)}, of which {amount(budget)} may be used")
        rows += [_row(index, placed) for placed in made.placed]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines.append("")
    for row in rows:
        cells = [
            cell.ljust(width) if column in WORDS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.append("")
    lines += [note for placed in made.placed for note in _notes(placed)]
    lines.append("~ estimated; a worker measures it when its model is loaded, and corrects its slots and KV tokens")
    return lines


def _row(index: int, placed: Placed) -> list[str]:
    plan, guess = placed.plan, "~" if placed.plan.estimated else ""
    here = placed.devices.count(index)
    return [
        str(index),
        placed.model,
        guess + amount(plan.weight_bytes),
        guess + amount(plan.kv_bytes_per_token),
        "~" + amount(plan.overhead_bytes),
        str(placed.fits[index]),
        str(here),
        amount(plan.share_bytes) if here else "-",
        str(plan.slots) if here else "-",
        guess + str(plan.kv_tokens) if here else "-",
        amount(plan.prompt_cache_bytes) if here else "-",
        _limit(placed),
    ]


def _limit(placed: Placed) -> str:
    return "memory" if placed.plan.limit == "memory" else f"slots x context ({placed.context})"


def _notes(placed: Placed) -> list[str]:
    """What the table has no column for."""
    kv, notes = placed.plan.kv, []
    for window, size in kv.windows:
        notes.append(f"{placed.model}: {amount(size)} of a token's KV only in its row's last {window} tokens")
    if kv.row:
        notes.append(f"{placed.model}: {amount(kv.row)} a row, however long it is")
    notes.append(f"{placed.model}: weights held {'as float32' if placed.plan.precision == 'float32' else 'as stored'}")
    return notes


def as_json(made: Survey) -> dict[str, Any]:
    """The same for programs."""
    devices = []
    for index, budget in enumerate(made.budgets):
        models = [_model(index, placed) for placed in made.placed]
        devices.append(
            {
                "index": index,
                "name": made.machine.names[index],
                "memory_bytes": made.machine.memory[index],
                "budget_bytes": budget,
                "models": models,
            }
        )
    return {"backend": made.machine.backend, "devices": devices}


def _model(index: int, placed: Placed) -> dict[str, Any]:
    plan = placed.plan
    guessed = ["weight_bytes", "kv_bytes_per_token", "slots", "kv_tokens"] if plan.estimated else []
    return {
        "model": placed.model,
        "weight_bytes": plan.weight_bytes,
        "weights": plan.precision,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv": {
            "token_bytes": plan.kv.token,
            "windows": [{"tokens": tokens, "token_bytes": size} for tokens, size in plan.kv.windows],
            "row_bytes": plan.kv.row,
        },
        "overhead_bytes": plan.overhead_bytes,
        "workers_that_fit": placed.fits[index],
        "workers": placed.devices.count(index),
        "share_bytes": plan.share_bytes,
        "slots": plan.slots,
        "kv_tokens": plan.kv_tokens,
        "context": placed.context,
        "prompt_cache_bytes": plan.prompt_cache_bytes,
        "limited_by": plan.limit,
        "estimated": ["overhead_bytes", *guessed],
    }


def amount(size: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size} B"

