"""docs/operations.md names every setting, metric and command that there is, and none that there is not."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import api.metrics
from common import settings
from scripts import options
from scripts.millpond import parser

ROOT = Path(__file__).resolve().parents[2]
# Defaults that count cores.
OF_THE_MACHINE = {"api_processes", "prompt_threads"}
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_setting_has_its_row_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(MILLPOND_[A-Z_]+)` \| ([^|]*) \|", TEXT, re.MULTILINE))
    wanted = {settings.environment_name(field.name): shown(field) for field in options.declared()}
    assert rows == wanted


def shown(field: "dataclasses.Field[Any]") -> str:
    """A default as the table has it."""
    if field.name in OF_THE_MACHINE:
        return "min(4, cores)"
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
    if isinstance(default, bool):
        return str(int(default))
    return f"{default:g}" if isinstance(default, float) else str(default or (default == 0 and "0") or "-")


def test_every_metric_is_explained() -> None:
    source = Path(api.metrics.__file__).read_text(encoding="utf-8")
    metrics = set(re.findall(r'"(millpond_[a-z_]+)"', source))
    explained = {name.removesuffix("_total") for name in re.findall(r"`(millpond_[a-z_]+)", TEXT)}
    assert len(metrics) > 5 and explained == metrics, metrics ^ explained


def test_every_command_is_named() -> None:
    (commands,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    missing = [name for name in commands.choices if f"millpond {name}" not in TEXT]
    assert not missing
